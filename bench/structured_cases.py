"""The grammars that `bench.structured` measures, each with a text of it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from text.grammars import GrammarKind

ADDRESS = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("street", "city")}
    | {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
    "required": ["street", "city", "zip"],
    "additionalProperties": False,
}
ITEM = {
    "type": "object",
    "properties": {
        "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        "quantity": {"type": "integer"},
        "kind": {"enum": ["book", "food", "tool"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["sku", "quantity", "kind"],
    "additionalProperties": False,
}
ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "maxLength": 40},
        "address": {"$ref": "#/$defs/address"},
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}, "minItems": 1},
    },
    "required": ["id", "address", "items"],
    "additionalProperties": False,
    "$defs": {"address": ADDRESS, "item": ITEM},
}
WIDE = {
    "type": "object",
    "properties": {f"field_{i:03}": {"type": ("string", "integer", "boolean")[i % 3]} for i in range(200)},
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Case:
    """A grammar, and a text of it that is walked token by token."""

    name: str
    kind: GrammarKind
    texts: tuple[str, ...]
    output: str


def cases() -> list[Case]:
    notes = [
        {"sku": "ABC-1234", "quantity": i, "kind": "book", "note": f"gift number {i}"} for i in range(30)
    ]
    address = {"street": "1 Navy Yard, third floor on the left", "city": "Arlington", "zip": "22202"}
    order = json.dumps({"id": "order-12345", "address": address, "items": notes})
    wide = json.dumps({f"field_{i:03}": ("some text", i, True)[i % 3] for i in range(200)})
    prose = "the quick brown fox jumps over the lazy dog, " * 60
    schema, regex = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX
    return [
        Case("schema: an order", schema, (json.dumps(ORDER),), order),
        Case("schema: 200 fields", schema, (json.dumps(WIDE),), wide),
        Case("schema: any object", schema, ('{"type": "object"}',), order),
        Case("regex: a time", regex, (r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z",), "2024-01-02T03:04:05Z"),
        Case("regex: bounded prose", regex, (r"[A-Za-z0-9 ,.\n]{1,4000}",), prose),
        Case("choice: 1,000", GrammarKind.CHOICE, tuple(f"choice {i}" for i in range(1000)), "choice 517"),
    ]
