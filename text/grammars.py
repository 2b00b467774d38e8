"""Structured output: grammars from JSON schemas, regular expressions and choices.

It refuses the keywords of JSON Schema 2020-12 that it does not implement, and enforces the others. But as a
validator does, it ignores keywords that the draft named by `$schema` does not know, and those of other
dialects. A client who writes one wants it to hold, so here they are refused.

The grammar is compiled here once, when the request is accepted, with the same library, limits and
tokenizer.json as on the stage; what cannot be honoured is refused, never ignored. docs/structured-output.md
has the rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from pathlib import Path
from threading import Lock

from llguidance import LLMatcher, regex_to_lark

from checkpoint.errors import UnusableTokenizer
from checkpoint.grammar_tokenizer import GrammarError, GrammarTokenizer, one_line
from wire.steps import GrammarSpec

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


MAX_DEFINITION_BYTES = 128 * 1024
"""Of a serialised grammar, which rides in the start record of each of the request's sequences to every stage,
in messages of at most 16 MiB. The text of the request is held to the same number.
"""

WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Between the tokens of JSON, unless the schema's "x-guidance" says otherwise: room for indented output, but
a model that has nothing to say but white space comes to an end of it.
"""

_SPACING = frozenset({"whitespace_flexible", "whitespace_pattern"})
_VERBOSE_FLAG = re.compile(r"\(\?[a-wyzA-Z]*x")


class UnusableGrammar(ValueError):
    """A `structured_output` that cannot be honoured; the text begins with the name of the field."""


class GrammarKind(Enum):
    """What the client described the text with; the value is the request's field."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


class GrammarCompiler:
    """Compiles grammars for one checkpoint. Safe to call from several threads."""

    def __init__(self, directory: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size` is the width of the model's logits. Reads nothing yet."""
        self._directory = directory
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = Lock()
        self._tokenizer: GrammarTokenizer | UnusableTokenizer | None = None

    def load(self) -> str | None:
        """Builds the tables, which the first `compile` would do otherwise. Returns why none can be built.

        Holds the GIL for up to a second (see GrammarTokenizer.open), so it is for the time before serving.
        """
        tokenizer = self._opened()
        return str(tokenizer) if isinstance(tokenizer, UnusableTokenizer) else None

    def compile(
        self,
        kind: GrammarKind,
        texts: Sequence[str],
        *,
        allowed: Collection[int] = (),
        forbidden: Collection[int] = (),
    ) -> GrammarSpec:
        """`texts` are the choices, or the one text of every other kind. The first token must be one of
        `allowed` (none given: any) and none of `forbidden`.

        Takes milliseconds, and for a hostile grammar up to some hundred; not for an event loop. Raises
        UnusableGrammar.
        """
        tokenizer = self._opened()
        try:
            if isinstance(tokenizer, UnusableTokenizer):
                raise tokenizer
            definition = _definition(kind, texts)
            _check_size(definition, " as a grammar")
            mask = _first_mask(tokenizer, definition)
            self._check_begin(mask, allowed, forbidden)
        except ValueError as error:
            raise UnusableGrammar(f"{kind.value}: {one_line(str(error))}") from error
        return GrammarSpec(definition=definition, tokenizer_checksum=tokenizer.checksum)

    def _check_begin(self, mask: bytes, allowed: Collection[int], forbidden: Collection[int]) -> None:
        known = (1 << self._vocab_size) - 1
        possible = int.from_bytes(mask, "little") & known
        if not possible:
            raise ValueError("no token of the vocabulary can begin the text")
        possible &= self._bits(allowed) if allowed else known
        if not possible & ~self._bits(forbidden):
            raise ValueError(
                "no token can begin the text that allowed_token_ids, bad words and min_tokens leave"
            )

    def _bits(self, token_ids: Collection[int]) -> int:
        octets = bytearray((self._vocab_size + 7) // 8)
        for token_id in token_ids:
            if token_id < self._vocab_size:
                octets[token_id >> 3] |= 1 << (token_id & 7)
        return int.from_bytes(octets, "little")

    def _opened(self) -> GrammarTokenizer | UnusableTokenizer:
        with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = GrammarTokenizer.open(
                        self._directory, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids
                    )
                except UnusableTokenizer as error:
                    self._tokenizer = error
            return self._tokenizer


def _definition(kind: GrammarKind, texts: Sequence[str]) -> str:
    for text in texts:
        _check_size(text)
    if kind is GrammarKind.CHOICE:
        return _choice(texts)
    [text] = texts
    if not text.strip():
        raise ValueError("is empty")
    if kind is GrammarKind.JSON_SCHEMA:
        return _json_schema(text)
    return _regex(text) if kind is GrammarKind.REGEX else _lark(text)


def _json_schema(text: str) -> str:
    schema = parse_schema(text)
    check_keywords(schema)
    if schema is True:
        schema, text = {}, "{}"  # means the same, and takes options
    if not isinstance(schema, dict):
        raise ValueError("a schema must be an object, or true")
    if not _SPACING.isdisjoint(schema.get("x-guidance", ())):  # a pattern of ours would win over either
        return LLMatcher.grammar_from_json_schema(text)
    return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": WHITE_SPACE})


def _regex(text: str) -> str:
    r"""Quoted for Lark by the library, which in two cases changes the text. `\d` is [0-9], as in JavaScript,
    Go and JSON, and not the digits of all scripts: what Unicode counts as one depends on its version.
    """
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise ValueError("ends with a backslash that escapes nothing")
    if "\n" in text and _VERBOSE_FLAG.search(text):
        raise ValueError("a regular expression with the flag x must be on one line")
    return _lark(f"start: /{regex_to_lark(text, use_ascii='d')}/")


def _choice(texts: Sequence[str]) -> str:
    """One terminal, so that the choices are one automaton; Lark's strings are those of JSON in ASCII."""
    if not texts:
        raise ValueError("has no texts; at least 1 is needed")
    if "" in texts:
        raise ValueError(f"text {list(texts).index('')} is empty")
    return _lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in dict.fromkeys(texts)))


def _lark(text: str) -> str:
    """Named as Lark, because the library takes a text that begins with a brace for its own format."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _check_size(text: str, form: str = "") -> None:
    if (size_bytes := len(text.encode())) > MAX_DEFINITION_BYTES:
        raise ValueError(f"has {size_bytes} bytes{form}; at most {MAX_DEFINITION_BYTES} are taken")


def _first_mask(tokenizer: GrammarTokenizer, definition: str) -> bytes:
    """The tokens that the text may begin with, a bit per id. Raises ValueError for what is no grammar, is not
    honoured in full, or allows no text at all.
    """
    matcher = tokenizer.matcher(definition)
    if matcher.warnings:
        raise GrammarError(f"would not be honoured in full: {' '.join(matcher.warnings)}")
    return matcher.mask()
