"""JSON schemas of clients: those that llguidance enforces whole, and what it enforces of the others.

llguidance rejects the keywords of JSON Schema 2020-12 that it does not implement and enforces the others.
Like a validator, it ignores keywords unknown to the draft in `$schema` and keywords of other dialects; here
those are rejected, so that every keyword in a schema has an effect. Values that demand nothing are removed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from llguidance import LLMatcher

from text.endless import check_schema
from text.json_text import check_depth, read_json
from text.schema_references import DEFINITIONS, NAMED_SCHEMAS, VALUES, referenced

_DRAFTS = ("draft-04", "draft-06", "draft-07", "2019-09", "2020-12")
_SINCE = {
    "const": "draft-06",
    "contains": "draft-06",
    "propertyNames": "draft-06",
    "if": "draft-07",
    "then": "draft-07",
    "else": "draft-07",
    "dependentRequired": "2019-09",
    "dependentSchemas": "2019-09",
    "unevaluatedItems": "2019-09",
    "unevaluatedProperties": "2019-09",
    "minContains": "2019-09",
    "maxContains": "2019-09",
    "$recursiveRef": "2019-09",
    "prefixItems": "2020-12",
    "$dynamicRef": "2020-12",
}
_FOREIGN = {
    "nullable": 'OpenAPI 3.0; use "type": ["...", "null"]',
    "divisibleBy": 'draft 3; use "multipleOf"',
    "extends": 'draft 3; use "allOf"',
    "disallow": "draft 3",
}
_MAX_DIGITS = 4300
"""What Python converts by default."""
_ANNOTATIONS = frozenset(
    {"$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
)
_VALIDATION_BYTES = 2048
"""What a validation costs beside the bytes of its schema; together, 1 MB takes about 1 s."""
_MAX_BYTES_FOR_PLACE = 256 * 1024
_MAX_BYTES_FOR_PARTS = 512 * 1024
_MAX_BYTES_TO_JOIN = 512 * 1024
"""What the search for parts may take beyond its limit, to join the parts that it has found."""


class ValidationBudget:
    """Bytes that may be validated in search of parts that can be enforced, by all schemas of a request."""

    def __init__(
        self, search_bytes: int = _MAX_BYTES_FOR_PARTS, join_bytes: int = _MAX_BYTES_TO_JOIN
    ) -> None:
        self._bytes = search_bytes + join_bytes
        self._join_bytes = join_bytes

    @property
    def may_search(self) -> bool:
        """Whether smaller parts may be looked at."""
        return self._bytes > self._join_bytes

    @property
    def is_spent(self) -> bool:
        """Whether nothing may be validated any more."""
        return self._bytes <= 0

    def spend(self, num_bytes: int) -> None:
        self._bytes -= num_bytes + _VALIDATION_BYTES


def parse_schema(text: str) -> object:
    """Parse `text` as JSON. Raises ValueError for invalid or too deeply nested JSON and duplicate keys."""
    try:
        return read_json(text, object_pairs_hook=_reject_duplicate_keys, parse_int=_parse_int)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None


def _parse_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"has a number of {len(digits)} digits, the limit is {_MAX_DIGITS}")
    return int(digits)


def _reject_duplicate_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    known: dict[str, object] = {}
    for key, value in pairs:
        if key in known:
            raise ValueError(f"has the key {json.dumps(key)} twice in one object")
        known[key] = value
    return known


def readable_schema(schema: object, root: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a schema without what demands nothing, for llguidance to compile.

    References are looked up in `root`, which is `schema` by default.

    Raises ValueError, with the place, for keywords that would be ignored, and for schemas without an end.
    """
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError("a schema must be an object, or true")
    check_depth(json.dumps(schema))
    found: dict[str, Any] = _without_neutral(schema, schema if root is None else root)
    _check_keywords(found)
    check_schema(found)
    return found


def enforced_schema(schema: object) -> dict[str, Any]:
    """Return `readable_schema` if llguidance enforces it. Raises ValueError with reason and place."""
    found = readable_schema(schema)
    if reason := _flaw(found):
        raise ValueError(with_place(found, reason))
    return found


def with_place(schema: Mapping[str, Any], reason: str) -> str:
    """Return llguidance's reason with the smallest part of a readable schema that it rejects."""
    budget = ValidationBudget(_MAX_BYTES_FOR_PLACE, 0)
    return f"{reason} (at {_Parts(schema, budget).place(schema, '#')})"


def enforced_parts(schema: Mapping[str, Any], budget: ValidationBudget) -> dict[str, Any]:
    """Return a schema of an object without the keywords that cannot be enforced, wherever they are.

    The names of the properties, and those that are required, always stay; they are all that stays of a schema
    that cannot be enforced whole once `budget` is spent.
    """
    if (whole := _enforced_or_none(schema)) is not None:
        return whole
    if not budget.may_search:
        return _names_alone(schema)
    try:
        check_depth(json.dumps(schema))
        found = _enforced_or_none(_Parts(schema, budget).enforced_keywords(schema))
    except ValueError:
        return _names_alone(schema)
    return _names_alone(schema) if found is None or budget.is_spent else found


def _enforced_or_none(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        found = readable_schema(schema)
    except ValueError:
        return None
    return None if _flaw(found) else found


def _names_alone(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties, required = schema.get("properties"), schema.get("required")
    names = list(properties) if isinstance(properties, dict) else []
    needed = [name for name in names if isinstance(required, list) and name in required]
    return {"type": "object", "properties": {name: {} for name in names}, "required": needed}


class _Parts:
    """Validates parts of a schema until the budget is spent; later ones count as not enforced.

    References to definitions count as satisfied, as definitions are parts, too.
    """

    def __init__(self, schema: Mapping[str, Any], budget: ValidationBudget) -> None:
        self._root = schema
        self._context: dict[str, object] = {
            keyword: {name: {} for name in value}
            for keyword in DEFINITIONS
            if isinstance(value := schema.get(keyword), dict)
        }
        if "$schema" in schema:
            self._context["$schema"] = schema["$schema"]
        self._budget = budget

    def place(self, part: object, pointer: str) -> str:
        """The pointer to the smallest part of `part` that cannot be enforced; `part` itself cannot."""
        children = list(_children(part)) if isinstance(part, dict) else []
        if not children or self._are_enforced(child for _, child in children) or self._budget.is_spent:
            return pointer
        while len(children) > 1 and self._budget.may_search:
            first = children[: len(children) // 2]
            is_fine = self._are_enforced(child for _, child in first)
            children = children[len(first) :] if is_fine else first
        steps, child = children[0]
        return (
            self.place(child, "/".join((pointer, *map(_escaped, steps)))) if len(children) == 1 else pointer
        )

    def enforced(self, part: object) -> Any:
        """Return the part without the keywords that cannot be enforced; any value if it is no schema."""
        if not self._budget.may_search or not isinstance(part, dict | bool):
            return {}
        if isinstance(part, bool) or self._is_enforced(part):
            return part
        return self.enforced_keywords(part)

    def enforced_keywords(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keywords of a schema that can be enforced, with their enforced parts."""
        kept: dict[str, Any] = {}
        for keyword, value in part.items():
            smaller = self._enforced_value(keyword, value)
            if self._is_enforced({**kept, keyword: smaller}):
                kept[keyword] = smaller
        return kept

    def _enforced_value(self, keyword: str, value: object) -> object:
        if keyword in VALUES:
            return value
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            return self._enforced_named(value)
        if isinstance(value, list):
            return [self.enforced(child) if isinstance(child, dict) else child for child in value]
        return self.enforced(value) if isinstance(value, dict) else value

    def _enforced_named(self, named: Mapping[str, object]) -> dict[str, object]:
        """Validate schemas by halves, as most of them can be enforced."""
        if len(named) <= 1 or not self._budget.may_search:
            return {name: self.enforced(child) for name, child in named.items()}
        if self._are_enforced(named.values()):
            return dict(named)
        names = list(named)
        halves = (names[: len(names) // 2], names[len(names) // 2 :])
        return {
            name: child
            for half in halves
            for name, child in self._enforced_named({name: named[name] for name in half}).items()
        }

    def _are_enforced(self, parts: Iterable[object]) -> bool:
        return self._is_enforced({"properties": {str(index): part for index, part in enumerate(parts)}})

    def _is_enforced(self, part: object) -> bool:
        if not isinstance(part, dict):
            return isinstance(part, bool)
        if self._budget.is_spent:
            return False
        whole = {**part, **self._context}
        self._budget.spend(len(json.dumps(whole)))
        try:
            return not _flaw(readable_schema(whole, self._root))
        except ValueError:
            return False


def _children(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], object]]:
    """The schemas right below a schema, and the steps of the way to each."""
    for keyword, value in schema.items():
        if keyword in VALUES:
            continue
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            yield from (((keyword, name), child) for name, child in value.items())
        elif keyword in _LISTED_SCHEMAS and isinstance(value, list):
            yield from (((keyword, str(index)), child) for index, child in enumerate(value))
        elif isinstance(value, dict):
            yield (keyword,), value


_LISTED_SCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})


def _flaw(schema: Mapping[str, Any]) -> str:
    """The reason why llguidance rejects a schema, in one line; nothing if it enforces it."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return " ".join(LLMatcher.validate_grammar(grammar, None).split())


def _escaped(step: str) -> str:
    return step.replace("~", "~0").replace("/", "~1")


def _check_keywords(schema: Mapping[str, Any]) -> None:
    """Raise ValueError, with keyword and place, for a keyword that would be ignored."""
    draft = _draft(schema)
    for pointer, part in _subschemas(schema, "#"):
        for keyword, value in part.items():
            if reason := _why_ignored(keyword, value, draft):
                raise ValueError(
                    f"keyword {json.dumps(keyword)} would have no effect: {reason} (at {pointer})"
                )


def _draft(schema: Mapping[str, Any]) -> str:
    """Return the draft that `$schema` names; the newest if it is missing or unknown."""
    named = str(schema.get("$schema", ""))
    return next((draft for draft in _DRAFTS if draft in named), _DRAFTS[-1])


def _why_ignored(keyword: str, value: object, draft: str) -> str | None:
    if keyword in _FOREIGN:
        return f"it belongs to {_FOREIGN[keyword]}"
    if keyword == "x-guidance" and not isinstance(value, dict):
        return "it must be an object of options"
    if keyword == "required" and isinstance(value, bool):
        return "a boolean belongs to draft 3; list the required properties in the object"
    since = _SINCE.get(keyword, draft)
    if _DRAFTS.index(since) > _DRAFTS.index(draft):
        return f"it belongs to {since}, but $schema names {draft}"
    return None


def _subschemas(node: object, pointer: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every object that may be a schema, as `$ref` can point anywhere, with its place.

    Values, as in `enum`, are none.
    """
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _subschemas(item, f"{pointer}/{index}")
    if not isinstance(node, dict):
        return
    yield pointer, node
    for keyword, value in node.items():
        at = f"{pointer}/{_escaped(keyword)}"
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            for name, child in value.items():
                yield from _subschemas(child, f"{at}/{_escaped(name)}")
        elif keyword not in VALUES:
            yield from _subschemas(value, at)


def _without_neutral(node: Any, root: Mapping[str, Any]) -> Any:
    """Return the schemas in `node` without the keywords whose values demand nothing."""
    if isinstance(node, list):
        return [_without_neutral(item, root) for item in node]
    if not isinstance(node, dict):
        return node
    kept: dict[str, Any] = {}
    for keyword, value in node.items():
        is_neutral = _NEUTRAL.get(keyword)
        if is_neutral is not None and is_neutral(value, node, root):
            continue
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            kept[keyword] = {name: _without_neutral(child, root) for name, child in value.items()}
        else:
            kept[keyword] = value if keyword in VALUES else _without_neutral(value, root)
    return kept


def _demands(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the keywords of a schema that demand something; None if it is none, or allows nothing.

    A schema that only refers to another one demands what that does.
    """
    seen: set[int] = set()
    while isinstance(schema, dict):
        demands = {keyword: value for keyword, value in schema.items() if keyword not in _ANNOTATIONS}
        target = referenced(root, demands)
        if demands.keys() != {"$ref"} or target is None or id(target) in seen:
            return demands
        seen.add(id(target))
        schema = target
    return {} if schema is True else None


def _accepts_all(schema: object, root: Mapping[str, Any]) -> bool:
    return _demands(schema, root) == {}


def _accepts_all_strings(schema: object, root: Mapping[str, Any]) -> bool:
    if (found := _demands(schema, root)) is None:
        return False
    demands = dict(found)
    types = demands.pop("type", "string")
    has_strings = types == "string" or (isinstance(types, list) and "string" in types)
    return has_strings and (not demands or demands == {"minLength": 0})


def _accept_all(schemas: object, root: Mapping[str, Any]) -> bool:
    return isinstance(schemas, dict) and all(
        each == [] or _accepts_all(each, root) for each in schemas.values()
    )


def _needs_none(schema: Mapping[str, Any]) -> bool:
    """Whether `contains` may be satisfied by no item."""
    return schema.get("minContains") == 0 and "maxContains" not in schema


_NEUTRAL: Mapping[str, Callable[[Any, Mapping[str, Any], Mapping[str, Any]], bool]] = {
    "uniqueItems": lambda value, *_: value is False,
    "nullable": lambda value, *_: value is False,
    "required": lambda value, *_: value is False,
    "not": lambda value, *_: value is False,
    "$recursiveAnchor": lambda value, *_: value is False,
    "anyOf": lambda value, *_: value == [],
    "oneOf": lambda value, *_: value == [],
    "disallow": lambda value, *_: value == [],
    "extends": lambda value, *_: value in ([], {}),
    "propertyNames": lambda value, _, root: _accepts_all_strings(value, root),
    "unevaluatedItems": lambda value, _, root: _accepts_all(value, root),
    "unevaluatedProperties": lambda value, _, root: _accepts_all(value, root),
    "dependencies": lambda value, _, root: _accept_all(value, root),
    "dependentRequired": lambda value, _, root: _accept_all(value, root),
    "dependentSchemas": lambda value, _, root: _accept_all(value, root),
    "if": lambda _, schema, root: all(
        _accepts_all(schema.get(branch, True), root) for branch in ("then", "else")
    ),
    "then": lambda value, schema, root: _accepts_all(value, root) or "if" not in schema,
    "else": lambda value, schema, root: _accepts_all(value, root) or "if" not in schema,
    "contains": lambda _, schema, __: _needs_none(schema),
    "minContains": lambda _, schema, __: "contains" not in schema or _needs_none(schema),
    "maxContains": lambda _, schema, __: "contains" not in schema,
}
"""Keywords that llguidance or a newer draft does not have, and their values that every JSON satisfies."""
