"""Jinja templates of conversations, rendered as by transformers: same sandbox, filters and functions.

Source: transformers 5.23, utils/chat_template_utils.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from text.tokenizer_json import Templates

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message's reasoning, the one that templates read first."""
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def select_template(templates: Templates, asked: str | None, *, has_tools: bool) -> str:
    """Return the template to render: `asked` (a text or the name of one), else the model's.

    Raises ValueError where the model has none, or several and none is the default.
    """
    if isinstance(templates, Mapping):
        if asked is not None:
            return templates.get(asked, asked)
        for name in ("tool_use", "default") if has_tools else ("default",):
            if name in templates:
                return templates[name]
        raise ValueError(f"templates are named {', '.join(sorted(templates))}, none is 'default'")
    template = templates if asked is None else asked
    if template is None:
        raise ValueError("no chat template")
    return template


def render_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> str:
    """Return the prompt. Fields of messages that are None are left out, as templates print them.

    Raises ValueError for a final message that cannot be continued, and anything for a template that fails.
    """
    if continue_final_message and add_generation_prompt:
        raise ValueError("continue_final_message and add_generation_prompt exclude each other")
    compiled = compile_template(template)
    chat = [_with_reasoning(_plain(_without_none(message))) for message in messages]
    continued = _tag_final(chat, template) if continue_final_message else None
    text = compiled.render(
        messages=chat,
        tools=_plain(tools),
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **_plain(dict(variables)),
    )
    return text if continued is None else _cut_at_tag(text, continued)


@lru_cache
def compile_template(template: str) -> Template:
    """Compile a template for the sandbox. Raises TemplateSyntaxError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment.from_string(template)


class _GenerationBlock(Extension):
    """`{% generation %}` around the assistant's words, which training masks; rendered as its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return caller()


class _Dict:
    """`dict` of templates, without the attributes of the class."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` of templates, which rejects names that reach into Python."""

    def __init__(*args: Any, **fields: Any) -> None:  # a template may name a field `self`
        attributes = dict(*args[1:], **fields)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace of a chat template cannot have the attribute {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _without_none(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}


def _plain(value: Any) -> Any:
    """A copy made of JSON's types, as methods of others would be open to the template."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the names that templates read."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _tag_final(chat: list[dict[str, Any]], template: str) -> str:
    """Put a tag at the end of the final message; return its text."""
    content = chat[-1].get("content")
    if content is None or "content" not in template:
        raise ValueError("the final message has no content that the template renders, to continue")
    if not isinstance(content, list | tuple):
        chat[-1]["content"] = content + _TAG
        return str(content)
    for part in reversed(content):
        if "text" in part:
            text = str(part["text"])
            part["text"] = text + _TAG
            return text
    raise ValueError("the final message has no text to continue")


def _cut_at_tag(prompt: str, continued: str) -> str:
    if continued.strip() not in prompt or _TAG.strip() not in prompt:
        raise ValueError(
            "the chat template leaves out or changes the final message, which is to be continued"
        )
    end = prompt.rindex(_TAG.strip())
    is_exact = prompt[end : end + len(_TAG)] == _TAG
    return prompt[:end] if is_exact else prompt[:end].rstrip()
