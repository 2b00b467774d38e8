"""Finds in a JSON schema what llguidance would pass over in silence.

It refuses the keywords of JSON Schema 2020-12 that it does not implement, and enforces the others. But as a
validator does, it ignores keywords that the draft named by `$schema` does not know, and those of other
dialects. A client who writes one wants it to hold, so here they are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

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
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"enum", "const", "default", "example", "examples", "required", "x-guidance"})


def parse_schema(text: str) -> object:
    """`text` as JSON. Raises ValueError for what is no JSON, nested too deeply, or names a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_without_twins)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None


def check_keywords(schema: object) -> None:
    """Raises ValueError, with the keyword, for one that would be ignored. Looks for nothing else."""
    draft = _draft(schema)
    for part in _subschemas(schema):
        for keyword, value in part.items():
            if reason := _why_ignored(keyword, value, draft):
                raise ValueError(f"keyword {json.dumps(keyword)} would have no effect: {reason}")


def _without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    known: dict[str, object] = {}
    for key, value in pairs:
        if key in known:
            raise ValueError(f"has the key {json.dumps(key)} twice in one object")
        known[key] = value
    return known


def _draft(schema: object) -> str:
    """What `$schema` names; without one, or for one that the library refuses, the newest."""
    named = str(schema.get("$schema", "")) if isinstance(schema, dict) else ""
    return next((draft for draft in _DRAFTS if draft in named), _DRAFTS[-1])


def _why_ignored(keyword: str, value: object, draft: str) -> str | None:
    if keyword in _FOREIGN and value is not False:
        return f"it is of {_FOREIGN[keyword]}"
    if keyword == "x-guidance" and not isinstance(value, dict):
        return "it is no object of options"
    if keyword == "required" and isinstance(value, bool):
        return "a boolean is of draft 3; list the required properties in the object"
    since = _SINCE.get(keyword, draft)
    if _DRAFTS.index(since) > _DRAFTS.index(draft):
        return f"it is of {since}, and $schema names {draft}"
    return None


def _subschemas(node: object) -> Iterator[dict[str, object]]:
    """Every object that is, or may be, a schema: `$ref` can point anywhere. Not the values of `enum` and
    such.
    """
    if isinstance(node, list):
        for each in node:
            yield from _subschemas(each)
    if not isinstance(node, dict):
        return
    yield node
    for keyword, value in node.items():
        if keyword in _NAMED_SCHEMAS and isinstance(value, dict):
            yield from _subschemas(list(value.values()))
        elif keyword not in _VALUES:
            yield from _subschemas(value)
