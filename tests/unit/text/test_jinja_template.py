"""Conversations are rendered as transformers' `apply_chat_template` renders them."""

from __future__ import annotations

import re
from datetime import datetime
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.unit.text.trained_tokenizers import byte_level
from text.jinja_template import compile_template, render_template, select_template

TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "<b>"}}}}}
]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}]},
    {"role": "assistant", "content": None, "reasoning": "because", "tool_calls": [{"n": 1.5, "b": True}]},
    {"role": "assistant", "content": "It is  ", "thinking": "first", "name": None},
]
TEMPLATES = {
    "everything as JSON": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}",
    "escapes": "{{ messages[0] | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}",
    "whitespace": "{% for m in messages %}\n  {% if m.role == 'user' %}\n  u\n  {% endif %}\n{% endfor %}\n",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}"
    "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "a masked block": "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ m.content }}"
    "{% endgeneration %}{% endfor %}{{ x }}",
    "namespaces and dicts": "{% set n = namespace(self=1, a=2) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ n.self }}"
    "{{ dict(a=1) }}{{ dict.fromkeys([1], 2) }}",
    "defined or not": "{{ tools is defined }}{{ documents is none }}{{ messages[2].content is defined }}"
    "{{ missing is defined }}{{ messages[3].name is defined }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}"
    "|{{ m.reasoning }};{% endfor %}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ extra }}{{ add_generation_prompt }}",
    "kinds of values": "{{ messages[2].tool_calls[0].n is float }}{{ messages[1].content is iterable }}",
}
REFUSED = {
    "its own exception": "{{ raise_exception('no ' + messages[0].role) }}",
    "the sandbox": "{{ ''.__class__.__mro__ }}",
    "private names": "{% set n = namespace(__class__=1) %}",
    "private names later": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "changed lists": "{{ messages.append(1) }}",
    "syntax": "{% for %}",
}


@cache
def reference() -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(byte_level())
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def theirs(template: str, chat: list[dict[str, Any]] = CHAT, **options: Any) -> Any:
    return reference().apply_chat_template(
        chat, chat_template=template, tokenize=False, tools=TOOLS, extra="more", **options
    )


def ours(
    template: str, chat: list[dict[str, Any]] = CHAT, *, generation: bool = False, continued: bool = False
) -> str:
    return render_template(
        template,
        chat,
        tools=TOOLS,
        add_generation_prompt=generation,
        continue_final_message=continued,
        variables={**reference().special_tokens_map, "extra": "more"},
    )


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generation", [True, False])
def test_prompts_equal_those_of_transformers(name: str, generation: bool) -> None:
    template = TEMPLATES[name]
    assert ours(template, generation=generation) == theirs(template, add_generation_prompt=generation)


@pytest.mark.parametrize("name", REFUSED)
def test_what_transformers_refuses_is_refused(name: str) -> None:
    with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever it is
        theirs(REFUSED[name])
    with pytest.raises(type(expected.value)):
        ours(REFUSED[name])


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}[{{ m.content }}]{% endfor %}",
        "{% for m in messages %}[{{ m.content | trim if m.content is string else m.content }}]{% endfor %}",
        "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ 'CONTINUE' }}",
    ],
)
@pytest.mark.parametrize("chat", [CHAT, CHAT[:2], [{"role": "user", "content": "  a\n"}]], ids=len)
def test_a_continued_message_ends_where_transformers_ends_it(
    template: str, chat: list[dict[str, Any]]
) -> None:
    template = template.replace("m.content", "m['content']")
    expected = theirs(template, chat, continue_final_message=True)
    assert ours(template, chat, continued=True) == expected


@pytest.mark.parametrize(
    ("template", "chat", "words"),
    [
        ("{{ messages[0].content }}", CHAT, "leaves out or changes"),
        ("content", CHAT[:3], "no content"),
        ("fixed", CHAT, "no content that the template renders"),
        ("content", [{"role": "user", "content": [{"type": "image"}]}], "no text to continue"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(
    template: str, chat: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        ours(template, chat, continued=True)
    with pytest.raises(ValueError, match="continue_final_message"):
        theirs(template, chat, continue_final_message=True)
    with pytest.raises(ValueError, match="exclude each other"):
        ours(template, chat, continued=True, generation=True)


def test_the_model_s_templates_have_names() -> None:
    named = {"default": "A", "tool_use": "B", "rag": "C"}
    for templates in (named, {"default": "A"}, "A"):
        reference().chat_template = templates
        for asked in (None, "rag", "{{ 1 }}"):
            for tools in (None, TOOLS):
                expected = reference().get_chat_template(asked, tools)
                assert select_template(templates, asked, has_tools=tools is not None) == expected
    with pytest.raises(ValueError, match="named rag, tool_use, none is 'default'"):
        select_template({"rag": "C", "tool_use": "B"}, None, has_tools=False)


def test_the_date_is_today_s() -> None:
    text = ours("{{ strftime_now('%Y-%m-%d') }}")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", text)
    assert abs((datetime.now() - datetime.fromisoformat(text)).days) <= 1


def test_a_template_is_compiled_once() -> None:
    assert compile_template("{{ once }}") is compile_template("{{ once }}")
