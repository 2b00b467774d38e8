"""Grammars that force tool calls, in the format that the model writes.

The grammar is llguidance's Lark: the texts of the format as literals or special tokens, around the arguments
as `%json`. The coordinator compiles it as any other grammar (text/grammars.py has the limits).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.parsers.answer import ReasoningTags
from gateway.parsers.calls import ToolDefinition, types_of
from gateway.parsers.families import ToolFormat
from text.grammars import MAX_DEFINITION_BYTES, WHITE_SPACE
from text.json_schema import ValidationBudget, enforced_parts, enforced_schema
from text.tokenizer import TextCodec

_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_CALL_WHITE_SPACE = r"[\x20\x0A]{1,4}"
"""White space between the JSON tokens of arguments, which no user reads: models write one space or none."""
_RAW_STRING_KEYWORDS = frozenset({"pattern", "format", "minLength", "maxLength", "allOf", "not"})


class UnenforceableSchema(ValueError):
    """The schema of a strict tool has a keyword that cannot be enforced; `tool` is its index."""

    def __init__(self, tool: int, reason: str) -> None:
        super().__init__(f"schema of a strict tool cannot be enforced: {reason}")
        self.tool = tool


class OversizedTools(ValueError):
    """The schemas of the tools have no room in a grammar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedCalls:
    """What the answer has to be.

    Attributes:
        tools: The functions that may be called.
        is_parallel: More than one call is allowed.
        is_required: The answer is a call; otherwise it may be text, but its calls follow the schemas.
        text_schema: The JSON schema of an answer that is no call; None for any text.
        reasoning: The tags of reasoning that may come before.
        is_reasoning_open: The prompt has opened the reasoning.
        special_ids: Ids of texts of the format that are special tokens, from `special_marker_ids`.
    """

    tools: Sequence[ToolDefinition]
    is_parallel: bool = True
    is_required: bool = True
    text_schema: Mapping[str, Any] | bool | None = None
    reasoning: ReasoningTags | None = None
    is_reasoning_open: bool = False
    special_ids: Mapping[str, int] = field(default_factory=dict)


def special_marker_ids(markers: Sequence[str], codec: TextCodec) -> dict[str, int]:
    """Return the ids of the markers that are special tokens of the tokenizer."""
    spelled = {marker: ids[0] for marker in markers if (ids := codec.spellings(marker))}
    return {marker: ids[0] for marker, ids in spelled.items() if len(ids) == 1 and not codec.has_text(ids[0])}


def call_grammar(tool_format: ToolFormat, forced: ForcedCalls) -> str:
    """Return the Lark grammar of an answer with calls of `forced.tools`.

    Raises UnenforceableSchema and OversizedTools, and ValueError for a schema of the text.
    """
    size_bytes = sum(len(json.dumps(_object_schema(tool))) for tool in forced.tools)
    if size_bytes > MAX_DEFINITION_BYTES:
        raise OversizedTools(
            f"the schemas of the tools have {size_bytes} bytes, the limit is {MAX_DEFINITION_BYTES} where "
            "calls follow their schemas: send fewer tools, or shorter schemas"
        )
    return "\n".join(_GrammarWriter(tool_format, forced).lines()) + "\n"


class _GrammarWriter:
    def __init__(self, tool_format: ToolFormat, forced: ForcedCalls) -> None:
        self._markup, self._forced = tool_format.markup, forced
        self._special_ids = forced.special_ids
        self._budget = ValidationBudget()
        self._first = next((marker for marker in tool_format.markers if self._begins_with(marker)), None)

    def _begins_with(self, marker: str) -> bool:
        return (self._markup.opens + self._markup.before).startswith(marker)

    def lines(self) -> Iterator[str]:
        forced, markup = self._forced, self._markup
        yield f"start: {self._think()}answer"
        if forced.reasoning is not None:
            yield self._until("think", forced.reasoning.closes)
            yield r"SPACE: /[ \n]{0,8}/"
        more = f" ({self._literal(markup.separator)} call)*" if forced.is_parallel else ""
        calls = f"{self._literal(markup.opens)} call{more} {self._literal(markup.closes)}"
        if forced.is_required:
            yield f"answer: {calls}"
        elif forced.text_schema is not None:
            yield f"answer: json | {calls}" if forced.tools else "answer: json"
            yield f"json: {_json(_answer_schema(forced.text_schema))}"
        else:
            yield from self._optional(more)
        if not forced.tools:
            return
        yield "call: " + " | ".join(f"call_{index}" for index in range(len(forced.tools)))
        for index, tool in enumerate(forced.tools):
            yield from self._call(index, tool)

    def _think(self) -> str:
        tags = self._forced.reasoning
        if tags is None:
            return ""
        return (
            "think SPACE "
            if self._forced.is_reasoning_open
            else f"({self._literal(tags.opens)} think SPACE)? "
        )

    def _optional(self, more: str) -> Iterator[str]:
        """Text, calls, or calls after a text."""
        markup, marker = self._markup, self._first
        opens, closes = self._literal(markup.opens), self._literal(markup.closes)
        calls = f"{opens} call{more} {closes}"
        if marker is None:
            yield f"answer: TEXT | {calls}"
            yield r"TEXT: /[^{\s](?s:.*)/"
        elif marker in self._special_ids:
            yield f"answer: TEXT | {calls} | TEXT {calls}"
        else:  # a lexeme takes what it can, so the text before a call has to end with the marker
            opens = self._literal(markup.opens.removeprefix(marker))
            yield f"answer: TEXT | lead {opens} first{more} {closes}"
            yield "first: " + " | ".join(f"first_{index}" for index in range(len(self._forced.tools)))
            before = markup.before if markup.opens else markup.before.removeprefix(marker)
            for index, tool in enumerate(self._forced.tools):
                yield f"first_{index}: {self._literal(before + tool.name + markup.between)} rest_{index}"
            yield self._until("lead", marker)
        if marker is not None:
            yield f"TEXT: /(?s:.+)/ & ~/(?s:.*){_regex(marker)}(?s:.*)/"

    def _call(self, index: int, tool: ToolDefinition) -> Iterator[str]:
        markup = self._markup
        yield f"call_{index}: {self._literal(markup.before + tool.name + markup.between)} rest_{index}"
        yield f"rest_{index}: arguments_{index} {self._literal(markup.after)}"
        schema = self._arguments_schema(index, tool)
        if markup.parameter is None:
            yield f"arguments_{index}: {_json(schema, _CALL_WHITE_SPACE)}"
        else:
            yield from self._parameters(index, tool, schema, markup.parameter)

    def _arguments_schema(self, index: int, tool: ToolDefinition) -> dict[str, Any]:
        """Return the schema of the arguments, without the keywords that llguidance cannot enforce.

        Raises UnenforceableSchema for a strict tool with such keywords.
        """
        schema = _object_schema(tool)
        if not tool.is_strict:
            return enforced_parts(schema, self._budget)
        try:
            return enforced_schema(schema)
        except ValueError as error:
            raise UnenforceableSchema(index, str(error)) from error

    def _parameters(
        self, index: int, tool: ToolDefinition, schema: Mapping[str, Any], markup: tuple[str, str, str]
    ) -> Iterator[str]:
        """Arguments that stand one by one, in the order of the schema."""
        listed, required = schema.get("properties", {}), schema.get("required", ())
        properties = {key: value for key, value in listed.items() if value is not False}
        names = [f"value_{index}_{number}" for number in range(len(properties))]
        parts = [name if key in required else f"{name}?" for name, key in zip(names, properties, strict=True)]
        yield f"arguments_{index}: " + (" ".join(parts) or '""')
        definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        for name, (key, value) in zip(names, properties.items(), strict=True):
            begin = self._literal(f"{markup[0]}{key}{markup[1]}")
            types = types_of(value)
            if types and "string" not in types:
                argument = _json({**value, **definitions}, _CALL_WHITE_SPACE)
                yield f"{name}: {begin} {argument} {self._literal(markup[2])}"
            elif choices := _choices(value):
                texts = " | ".join(json.dumps(choice) for choice in choices)
                yield f"{name}: {begin} ({texts}) {self._literal(markup[2])}"
            else:
                self._check_string(index, tool, key, value)
                yield f"{name}: {begin} {name}_text"
                yield self._until(f"{name}_text", markup[2])

    def _check_string(self, index: int, tool: ToolDefinition, key: str, value: object) -> None:
        if (
            tool.is_strict
            and isinstance(value, dict)
            and (found := sorted(_RAW_STRING_KEYWORDS & value.keys()))
        ):
            raise UnenforceableSchema(
                index, f"{found[0]!r} of {key!r}, which the model writes without quotes"
            )

    def _until(self, name: str, end: str) -> str:
        """A rule: any text up to `end` and with it, which may begin or end with white space."""
        for marker, token_id in self._special_ids.items():
            if end.strip() == marker:
                before, _, after = end.partition(marker)
                rest = f" {json.dumps(after)}" if after else ""
                return rf"{name}: /(?s:.*){_regex(before)}/ <[{token_id}]>{rest}"
        return f"{name}[lazy]: /(?s:.*){_regex(end)}/"

    def _literal(self, text: str) -> str:
        """The text in Lark; markers that are special tokens by their ids."""
        if not text:
            return ""
        if not self._special_ids:
            return json.dumps(text)
        pattern = "(" + "|".join(map(re.escape, sorted(self._special_ids, key=len, reverse=True))) + ")"
        pieces = (piece for piece in re.split(pattern, text) if piece)
        return " ".join(
            f"<[{self._special_ids[piece]}]>" if piece in self._special_ids else json.dumps(piece)
            for piece in pieces
        )


def _object_schema(tool: ToolDefinition) -> dict[str, Any]:
    return {"type": "object", **(tool.parameters or _NO_ARGUMENTS)}


def _answer_schema(schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    if schema is False:
        raise ValueError("the schema `false` allows no text")
    return enforced_schema(schema)


def _json(schema: Mapping[str, Any], white_space: str = WHITE_SPACE) -> str:
    options = {"whitespace_pattern": white_space, **schema.get("x-guidance", {})}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _choices(value: object) -> list[str]:
    """The texts of a property that has a fixed set of them."""
    if not isinstance(value, dict):
        return []
    choices = value.get("enum", [value["const"]] if "const" in value else [])
    return choices if all(isinstance(choice, str) for choice in choices) else []


def _regex(text: str) -> str:
    """A literal within a Lark regular expression."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
