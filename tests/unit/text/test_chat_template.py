"""Every text of a conversation reaches the prompt in the form that the template takes, or is refused by name.

The templates have the traits of published ones, which the names tell.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.unit.text.trained_tokenizers import byte_level
from text.chat_template import BadConversation, ChatTemplate, TemplateOptions

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }};{% endif %}{% endfor %}{% endfor %}"
)
FIRST_PART = "{% for m in messages %}<{{ m.role }}>{{ m.content[0]['text'] }}{% endfor %}"
STRIPPED_PARTS = "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text.strip() }}{% endfor %}"
PARTS_OF_USERS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}"
    "{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
LAST_SYSTEM = (
    "{% set ns = namespace(text='') %}"
    "{% for m in messages if m.role == 'system' %}{% set ns.text = m.content %}{% endfor %}"
    "<system>{{ ns.text }}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
IN_TURN = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set others = messages[1:] if system else messages %}{{ system }}"
    "{% for m in others %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
)
SYSTEM_WITH_LAST_USER = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'user' and loop.last %}<user>{{ system }}|{{ m.content }}"
    "{% elif m.tool_calls %}<calls>{{ m.tool_calls[0].function | tojson }}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
WITHOUT_REASONING = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content.split('</think>')[-1].strip() if m.role == 'assistant' else m.content }}{% endfor %}"
)
ESCAPED = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ {'result': m.content | tojson} | tojson if m.role == 'tool' else m.content | upper | trim }}"
    "{% endfor %}"
)
OBJECT_ARGUMENTS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{% for key, value in call.function.arguments | items %}{{ key }}={{ value }};{% endfor %}{% endfor %}"
    "{% endfor %}"
)
OBJECTS_OR_NOTHING = OBJECT_ARGUMENTS.replace(
    "{% for key, value in call.function.arguments | items %}",
    "{% for key, value in (call.function.arguments if call.function.arguments is mapping else {}) | items %}",
)
JSON_ARGUMENTS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name + '(' + call.function.arguments + ')' }}{% endfor %}{% endfor %}"
)
ANY_ARGUMENTS = JSON_ARGUMENTS.replace("call.function.arguments +", "call.function.arguments | tojson +")
CALLS_OR_TEXT = (
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
NAME_OR_TEXT = CALLS_OR_TEXT.replace(
    "{{ m.tool_calls[0].function | tojson }}", "[{{ m.tool_calls[0].function.name }}]"
)

Message = dict[str, Any]
SYSTEM, LATE = {"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be kind."}
USER, AGAIN = {"role": "user", "content": "a"}, {"role": "user", "content": "Go on."}
ANSWER = {"role": "assistant", "content": "Yes."}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "5"}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def call(arguments: object, content: str = "") -> Message:
    function = {"name": "weather", "arguments": arguments}
    calls = [{"id": "c", "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


@cache
def chat_template() -> ChatTemplate:
    return ChatTemplate(PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(byte_level())))


def render(template: str, *messages: Message) -> str:
    return chat_template().render(messages, TemplateOptions(template=template))


def refusal(template: str, *messages: Message) -> str:
    with pytest.raises(BadConversation) as refused:
        render(template, *messages)
    return str(refused.value)


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (PLAIN, "<system>Be brief.<user>one\ntwo<user>a"),
        (PARTS, "<system>Be brief.;<user>one;two;<user>a;"),
        (FIRST_PART, "<system>Be brief.<user>one\ntwo<user>a"),
        (STRIPPED_PARTS, "<system>Be brief.<user>one\ntwo<user>a"),
        (PARTS_OF_USERS, "<system>Be brief.<user>onetwo<user>a"),
    ],
)
def test_contents_have_the_form_that_the_template_reads(template: str, prompt: str) -> None:
    assert render(template, SYSTEM, {"role": "user", "content": parts("one", "two")}, USER) == prompt


def test_an_empty_content_has_no_parts() -> None:
    assert (
        render(PARTS, USER, {"role": "assistant", "content": ""}, AGAIN) == "<user>a;<assistant><user>Go on.;"
    )


@pytest.mark.parametrize(
    ("template", "messages", "prompt"),
    [
        (PLAIN, (SYSTEM, LATE, USER), "<system>Be brief.<system>Be kind.<user>a"),
        (PLAIN, (USER, LATE, AGAIN), "<user>a<system>Be kind.<user>Go on."),
        (STRICT, (SYSTEM, USER), "<system>Be brief.<user>a"),
        (STRICT, (SYSTEM, LATE, USER), "<system>Be brief.\n\nBe kind.<user>a"),
        (STRICT, (USER, LATE, AGAIN), "<system>Be kind.<user>a<user>Go on."),
        (STRICT, (SYSTEM, {**LATE, "role": "developer"}, USER), "<system>Be brief.\n\nBe kind.<user>a"),
        (FIRST_SYSTEM, (SYSTEM, USER, LATE, AGAIN), "<system>Be brief.\n\nBe kind.<user>a<user>Go on."),
        (LAST_SYSTEM, (SYSTEM, LATE, USER), "<system>Be brief.\n\nBe kind.<user>a"),
        (IN_TURN, (USER, ANSWER, LATE, AGAIN), "Be kind.<user>a<assistant>Yes.<user>Go on."),
        (IN_TURN, (USER, LATE, AGAIN), "Be kind.<user>a\n\nGo on."),
    ],
)
def test_system_messages_are_merged_where_the_template_takes_one(
    template: str, messages: tuple[Message, ...], prompt: str
) -> None:
    assert render(template, *messages) == prompt


def test_a_template_that_knows_developers_gets_them() -> None:
    developer = {"role": "developer", "content": "Be brief."}
    assert render(PLAIN, developer, USER) == "<system>Be brief.<user>a"
    assert render(PLAIN + "{# developer #}", developer, USER) == "<developer>Be brief.<user>a"


@pytest.mark.parametrize(
    ("template", "messages", "role"),
    [
        (PLAIN.replace("messages %}", "messages if m.role != 'tool' %}"), (USER, call({}), RESULT), "tool"),
        (PLAIN.replace("messages %}", "messages if m.role != 'system' %}"), (SYSTEM, USER), "system"),
        (PLAIN.replace("messages %}", "messages[-1:] %}"), (USER, ANSWER, AGAIN), "user"),
        (PLAIN.replace("m.content", "m.content[:20]"), ({"role": "user", "content": "long " * 9},), "user"),
        (PLAIN.replace("m.content", "m.content.split('\n')[-1]"), ({**USER, "content": "a\nb"},), "user"),
        (PLAIN.replace("m.content", "m.text"), (USER, AGAIN), "user"),
        (PLAIN.replace("messages %}", "messages if m.role == 'user' %}"), (USER, ANSWER, AGAIN), "assistant"),
    ],
)
def test_a_text_that_does_not_reach_the_prompt_is_refused_with_its_message(
    template: str, messages: tuple[Message, ...], role: str
) -> None:
    roles = [message["role"] for message in messages]
    text = refusal(template, *messages)
    assert text.startswith(
        f"the text of message {roles.index(role) + 1} (role '{role}') does not reach the prompt"
    )
    assert "--chat-template" in text


@pytest.mark.parametrize(
    ("template", "messages", "prompt"),
    [
        (
            WITHOUT_REASONING,
            (USER, {**ANSWER, "content": "<think>No?</think>\n\nYes."}, AGAIN),
            "Yes.<user>Go on.",
        ),
        (ESCAPED, ({**USER, "content": " <é>\n "}, {**RESULT, "content": '{"a": "é\n"}'}), "\\\\n"),
        (SYSTEM_WITH_LAST_USER, (SYSTEM, AGAIN), "<user>Be brief.|Go on."),
        (
            SYSTEM_WITH_LAST_USER,
            (SYSTEM, AGAIN, call({"x": 1}, "Let me see."), RESULT),
            "<user>Go on.<assistant>Let me see.<calls>",
        ),
        (PLAIN, ({**USER, "content": " \n"},), "<user>"),
    ],
)
def test_templates_that_trim_escape_and_leave_out_on_purpose_are_served(
    template: str, messages: tuple[Message, ...], prompt: str
) -> None:
    assert prompt in render(template, *messages)


def test_a_list_that_is_printed_is_no_content() -> None:
    printed = PLAIN.replace("m.content", "m.content if m.content is not string else ''")
    assert refusal(printed, USER).startswith("the text of message 1 (role 'user') does not reach the prompt")


def test_the_error_of_the_template_is_that_of_the_messages_as_they_are() -> None:
    robot = {"role": "robot", "content": "x"}
    rejecting = STRICT.replace("<{{ m.role }}>", "{{ raise_exception('no ' + m.role) if m.role == 'robot' }}")
    assert refusal(rejecting, robot) == "the chat template rejects the conversation: no robot"
    assert refusal(rejecting, robot, SYSTEM) == "the chat template rejects the conversation: no robot"


@pytest.mark.parametrize("arguments", ["[1]", '{"x": ', "5"])
def test_arguments_that_are_no_object_are_passed_as_text_or_the_call_is_named(arguments: str) -> None:
    messages = (USER, call(arguments), RESULT)
    assert f"weather({arguments})" in render(JSON_ARGUMENTS, *messages)
    for template in (OBJECT_ARGUMENTS, OBJECTS_OR_NOTHING):
        assert refusal(template, *messages) == (
            f"arguments {arguments!r} of the call 'weather' in message 2 are no JSON object, and the chat "
            "template renders only objects: send an object"
        )


@pytest.mark.parametrize("arguments", [{"x": 1}, {"x": "y"}, {}, {"x": True}, "[1]", {"x": [{"y": ["z"]}]}])
def test_a_call_that_does_not_reach_the_prompt_is_refused_by_name(arguments: object) -> None:
    for template in (
        PLAIN,
        IN_TURN.replace("(m.role == 'user')", "(m.role != 'assistant')"),
        WITHOUT_REASONING,
    ):
        text = refusal(template, USER, call(arguments), RESULT)
        assert text.startswith("the call 'weather' with ")
        assert "in message 2 does not reach the prompt" in text
        assert "--chat-template" in text


def test_arguments_that_do_not_reach_the_prompt_beside_the_name_are_refused() -> None:
    assert refusal(NAME_OR_TEXT, USER, call({"x": 1}), RESULT).startswith(
        "the call 'weather' with {'x': 1} in message 2 does not reach the prompt"
    )
    assert render(NAME_OR_TEXT, USER, call({}), RESULT) == "<user>a<assistant>[weather]<tool>5"


@pytest.mark.parametrize(
    "arguments", [{"x": 1}, {"x": "y", "z": 2.5}, {"x": True}, {"x": None}, {"x": [{"y": ["é"]}]}, {}]
)
@pytest.mark.parametrize("template", [OBJECT_ARGUMENTS, JSON_ARGUMENTS, ANY_ARGUMENTS, CALLS_OR_TEXT])
def test_calls_that_reach_the_prompt_in_any_form_are_served(template: str, arguments: object) -> None:
    assert render(template, USER, call(arguments), RESULT, ANSWER, AGAIN).endswith("Yes.<user>Go on.")


def test_a_text_beside_a_call_is_a_message_of_its_own_where_the_template_renders_one_of_them() -> None:
    beside = call({"x": 1}, "IMPORTANT TEXT")
    assert render(CALLS_OR_TEXT, USER, beside, RESULT) == (
        '<user>a<assistant>IMPORTANT TEXT<assistant>{"name": "weather", "arguments": {"x": 1}}<tool>5'
    )
    assert render(JSON_ARGUMENTS, USER, beside) == '<user>a<assistant>IMPORTANT TEXTweather({"x": 1})'
    parted = {**beside, "content": parts("one", "two")}
    assert "<assistant>one\ntwo<assistant>" in render(CALLS_OR_TEXT, SYSTEM, LATE, USER, parted, RESULT)


def test_texts_beside_calls_join_the_answer_of_their_turn_where_turns_alternate() -> None:
    alternating = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}"
        "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
        "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('In turn.') }}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{% endif %}"
    )
    template = CALLS_OR_TEXT.replace("{% for m in messages %}", alternating)
    found = render(template, USER, call({"x": 1}, "Let me see."), RESULT, ANSWER, AGAIN)
    assert found.endswith("<tool>5<assistant>Let me see.\n\nYes.<user>Go on.")
    assert found.startswith('<user>a<assistant>{"name": "weather"')


def test_a_text_beside_a_call_that_cannot_be_a_message_of_its_own_is_refused() -> None:
    template = CALLS_OR_TEXT.replace(
        "<{{ m.role }}>",
        "{% if loop.previtem and loop.previtem.role == m.role %}{{ raise_exception('No.') }}{% endif %}",
    )
    assert refusal(template, USER, call({"x": 1}, "IMPORTANT TEXT"), RESULT).startswith(
        "the text of message 2 (role 'assistant') does not reach the prompt"
    )


@pytest.mark.parametrize("content", ["<think>Hm.</think>\n\nYes.", "<think>Hm.</think>", " \n"])
def test_reasoning_beside_a_call_may_be_left_out(content: str) -> None:
    template = ANY_ARGUMENTS.replace("m.content }}", "m.content.split('</think>')[-1].strip() }}")
    found = render(template, USER, call({"x": 1}, content), RESULT)
    if "Yes" not in content:
        assert render(CALLS_OR_TEXT, USER, call({}, content)) == render(CALLS_OR_TEXT, USER, call({}))
    assert found == f'<user>a<assistant>{"Yes." if "Yes" in content else ""}weather({{"x": 1}})<tool>5'


def test_arguments_are_json_where_the_template_takes_no_object() -> None:
    messages = (USER, call({"x": "é"}), RESULT)
    assert render(JSON_ARGUMENTS, *messages) == '<user>a<assistant>weather({"x": "é"})<tool>5'
    assert render(ANY_ARGUMENTS, *messages) == '<user>a<assistant>weather({"x": "é"})<tool>5'
    assert render(OBJECT_ARGUMENTS, *messages) == "<user>a<assistant>x=é;<tool>5"


def test_another_reason_of_a_rejection_is_not_blamed_on_arguments() -> None:
    text = refusal(IN_TURN, USER, call("[1]"), RESULT)
    assert text == "the chat template rejects the conversation: Roles must alternate."
