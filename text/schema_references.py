"""References within a schema of a client: the place that `$ref` names, and parts with what they refer to."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from wire.foreign_text import parse_digits

DEFINITIONS = ("$defs", "definitions")
NAMED_SCHEMAS = frozenset({"properties", "patternProperties", *DEFINITIONS, "dependentSchemas"})
"""Keywords that have schemas by their names."""
VALUES = frozenset({"enum", "const", "default", "example", "examples", "required", "x-guidance"})
"""Keywords that have no schemas."""


@dataclass(frozen=True, slots=True)
class SchemaPlace:
    """A schema with the way to it."""

    schema: Mapping[str, object]
    parent: SchemaPlace | None = None
    step: str = ""

    @property
    def pointer(self) -> str:
        steps: list[str] = []
        at: SchemaPlace | None = self
        while at is not None and at.parent is not None:
            steps.append(at.step)
            at = at.parent
        return "/".join(["#", *reversed(steps)])


def referenced_place(root: Mapping[str, object], schema: Mapping[str, object]) -> SchemaPlace | None:
    """Return the schema that `$ref` names by a JSON pointer, or by the `$id` of the root."""
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return None
    base, _, pointer = reference.partition("#")
    if base not in ("", root.get("$id")):
        return None
    if pointer and not pointer.startswith("/"):
        return None
    place, node = SchemaPlace(root), root
    for step in unquote(pointer).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        value = _member(node, name)
        if not isinstance(value, dict | list):
            return None
        node = value  # type: ignore[assignment]
        place = SchemaPlace(value if isinstance(value, dict) else {}, place, name)
    return place if isinstance(node, dict) else None


def _member(node: object, name: str) -> object:
    if isinstance(node, list):
        index = parse_digits(name, limit=len(node) - 1)
        return None if index is None else node[index]
    return node.get(name) if isinstance(node, dict) else None


def referenced(root: Mapping[str, object], schema: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return the schema at `referenced_place`."""
    place = referenced_place(root, schema)
    return None if place is None else place.schema


def standing_alone(part: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a schema as a schema of its own, with the parts that it refers to."""
    excerpt = _Excerpt(root)
    whole = {keyword: root[keyword] for keyword in ("$schema", "x-guidance") if keyword in root}
    moved = excerpt.moved(part)
    definitions = excerpt.definitions()
    if excerpt.is_complete:
        return {**whole, **moved, **({"$defs": definitions} if definitions else {})}
    return {**whole, **part, **{keyword: root[keyword] for keyword in DEFINITIONS if keyword in root}}


class _Excerpt:
    """Copies parts of a schema with new names for what they refer to.

    `is_complete` is False after a reference whose place is unknown, such as an anchor.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._names: dict[int, str] = {}
        self._waiting: deque[Mapping[str, Any]] = deque()
        self.is_complete = True

    def definitions(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self._waiting:
            target = self._waiting.popleft()
            found[self._names[id(target)]] = self.moved(target)
        return found

    def moved(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.moved(item) for item in node]
        if not isinstance(node, dict):
            return node
        left_out = {*DEFINITIONS, "$schema", "$id"} if node is self._root else set(DEFINITIONS)
        return {
            keyword: self._moved_value(node, keyword, value)
            for keyword, value in node.items()
            if keyword not in left_out
        }

    def _moved_value(self, node: Mapping[str, Any], keyword: str, value: Any) -> Any:
        if keyword in VALUES:
            return value
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            return {name: self.moved(child) for name, child in value.items()}
        if keyword == "$ref" and isinstance(value, str):
            return self._reference(node)
        return self.moved(value)

    def _reference(self, node: Mapping[str, Any]) -> str:
        target = referenced(self._root, node)
        if target is None:
            self.is_complete = False
            return ""
        if id(target) not in self._names:
            self._names[id(target)] = str(len(self._names))
            self._waiting.append(target)
        return f"#/$defs/{self._names[id(target)]}"
