"""Structured output: grammars from JSON schemas, regular expressions and choices.

A grammar is compiled once when the request is accepted, with the same library, limits and tokenizer.json as
on the stage. docs/structured-output.md has the rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from threading import Lock
from typing import Any

from llguidance import LLMatcher, regex_to_lark

from checkpoint.errors import UnusableTokenizer
from checkpoint.grammar_tokenizer import GrammarError, GrammarMatcher, GrammarTokenizer, one_line
from text.endless import check_lark
from text.json_schema import parse_schema, readable_schema, with_place
from wire.sampling import GrammarSpec

MAX_DEFINITION_BYTES = 128 * 1024
"""Limit for a request's text and for its serialised grammar, which each start record contains."""

WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Default white space between JSON tokens: long enough for indented output, but bounded."""

_SPACING = frozenset({"whitespace_flexible", "whitespace_pattern"})
_MAY_BE_EMPTY = re.compile(r"[&^~%@$<]|\\P|--")
_NO_FORCING = '%llguidance {"no_forcing": true}'
_VERBOSE_FLAG = re.compile(r"\(\?[a-wyzA-Z]*x")


class UnusableGrammar(ValueError):
    """A `structured_output` that cannot be enforced; the text begins with the field name."""


class GrammarKind(Enum):
    """Form of the client's grammar; the value is the request's field."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


class GrammarCompiler:
    """Compiles grammars for one checkpoint. Thread-safe."""

    def __init__(self, directory: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size` is the width of the model's logits. Reads no files yet."""
        self._directory = directory
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = Lock()
        self._tokenizer: GrammarTokenizer | UnusableTokenizer | None = None

    def load(self) -> str | None:
        """Build the tables ahead of the first `compile`; return the reason if that is impossible.

        Holds the GIL for up to a second (see GrammarTokenizer.open), so call it before serving.
        """
        tokenizer = self._open_tokenizer()
        return str(tokenizer) if isinstance(tokenizer, UnusableTokenizer) else None

    def compile(
        self,
        kind: GrammarKind,
        texts: Sequence[str],
        *,
        allowed: Collection[int] = (),
        forbidden: Collection[int] = (),
    ) -> GrammarSpec:
        """Compile `texts`: the choices, or the one text of every other kind.

        The first token must be in `allowed` (empty: any) and not in `forbidden`. Takes milliseconds, for a
        hostile grammar some hundred; do not call it on an event loop. Raises UnusableGrammar.
        """
        tokenizer = self._open_tokenizer()
        try:
            if isinstance(tokenizer, UnusableTokenizer):
                raise UnusableTokenizer(str(tokenizer))  # a new one: a raised exception holds its frames
            definition = _definition(kind, texts)
            _check_size(definition, " as a grammar")
            matcher = _matcher(tokenizer, definition, kind, texts)
            if kind is GrammarKind.GRAMMAR:
                check_lark(texts[0])  # before the first mask, which might never end
            mask = _first_mask(matcher)
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
                "allowed_token_ids, bad_words and min_tokens exclude every token that can begin the text"
            )

    def _bits(self, token_ids: Collection[int]) -> int:
        octets = bytearray((self._vocab_size + 7) // 8)
        for token_id in token_ids:
            if token_id < self._vocab_size:
                octets[token_id >> 3] |= 1 << (token_id & 7)
        return int.from_bytes(octets, "little")

    def _open_tokenizer(self) -> GrammarTokenizer | UnusableTokenizer:
        with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = GrammarTokenizer.open(
                        self._directory, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids
                    )
                except UnusableTokenizer as error:
                    self._tokenizer = error
            return self._tokenizer


def _matcher(
    tokenizer: GrammarTokenizer, definition: str, kind: GrammarKind, texts: Sequence[str]
) -> GrammarMatcher:
    """Raises GrammarError, for a JSON schema with the place of what is rejected."""
    try:
        return tokenizer.matcher(definition)
    except GrammarError as error:
        if kind is not GrammarKind.JSON_SCHEMA:
            raise
        raise GrammarError(with_place(readable_schema(parse_schema(texts[0])), str(error))) from None


def _definition(kind: GrammarKind, texts: Sequence[str]) -> str:
    for text in texts:
        _check_size(text)
    if kind is GrammarKind.CHOICE:
        return _choice(texts)
    [text] = texts
    if not text.strip():
        raise ValueError("is empty")
    if kind is GrammarKind.JSON_SCHEMA:
        return _json_schema(readable_schema(parse_schema(text)))
    return _regex(text) if kind is GrammarKind.REGEX else _lark(_bounded(text))


def _json_schema(schema: Mapping[str, Any]) -> str:
    text = json.dumps(schema)
    if not _SPACING.isdisjoint(schema.get("x-guidance", ())):  # a default pattern would override these
        return LLMatcher.grammar_from_json_schema(text)
    return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": WHITE_SPACE})


def _regex(text: str) -> str:
    r"""Convert to Lark; the library's quoting changes the text in the two cases rejected here.

    `\d` is [0-9], as in JavaScript, Go and JSON: Unicode's digits depend on its version.
    """
    if (len(text) - len(text.rstrip("\\"))) % 2:
        raise ValueError("ends with a backslash that escapes nothing")
    if "\n" in text and _VERBOSE_FLAG.search(text):
        raise ValueError("a regular expression with the flag x must be on one line")
    return _lark(f"start: /{regex_to_lark(text, use_ascii='d')}/")


def _choice(texts: Sequence[str]) -> str:
    """Use one terminal, so that the choices form one automaton. JSON strings in ASCII are Lark strings."""
    if not texts:
        raise ValueError("has no texts, at least 1 is needed")
    if "" in texts:
        raise ValueError(f"text {list(texts).index('')} is empty")
    return _lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in dict.fromkeys(texts)))


def _bounded(text: str) -> str:
    """Disable forced tokens where a terminal may match nothing: the library could force others endlessly."""
    return f"{text}\n{_NO_FORCING}" if _MAY_BE_EMPTY.search(text) else text


def _lark(text: str) -> str:
    """Wrap as Lark: the library takes a text that begins with a brace for its own format."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _check_size(text: str, form: str = "") -> None:
    if (size_bytes := len(text.encode())) > MAX_DEFINITION_BYTES:
        raise ValueError(f"has {size_bytes} bytes{form}, the limit is {MAX_DEFINITION_BYTES}")


def _first_mask(matcher: GrammarMatcher) -> bytes:
    """Return the tokens that may begin the text, one bit per id.

    Raises ValueError for ignored parts, or a grammar that allows no text.
    """
    if matcher.warnings:
        raise GrammarError(f"would be enforced only in part: {' '.join(matcher.warnings)}")
    mask = matcher.mask()
    # The library reports exhausted limits at the next token, and none while it computes the mask.
    if first := int.from_bytes(mask, "little"):
        matcher.consume([(first & -first).bit_length() - 1])
    return mask
