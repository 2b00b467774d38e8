"""Values that the schema of a client allows at its top: their types, and the strings if these are listed.

References to a place in the same schema are followed. What is unknown allows everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from text.json_text import MAX_JSON_DEPTH
from text.schema_references import referenced

ALL_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_COMBINED = ("anyOf", "oneOf")


@dataclass(frozen=True, slots=True)
class Allowed:
    """Types of JSON, of which `number` has `integer` beside it, and the strings; None for any string."""

    types: frozenset[str] = ALL_TYPES
    strings: tuple[str, ...] | None = None

    def and_also(self, other: Allowed) -> Allowed:
        types = self.types & other.types
        if self.strings is None or other.strings is None:
            strings = other.strings if self.strings is None else self.strings
        else:
            both = frozenset(other.strings)
            strings = tuple(text for text in self.strings if text in both)
        if "string" not in types or strings == ():
            return Allowed(types - {"string"}, ())
        return Allowed(types, strings)


_ANY = Allowed()
_NONE = Allowed(frozenset(), ())


class SchemaTypes:
    """What the parts of a schema allow; `root` is the whole schema, in which references are looked up."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[int, Allowed] = {}

    def allowed(self, schema: object) -> Allowed:
        """Return what a part allows; anything where nothing is allowed, as no text can follow that."""
        found = self._allowed(schema, 0)
        return found if found.types else _ANY

    def _allowed(self, schema: object, depth: int) -> Allowed:
        if not isinstance(schema, dict) or depth > MAX_JSON_DEPTH:
            return _NONE if schema is False else _ANY
        if id(schema) not in self._known:
            self._known[id(schema)] = _ANY  # for what refers to itself
            found = _by_values(schema)
            for demand in self._demanded(schema, depth + 1):
                found = found.and_also(demand)
            self._known[id(schema)] = found
        return self._known[id(schema)]

    def _demanded(self, schema: Mapping[str, Any], depth: int) -> Iterator[Allowed]:
        target = referenced(self._root, schema)
        every = schema.get("allOf")
        for part in (*([] if target is None else [target]), *(every if isinstance(every, list) else [])):
            yield self._allowed(part, depth)
        for keyword in _COMBINED:
            branches = schema.get(keyword)
            if isinstance(branches, list) and branches:
                yield _either([self._allowed(branch, depth) for branch in branches])


def layers(schema: object, root: Mapping[str, Any], keywords: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and those that it refers to or combines by `keywords`, at its top."""
    seen: set[int] = set()
    found: deque[object] = deque([schema])
    while found:
        layer = found.popleft()
        if not isinstance(layer, dict) or id(layer) in seen:
            continue
        seen.add(id(layer))
        yield layer
        found.append(referenced(root, layer))
        for keyword in keywords:
            parts = layer.get(keyword)
            found.extend(parts if isinstance(parts, list) else [])


def properties_of(root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schemas of the properties of an object, wherever the schema lists them."""
    listed: dict[str, list[object]] = {}
    for layer in layers(root, root, ("allOf", *_COMBINED)):
        properties = layer.get("properties")
        for name, schema in properties.items() if isinstance(properties, dict) else ():
            listed.setdefault(name, []).append(schema)
    return {name: found[0] if len(found) == 1 else {"anyOf": found} for name, found in listed.items()}


def type_names(value: object) -> frozenset[str]:
    """Return the types of JSON that a value has."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    return frozenset(name for name, kind in _PYTHON_TYPES.items() if isinstance(value, kind))


_PYTHON_TYPES: Mapping[str, type] = {
    "array": list,
    "null": type(None),
    "number": float,
    "object": dict,
    "string": str,
}


def _by_values(schema: Mapping[str, Any]) -> Allowed:
    """What `type`, `enum` and `const` allow."""
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    found = _ANY
    if names and all(isinstance(name, str) and name in ALL_TYPES for name in names):
        types = frozenset({*names, "integer"} if "number" in names else names)
        found = found.and_also(Allowed(types))
    if isinstance(values := schema.get("enum"), list) and values:
        found = found.and_also(_one_of(values))
    return found.and_also(_one_of([schema["const"]])) if "const" in schema else found


def _one_of(values: Iterable[object]) -> Allowed:
    strings = tuple(value for value in values if isinstance(value, str))
    return Allowed(frozenset().union(*map(type_names, values)), strings)


def _either(branches: Sequence[Allowed]) -> Allowed:
    types = frozenset[str]().union(*(branch.types for branch in branches))
    listed = [branch.strings for branch in branches]
    if None in listed:
        return Allowed(types)
    return Allowed(types, tuple(dict.fromkeys(text for texts in listed for text in texts or ())))
