"""Grammars that force tool calls, in the format that the model writes.

The grammar is llguidance's Lark: the texts of the format as literals or special tokens, around the arguments
as `%json`. The coordinator compiles it as any other grammar (text/grammars.py has the limits).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from gateway.parsers.answer import ReasoningTags
from gateway.parsers.calls import ToolDefinition
from gateway.parsers.families import ToolFormat
from text.grammars import MAX_DEFINITION_BYTES, WHITE_SPACE
from text.json_schema import ValidationBudget, enforced_parts, enforced_schema
from text.schema_references import referenced, standing_alone
from text.schema_types import Allowed, SchemaTypes, layers, properties_of
from text.tokenizer import TextCodec

_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_CALL_WHITE_SPACE = r"[\x20\x0A]{1,4}"
"""White space between the JSON tokens of arguments, which no user reads: models write one space or none."""
_TEXT_DEMANDS = frozenset(
    {
        "additionalItems", "additionalProperties", "contains", "dependencies", "dependentRequired",
        "dependentSchemas", "exclusiveMaximum", "exclusiveMinimum", "format", "if", "items", "maximum",
        "maxItems", "maxLength", "maxProperties", "minimum", "minItems", "minLength", "minProperties",
        "multipleOf", "not", "pattern", "patternProperties", "prefixItems", "properties", "propertyNames",
        "required", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
    }
)  # fmt: skip
"""What cannot be enforced of a value that may be any string, as it has no quotes."""
_PARTED_DEMANDS = frozenset(
    {
        "anyOf", "const", "dependencies", "dependentRequired", "dependentSchemas", "enum", "if",
        "maxProperties", "minProperties", "not", "oneOf", "patternProperties",
    }
)  # fmt: skip
"""What cannot be enforced of an object whose members the model writes one by one."""


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
        if tool.is_strict:
            _check_parted(index, schema)
        required, types = _required(schema), SchemaTypes(schema)
        properties = {key: value for key, value in properties_of(schema).items() if value is not False}
        names = [f"value_{index}_{number}" for number in range(len(properties))]
        parts = [name if key in required else f"{name}?" for name, key in zip(names, properties, strict=True)]
        yield f"arguments_{index}: " + (" ".join(parts) or '""')
        for name, (key, value) in zip(names, properties.items(), strict=True):
            begin, end = self._literal(f"{markup[0]}{key}{markup[1]}"), self._literal(markup[2])
            if forms := _forms(value, schema, types.allowed(value)):
                yield f"{name}: {begin} ({' | '.join(forms)}) {end}"
                continue
            if tool.is_strict:
                _check_text(index, key, value, schema)
            yield f"{name}: {begin} {name}_text"
            yield self._until(f"{name}_text", markup[2])

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


def _forms(value: object, root: Mapping[str, Any], allowed: Allowed) -> list[str]:
    """The forms of a value without quotes: its strings, and JSON of other types; none if it is any string."""
    if allowed.strings is None or not isinstance(value, dict):
        return []
    forms = [json.dumps(text) for text in allowed.strings]
    others = allowed.types - {"string"}
    if "number" in others:
        others -= {"integer"}
    if others:
        schema = standing_alone(value, root)
        limits = {"type": sorted(others)} if forms else {}
        forms.append(_json({**schema, **limits}, _CALL_WHITE_SPACE))
    return forms


def _required(schema: Mapping[str, Any]) -> set[str]:
    lists = (layer.get("required") for layer in layers(schema, schema, ("allOf",)))
    return {name for names in lists if isinstance(names, list) for name in names if isinstance(name, str)}


def _check_parted(index: int, schema: Mapping[str, Any]) -> None:
    """Raise UnenforceableSchema for what the members of an object have to satisfy together."""
    names: set[str] = set()
    for layer in layers(schema, schema, ("allOf",)):
        properties = layer.get("properties", {})
        found = "allOf" if names & properties.keys() else _demanded(layer, schema, _PARTED_DEMANDS)
        if found:
            raise UnenforceableSchema(index, f"{found!r} of arguments that the model writes one by one")
        names |= properties.keys()


def _check_text(index: int, key: str, value: object, root: Mapping[str, Any]) -> None:
    """Raise UnenforceableSchema for what a value has to satisfy that may be any string."""
    for layer in layers(value, root, ("allOf", "anyOf", "oneOf")):
        values = [*layer.get("enum", ()), *([layer["const"]] if "const" in layer else [])]
        has_values = any(isinstance(value, int | float | list | dict) for value in values)
        if found := "enum" if has_values else _demanded(layer, root, _TEXT_DEMANDS):
            raise UnenforceableSchema(index, f"{found!r} of {key!r}, which the model writes without quotes")


def _demanded(schema: Mapping[str, Any], root: Mapping[str, Any], keywords: AbstractSet[str]) -> str | None:
    """Return the first of the keywords that demands something, or `$ref` to what is not found."""
    if "$ref" in schema and referenced(root, schema) is None:
        return "$ref"
    found = (keyword for keyword in sorted(keywords & schema.keys()))
    return next((keyword for keyword in found if not _is_neutral(schema[keyword])), None)


def _is_neutral(value: object) -> bool:
    return value is True or value == {} or value == []


def _regex(text: str) -> str:
    """A literal within a Lark regular expression."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
