"""Token tables from tokenizer.json for grammars, and matchers that apply a grammar.

Uses llguidance (docs/structured-output.md gives the reasons). The coordinator, which validates a grammar, and
the stage, which applies it, share this module and thus limits and end-of-sequence tokens. It needs neither
transformers nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xxhash
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from checkpoint.errors import UnusableTokenizer
from checkpoint.files import TEKKEN_FILE, TOKENIZER_FILE, is_named, read_regular
from checkpoint.gguf.files import is_gguf
from checkpoint.gguf.model import gguf_tokenizer_files
from checkpoint.mistral.tokenizer import is_tekken, read_tekken

MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
"""Limit for each tokenizer file; tokenizer.json with 262,000 ids has 33 MB."""
MAX_LEXER_STATES = 50_000
"""Limit per matcher, at 1 to 2 kB each: a hostile regular expression takes 100 MB instead of 500 MB.

The library's other limits bound the time of a mask to some hundred milliseconds.
"""
LEXER_FUEL = 200_000
"""Limit of expressions that one mask may construct, also the first one, where the library allows 1,000,000.

`(a{1000}){1000}` runs into it after 0.3 s instead of 7 to 9 s. A JSON schema with 400 patterns, an enum of
3,000 strings and `(a{300}){300}` stay below.
"""

_MAX_REASON_CHARACTERS = 400
_QUIET = 0


class GrammarError(ValueError):
    """An invalid grammar, a token that it does not allow, or a state without allowed tokens."""


class GrammarTokenizer:
    """Token tables of one tokenizer.json. Immutable; safe to share between threads."""

    def __init__(self, tables: LLTokenizer, checksum: int) -> None:
        self._tables = tables
        self.checksum = checksum
        """XXH3-64 of the file's bytes."""

    @classmethod
    def open(cls, path: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarTokenizer:
        """Read tokenizer.json of a directory, or make it of tekken.json or of a GGUF file.

        `vocab_size` is the width of the model's logits.

        Takes about 10 ms per 2,000 ids, 0.8 s for 152,000, and holds the GIL throughout. Raises
        UnusableTokenizer.
        """
        ends = [token_id for token_id in dict.fromkeys(eos_token_ids) if token_id < vocab_size]
        if not ends:
            raise UnusableTokenizer("the checkpoint has no end-of-sequence id, so a text cannot end")
        try:
            content = _tokenizer_json(path)
            tables = _tables(content, ends)
        except UnusableTokenizer:
            raise
        except ValueError as error:
            raise UnusableTokenizer(f"{TOKENIZER_FILE}: {one_line(str(error))}") from error
        return cls(tables, xxhash.xxh3_64_intdigest(content))

    def matcher(self, definition: str) -> GrammarMatcher:
        """Return a matcher at the start of a text. Releases the GIL. Raises GrammarError."""
        return GrammarMatcher(LLMatcher(self._tables, definition, log_level=_QUIET, limits=_limits()))


class GrammarMatcher:
    """State of one text in its grammar. Not thread-safe.

    The library never raises: it reports a wrong token or a dead end as a state, whose mask allows the text to
    end. This class raises GrammarError then, and at every later call.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._check()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Parts of the grammar that the library ignored."""
        return tuple(self._matcher.get_grammar_warnings())

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        return self._matcher.is_accepting()

    def consume(self, tokens: Sequence[int]) -> None:
        """Advance by these tokens. Raises GrammarError for a token that the grammar does not allow."""
        if not self._matcher.consume_tokens(list(tokens)):
            self._check()
            raise GrammarError("the text has ended")

    def mask(self) -> bytes:
        """Return the allowed next tokens, one bit per id, lowest bit first, padded to 4 bytes.

        A complete text allows only end-of-sequence ids. Releases the GIL. Raises GrammarError if no token is
        allowed.
        """
        mask = self._matcher.compute_bitmask()
        self._check()
        return mask

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(one_line(_plain(self._matcher.get_error())))


def one_line(reason: str) -> str:
    """Format the library's reason as one line, without source excerpts and carets."""
    lines = [line.strip() for line in reason.splitlines()]
    kept = [line for line in lines if line.strip("^ ") and not _is_echo(line)]
    text = " ".join(kept)
    return text if len(text) <= _MAX_REASON_CHARACTERS else text[:_MAX_REASON_CHARACTERS] + " ..."


def tokenizer_source(path: Path) -> Path:
    """The file that has the tokenizer of a checkpoint directory, or the GGUF file `path` itself."""
    return path if is_gguf(path) else path / (TEKKEN_FILE if is_tekken(path) else TOKENIZER_FILE)


def _tokenizer_json(path: Path) -> bytes:
    content = None
    if is_gguf(path):
        content = gguf_tokenizer_files(path).get(TOKENIZER_FILE)
    elif is_tekken(path):
        content = read_tekken(path, max_bytes=MAX_TOKENIZER_BYTES)[TOKENIZER_FILE]
    elif is_named(source := tokenizer_source(path)):
        content = read_regular(source, max_bytes=MAX_TOKENIZER_BYTES)
    if content is None:
        raise UnusableTokenizer(f"the checkpoint has no {TOKENIZER_FILE}")
    return content


def _tables(content: bytes, eos_token_ids: list[int]) -> LLTokenizer:
    text = content.decode().lstrip()
    if not text.startswith("{"):
        raise ValueError("is not a JSON object")  # the library would take it for a file name
    return LLTokenizer(text, eos_token=eos_token_ids)


def _is_echo(line: str) -> bool:
    number, bar, _ = line.partition(" | ")
    return bool(bar) and number.isdigit()


def _plain(error: str) -> str:
    """Remove the parser state that the library appends."""
    for mark in ("<non-verbose/>", "<state>"):
        error = error.partition(mark)[0]
    return "the grammar allows no token here" if error.startswith("NoExtension") else error


def _limits() -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=LEXER_FUEL,
        step_lexer_fuel=LEXER_FUEL,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )
