"""Finds rules of Lark grammars and JSON schemas that no finite text matches.

llguidance accepts `start: /a+/ start` and never finishes on it, so such rules are rejected beforehand, in
linear time. The `lark` library reads too little: not `T{2,3}`, `a[capture]`, `%json {}`, `<|eot|>`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TypeVar

from text.schema_references import SchemaPlace, referenced_place

_Rule = TypeVar("_Rule")
Rules = Mapping[_Rule, Sequence[AbstractSet[_Rule]]]
"""The alternatives of each rule; an alternative is the set of rules that it needs."""


def endless_rules(rules: Rules[_Rule]) -> set[_Rule]:
    """Return the rules all of whose alternatives need an endless rule. Rules without an entry are finite."""
    waiting: dict[_Rule, list[tuple[_Rule, int]]] = {}
    num_missing: dict[tuple[_Rule, int], int] = {}
    finite: deque[_Rule] = deque()
    for rule, alternatives in rules.items():
        for number, needed in enumerate(alternatives):
            known = [name for name in needed if name in rules]
            num_missing[rule, number] = len(known)
            for name in known:
                waiting.setdefault(name, []).append((rule, number))
            if not known:
                finite.append(rule)
    endless = set(rules)
    while finite:
        rule = finite.popleft()
        if rule not in endless:
            continue
        endless.discard(rule)
        for alternative in waiting.get(rule, ()):
            num_missing[alternative] -= 1
            if not num_missing[alternative]:
                finite.append(alternative[0])
    return endless


_TOKEN = re.compile(
    r"""(?P<newline>\n)
    |(?P<skip>[ \t\r\f]+|//[^\n]*|\#[^\n]*)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|<[^<>\s]+>|@[\w-]+|%\w+)
    |(?P<name>[A-Za-z_]\w*(?:-\w+)*)
    |(?P<number>\d\w*)
    |(?P<mark>->|\.\.|::|.)""",
    re.ASCII | re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    is_first: bool
    """The first one of its line."""


def check_lark(text: str) -> None:
    """Raise ValueError, with the name, for a rule that `start` reaches and that no finite text matches.

    `text` has been accepted by llguidance. Syntax unknown here counts as a terminal.
    """
    rules = _lark_rules(text)
    endless = endless_rules(rules)
    for rule in _reachable(rules, "start"):
        if rule in endless and not rule.startswith("("):
            raise ValueError(f"rule {rule!r} goes on without end: no finite text matches it")


def _reachable(rules: Mapping[str, Sequence[AbstractSet[str]]], start: str) -> Iterator[str]:
    seen, found = {start}, deque([start])
    while found:
        rule = found.popleft()
        yield rule
        for needed in rules.get(rule, ()):
            found.extend(new := sorted(needed - seen))
            seen.update(new)


def _lark_rules(text: str) -> dict[str, list[set[str]]]:
    """The alternatives of each rule and each group; a group is named by a parenthesis and a number.

    An optional part is a separate alternative, which no rule needs.
    """
    tokens = list(_tokens(text))
    headers = list(_headers(tokens))
    ends = [*(header.index for header in headers[1:]), len(tokens)]
    rules: dict[str, list[set[str]]] = {}
    for header, end in zip(headers, ends, strict=True):
        if header.name.islower():
            _read_rule(header.name, tokens[header.end : end], rules)
    return rules


def _tokens(text: str) -> Iterator[_Token]:
    is_first = True
    for match in _TOKEN.finditer(text):
        kind = str(match.lastgroup)
        if kind == "newline":
            is_first = True
        elif kind != "skip":
            yield _Token(kind, match.group(), is_first)
            is_first = False


@dataclass(frozen=True, slots=True)
class _Header:
    """Tokens `index` to `end` of a definition, up to its colon; `name` is empty for a directive."""

    name: str
    index: int
    end: int


def _headers(tokens: Sequence[_Token]) -> Iterator[_Header]:
    """A definition is a line outside of braces that begins with a name and has a colon, or a directive."""
    depth = 0
    for index, token in enumerate(tokens):
        depth += (token.text == "{") - (token.text == "}")
        if depth or not token.is_first:
            continue
        at = index + (token.text in ("!", "?"))
        if token.text.startswith("%"):
            yield _Header("", index, index)
        elif at < len(tokens) and tokens[at].kind == "name" and (colon := _colon(tokens, at)):
            yield _Header(tokens[at].text, index, colon + 1)


def _colon(tokens: Sequence[_Token], name: int) -> int:
    """Index of the colon of a definition; 0 if the line defines nothing."""
    for index in range(name + 1, len(tokens)):
        token = tokens[index]
        if token.text == ":":
            return index
        if token.is_first or token.text in ("|", "("):
            return 0
    return 0


@dataclass(slots=True)
class _Group:
    name: str
    alternatives: list[set[str]] = field(default_factory=lambda: [set()])


def _read_rule(name: str, body: Sequence[_Token], rules: dict[str, list[set[str]]]) -> None:
    groups = [_Group(name)]
    for index, token in enumerate(body):
        before = body[index - 1].text if index else ""
        if token.text in ("(", "["):
            groups.append(_Group(f"({len(rules)}.{name}.{index}"))
        elif token.text in (")", "]") and len(groups) > 1:
            group = groups.pop()
            rules[group.name] = group.alternatives
            _need(group.name, groups[-1], rules, token.text == "]" or _is_optional(body, index + 1))
        elif token.text == "|":
            groups[-1].alternatives.append(set())
        elif token.kind == "name" and before not in ("->", "::"):
            _need(token.text, groups[-1], rules, _is_optional(body, index + 1))
    rules.setdefault(name, []).extend(groups[0].alternatives)


def _need(name: str, group: _Group, rules: dict[str, list[set[str]]], is_optional: bool) -> None:
    if is_optional:
        option = f"(?{name}"
        rules[option] = [set(), {name}]
        name = option
    group.alternatives[-1].add(name)


def _is_optional(body: Sequence[_Token], index: int) -> bool:
    """Whether `?`, `*` or a count that begins at 0 stands at `index`."""
    marks = [token.text for token in body[index : index + 2]]
    return marks[:1] in (["?"], ["*"]) or marks in (["{", "0"], ["{", ","], ["~", "0"])


def check_schema(schema: Mapping[str, object]) -> None:
    """Raise ValueError, with the place, for a reachable schema that no finite JSON satisfies.

    Considers the keywords that demand a subschema; other keywords count as satisfiable.
    """
    rules, places = _schema_rules(schema)
    endless = endless_rules(rules)
    for node, place in places.items():
        if node in endless:
            raise ValueError(
                f"the schema at {place.pointer} refers to itself without end: no finite JSON satisfies it"
            )


_MANY = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties")
_ONE = ("items", "additionalProperties")
_Node = tuple[int, str]
"""A schema's id and, for its `anyOf` or `oneOf`, the keyword."""


def _schema_rules(
    schema: Mapping[str, object],
) -> tuple[dict[_Node, list[set[_Node]]], dict[_Node, SchemaPlace]]:
    """Rules of all schemas that `schema` reaches, and where they are, nearest first."""
    rules: dict[_Node, list[set[_Node]]] = {}
    places: dict[_Node, SchemaPlace] = {}
    found = deque([SchemaPlace(schema)])
    while found:
        place = found.popleft()
        node = (id(place.schema), "")
        if node in places:
            continue
        places[node] = place
        found.extend(_children(place))
        if (target := referenced_place(schema, place.schema)) is not None:
            found.append(target)
        rules[node] = [_needed(schema, place.schema)]
        for keyword in ("anyOf", "oneOf"):
            if isinstance(branches := place.schema.get(keyword), list):
                rules[id(place.schema), keyword] = [_nodes([branch]) for branch in branches]
    return rules, places


def _children(place: SchemaPlace) -> Iterator[SchemaPlace]:
    for keyword in (*_MANY, *_NAMED, *_ONE):
        value = place.schema.get(keyword)
        if keyword in _ONE and isinstance(value, dict):
            yield SchemaPlace(value, place, keyword)
        elif keyword in _NAMED and isinstance(value, dict):
            holder = SchemaPlace(value, place, keyword)
            yield from (
                SchemaPlace(each, holder, name) for name, each in value.items() if isinstance(each, dict)
            )
        elif isinstance(value, list):
            holder = SchemaPlace({}, place, keyword)
            for index, each in enumerate(value):
                if isinstance(each, dict):
                    yield SchemaPlace(each, holder, str(index))


def _needed(root: Mapping[str, object], schema: Mapping[str, object]) -> set[_Node]:
    """What a finite text of `schema` has to satisfy as well."""
    needed = {
        (id(schema), keyword) for keyword in ("anyOf", "oneOf") if isinstance(schema.get(keyword), list)
    }
    if isinstance(every := schema.get("allOf"), list):
        needed |= _nodes(every)
    if (target := referenced_place(root, schema)) is not None:
        needed |= _nodes([target.schema])
    if schema.get("type") in ("object", ["object"]):
        needed |= _nodes(_required(schema))
    if schema.get("type") in ("array", ["array"]):
        needed |= _nodes(_least_items(schema))
    return needed


def _nodes(schemas: Sequence[object]) -> set[_Node]:
    return {(id(schema), "") for schema in schemas if isinstance(schema, dict)}


def _required(schema: Mapping[str, object]) -> list[object]:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return []
    return [properties.get(name) for name in required if isinstance(name, str)]


def _least_items(schema: Mapping[str, object]) -> list[object]:
    least, first = schema.get("minItems"), schema.get("prefixItems")
    if not isinstance(least, int) or least < 1:
        return []
    first = first if isinstance(first, list) else []
    rest = [schema.get("items")] if least > len(first) else []
    return [*first[:least], *rest]
