"""Parses answers with transformers and the response template of a tokenizer.

The template says where reasoning, calls and text begin and end (transformers/utils/chat_parsing). A call is
known at its end, so its arguments are one fragment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from gateway.parsers.calls import ToolDefinition
from gateway.parsers.events import EventWriter, ParserEvent
from text.json_text import HALF_CHARACTER, parse_json, read_json

_REASONING_FIELDS = frozenset({"reasoning_content", "reasoning", "thinking"})
_CALLS_FIELD = "tool_calls"
_FAILED = "region_failed"


class TemplateParser:
    """The parser of one answer; text in the place of a call that the template cannot read is content."""

    def __init__(
        self, template: Mapping[str, Any], *, prompt: str, tools: Sequence[ToolDefinition], id_seed: str
    ) -> None:
        self._writer = EventWriter(id_seed)
        self._writer.boundary()
        self._calls: list[str] = []
        spec = check_response_template(template)
        has_anchor = load_response_template(spec).start_anchor_re.search(prompt) is not None
        self._parser = _LenientParser(
            spec, prefix=prompt if has_anchor else "", tools=[_tool_body(tool) for tool in tools]
        )

    @property
    def num_complete_calls(self) -> int:
        return self._writer.num_complete_calls

    @property
    def is_inside_call(self) -> bool:
        return self._writer.is_inside_call

    def feed(self, text: str) -> list[ParserEvent]:
        self._write(self._parser.feed(text))
        return self._writer.drain()

    def finish(self) -> list[ParserEvent]:
        was_inside = self._writer.is_inside_call
        num_complete = self.num_complete_calls
        _, events = self._parser.finalize()
        self._write(events)
        self._writer.is_inside_call = was_inside and self.num_complete_calls == num_complete
        self._writer.finish()
        return self._writer.drain()

    def _write(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            if event["field"] == _CALLS_FIELD:
                self._write_call(event)
            elif event["type"] == "region_chunk":
                is_reasoning = event["field"] in _REASONING_FIELDS
                (self._writer.reasoning if is_reasoning else self._writer.content)(event["text"])
            else:
                self._writer.boundary()

    def _write_call(self, event: Mapping[str, Any]) -> None:
        if event["type"] == "region_open":
            self._calls.clear()
            self._writer.is_inside_call = True
        elif event["type"] == "region_chunk":
            self._calls.append(event["text"])
        else:
            self._end_call(event.get("value"))

    def _end_call(self, value: object) -> None:
        """Write the calls of a region; its text if it has none."""
        self._writer.is_inside_call = False
        bodies = [_call_of(item) for item in (value if isinstance(value, list) else [value])]
        calls = [body for body in bodies if body is not None]
        if not calls or len(calls) < len(bodies):
            self._writer.content("".join(self._calls))
            return
        for name, arguments in calls:
            self._writer.start_call(name)
            self._writer.arguments(arguments)
            self._writer.end_call()


def check_response_template(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template with all fields optional. Raises ValueError if transformers rejects it."""
    fields = {name: {**body, "optional": True} for name, body in template.get("fields", {}).items()}
    spec = {**template, "fields": fields}
    load_response_template(spec)
    return spec


class _LenientParser(ResponseParser):
    """Reports a region that cannot be read as an event, where ResponseParser loses the events around it."""

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        try:
            super()._close_current(events)
        except (ValueError, KeyError, RecursionError):
            events.append({"type": _FAILED, "field": self._current})
            self._reset_to_implicit()


def _tool_body(tool: ToolDefinition) -> dict[str, Any]:
    """The tool with what transformers reads of its schema: types of properties, of which it checks none."""
    properties = (tool.parameters or {}).get("properties")
    readable = {
        name: _typed(schema) for name, schema in (properties.items() if isinstance(properties, dict) else ())
    }
    return {"type": "function", "function": {"name": tool.name, "parameters": {"properties": readable}}}


def _typed(schema: object) -> dict[str, Any]:
    if not isinstance(schema, dict):
        return {}
    unions = {name: schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)}
    typed = {name: [_typed(branch) for branch in branches] for name, branches in unions.items()}
    return {**{name: schema[name] for name in ("type", "nullable") if name in schema}, **typed}


def _call_of(value: object) -> tuple[str, str] | None:
    """Return name and arguments of a parsed call."""
    try:
        value = read_json(json.dumps(value))
    except (ValueError, RecursionError):  # nested too deeply, or no JSON
        return None
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name or HALF_CHARACTER in name:
        return None
    arguments = function.get("arguments", function.get("parameters"))
    arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
    arguments = {} if arguments is None else arguments
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
