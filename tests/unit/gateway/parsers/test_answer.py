"""Reasoning, response templates, and the choice of parsers."""

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.parsers.answer import finish_reason
from gateway.parsers.calls import ToolDefinition
from gateway.parsers.events import ParsedAnswer
from gateway.parsers.families import JSON_FORMAT, TOOL_FORMATS, choose_parsers
from gateway.parsers.response_template import TemplateParser
from tests.unit.gateway.parsers.answers import TOOLS, all_cuts, choice_of, cut, new_parser, parse

TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text", "optional": False},
    },
}
PROMPT = "<|im_start|>user\n<think>\n<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("", "<think>\nHm.\n</think>\n\nYes.", ParsedAnswer("Yes.", "Hm.")),
        ("", "\n<think>Hm.</think>Yes.\n", ParsedAnswer("Yes.\n", "Hm.")),
        ("<think>\n", "Hm.\n</think>\n\nYes.", ParsedAnswer("Yes.", "Hm.")),
        ("<think>\n", "<think>Hm.</think>Yes.", ParsedAnswer("Yes.", "Hm.")),
        ("<think>\n", "Hm. <b", ParsedAnswer("", "Hm. <b")),
        ("<think>\n\n</think>\n\n", "Yes.", ParsedAnswer("Yes.")),
        ("", "  Yes <think>", ParsedAnswer("  Yes <think>")),
        ("", "<thin", ParsedAnswer("<thin")),
        ("", "<think>a</think><think>b", ParsedAnswer("<think>b", "a")),
        ("", "<think></think>", ParsedAnswer()),
    ],
)
def test_reasoning_stands_at_the_start_or_is_opened_by_the_prompt(
    prompt: str, text: str, expected: ParsedAnswer
) -> None:
    for pieces in all_cuts(text):
        assert parse(new_parser("none", "think", prompt=prompt), pieces) == expected


def test_calls_after_the_reasoning_are_read_and_those_within_are_not() -> None:
    for pieces in all_cuts(f"<think>{CALL}</think>Look: {CALL}"):
        answer = parse(new_parser("hermes", "think"), pieces)
        assert (answer.reasoning, answer.content, len(answer.calls)) == (CALL, "Look:", 1)


def template_parser(prompt: str = PROMPT) -> TemplateParser:
    return TemplateParser(TEMPLATE, prompt=prompt, tools=TOOLS, id_seed="seed")


def test_a_response_template_gives_reasoning_content_and_calls() -> None:
    for pieces in all_cuts(f"<think>\nHm.\n</think>\n\nLook: {CALL}\n{CALL}<|im_end|>"):
        parser = template_parser()
        answer = parse(parser, pieces)
        assert (answer.reasoning, answer.content) == ("Hm.", "Look:")
        assert [json.loads(call.arguments) for call in answer.calls] == [{"city": "Paris"}] * 2
        assert finish_reason("stop", parser) == "tool_calls"


def test_a_response_template_knows_reasoning_that_the_prompt_opened() -> None:
    for pieces in all_cuts("Hm.</think>Yes."):
        assert parse(template_parser(PROMPT + "<think>\n"), pieces) == ParsedAnswer("Yes.", "Hm.")


def test_a_prompt_without_the_anchor_of_the_template_is_no_part_of_the_answer() -> None:
    assert parse(template_parser("<think> user's text"), ["Yes."]) == ParsedAnswer("Yes.")


@pytest.mark.parametrize(
    "body",
    [
        "nothing",
        '{"name": 5}',
        '["a"]',
        '{"name": "a", "arguments": 3}',
        "{",
        '{"name": "\\ud83d", "arguments": {}}',
        '{"name": "a", "arguments": {"b": ' + "[" * 300 + "]" * 300 + "}}",
    ],
)
def test_a_call_that_the_template_cannot_read_is_content(body: str) -> None:
    for pieces in all_cuts(f"a<tool_call>{body}</tool_call>b{CALL}"):
        answer = parse(template_parser(), pieces)
        assert (answer.content, len(answer.calls)) == (f"a{body}b", 1)


def test_half_of_a_surrogate_pair_in_a_call_of_a_template_is_replaced() -> None:
    for arguments in ('{"a": "\\ud83d"}', '"{\\"a\\": \\"\\ud83d\\"}"'):
        body = f'{{"name": "clock", "arguments": {arguments}}}'
        answer = parse(template_parser(), [f"<tool_call>{body}</tool_call>"])
        assert [call.arguments for call in answer.calls] == ['{"a": "\ufffd"}']


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"anyOf": 5}, "3"),
        ({"anyOf": [{"oneOf": True}]}, "3"),
        ({"type": 5}, "3"),
        (None, "3"),
        ({"anyOf": [{"type": "integer"}]}, 3),
    ],
)
def test_a_response_template_takes_types_from_schemas_of_any_form(schema: object, value: object) -> None:
    tool = ToolDefinition("clock", {"type": "object", "properties": {"a": schema}})
    parser = TemplateParser(TEMPLATE, prompt=PROMPT, tools=[tool], id_seed="seed")
    answer = parse(parser, ['<tool_call>{"name": "clock", "arguments": {"a": "3"}}</tool_call>'])
    assert [json.loads(call.arguments) for call in answer.calls] == [{"a": value}]


def test_an_answer_cut_within_a_call_of_a_template_ends_by_length() -> None:
    for end in range(len("<tool_call>"), len(CALL) - len("\n</tool_call>") - 1):
        parser = template_parser()
        parse(parser, [CALL[:end]])
        assert finish_reason("length", parser) == "length"
        assert parser.is_inside_call


@given(
    parts=st.lists(
        st.sampled_from(
            [*("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "{", '{"name": "a"}')]
        )
        | st.sampled_from(['{"name": "a", "arguments": {"b": 1}}', " ", "\n", "<", "text", "é"]),
        max_size=15,
    ),
    seed=st.integers(0, 1000),
)
def test_hostile_text_gives_the_same_events_of_a_template_for_every_cut(parts: list[str], seed: int) -> None:
    text = "".join(parts)
    whole, characters, pieces = (
        parse(template_parser(), each) for each in ([text], list(text), cut(text, seed))
    )
    assert whole == characters == pieces


@pytest.mark.parametrize(
    ("chat_template", "tool_format", "opens"),
    [
        ("{{ '<｜tool▁calls▁begin｜>' }}```json", "deepseek_v3", None),
        ("{{ '<｜tool▁calls▁begin｜>' }}</think>", "deepseek_v31", "<think>"),
        ("[TOOL_CALLS] [ARGS] [THINK][/THINK]", "mistral_v11", "[THINK]"),
        ("[TOOL_CALLS]", "mistral", None),
        ("<tool_call><arg_key><think></think>", "glm45", "<think>"),
        ("<tool_call>\n<function=", "qwen3_coder", None),
        ("<tool_call></tool_call>", "hermes", None),
        ('<|start_header_id|> {"name": x, "parameters": y}', "llama3_json", None),
        ("<|im_start|>", None, None),
    ],
)
def test_auto_follows_the_chat_template(
    chat_template: str, tool_format: str | None, opens: str | None
) -> None:
    choice = choose_parsers("auto", "auto", chat_template=chat_template)
    assert (choice.tool_format and choice.tool_format.name) == tool_format
    assert (choice.reasoning and choice.reasoning.opens) == opens
    assert (tool_format or "tool calls: none") in choice.description
    assert choice.forced_format.name == (tool_format or "json")


def test_auto_takes_a_response_template_first_unless_a_parser_is_named() -> None:
    def choose(tool: str, reasoning: str) -> bool:
        choice = choose_parsers(tool, reasoning, chat_template="<tool_call>", response_template=TEMPLATE)
        return choice.needs_special_tokens

    assert choose("auto", "auto")
    assert choose("transformers", "auto")
    assert not choose("hermes", "auto")
    assert not choose("none", "none")


def test_auto_says_that_a_response_template_is_invalid_and_takes_a_family() -> None:
    flawed = {**TEMPLATE, "version": 7}
    choice = choose_parsers("auto", "auto", chat_template="<tool_call>", response_template=flawed)
    assert not choice.needs_special_tokens
    assert choice.description.endswith("is invalid: Unsupported response_template version: 7)")
    with pytest.raises(ValueError, match="version: 7: choose another parser"):
        choose_parsers("transformers", "auto", chat_template=None, response_template=flawed)


def test_auto_takes_a_family_where_transformers_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gateway.parsers.response_template", raising=False)
    monkeypatch.setitem(sys.modules, "transformers.utils.chat_parsing", None)
    choice = choose_parsers("auto", "auto", chat_template="<tool_call>", response_template=TEMPLATE)
    assert choice.tool_format is not None and choice.tool_format.name == "hermes"
    advice = "the tokenizer's response template needs transformers on the gateway's host"
    assert choice.description.endswith(f"({advice})")
    with pytest.raises(ValueError, match=f"{advice}: choose another parser than 'transformers'"):
        choose_parsers("transformers", "auto", chat_template=None, response_template=TEMPLATE)


def test_unknown_names_are_rejected_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown tool parser 'gpt': choose auto, none or deepseek_v3, "):
        choose_parsers("gpt", "auto", chat_template=None)
    with pytest.raises(ValueError, match="unknown reasoning parser 'hermes'"):
        choose_parsers("auto", "hermes", chat_template=None)
    with pytest.raises(ValueError, match="no response template"):
        choose_parsers("transformers", "auto", chat_template=None)


def test_markers_are_those_of_calls_and_reasoning() -> None:
    assert choice_of("hermes", "think").markers == ("<tool_call>", "</tool_call>", "<think>", "</think>")
    assert choice_of("none").markers == ()
    assert choice_of("none").forced_format is JSON_FORMAT
    assert set(TOOL_FORMATS) >= {"hermes", "json"}


def test_a_forced_answer_is_read_in_the_forced_format() -> None:
    choice = choose_parsers("auto", "auto", chat_template="<tool_call>", response_template=TEMPLATE)
    parser = choice.new_parser(prompt="", tools=TOOLS, id_seed="seed", is_forced=True)
    assert len(parse(parser, [CALL]).calls) == 1
