"""Grammars over the tokens of a checkpoint: tables of tokenizer.json, and matchers that walk a grammar.

The library is llguidance (docs/structured-output.md says why). The coordinator, which checks a grammar, and
the stage, which applies it, both match with what is here, so they cannot disagree about limits or about the
tokens that end a text. Neither transformers nor torch is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import xxhash
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from checkpoint.errors import UnusableTokenizer
from checkpoint.files import is_named, read_regular

TOKENIZER_FILE = "tokenizer.json"
MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
"""Of each file of a tokenizer; tokenizer.json of 262,000 ids has 33 MB."""
MAX_LEXER_STATES = 50_000
"""Of one matcher, at 1 to 2 kB each: what a hostile regular expression can take is 100 MB and not, as by the
library's default, 500 MB. The library's other limits bound the time of a mask to some hundred milliseconds.
"""

_MAX_REASON_CHARACTERS = 400
_QUIET = 0


class GrammarError(ValueError):
    """A grammar that cannot be used, a token that it does not allow, or a state where it allows none."""


class GrammarTokenizer:
    """The tokens of one tokenizer.json as tables. Immutable; safe to share between threads."""

    def __init__(self, tables: LLTokenizer, checksum: int) -> None:
        self._tables = tables
        self.checksum = checksum
        """XXH3-64 of the file's bytes."""

    @classmethod
    def open(cls, directory: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarTokenizer:
        """Reads tokenizer.json of `directory`; `vocab_size` is the width of the model's logits.

        Takes about 10 ms per 2,000 ids, 0.8 s for 152,000, and holds the GIL all that time. Raises
        UnusableTokenizer.
        """
        ends = [token_id for token_id in dict.fromkeys(eos_token_ids) if token_id < vocab_size]
        if not ends:
            raise UnusableTokenizer("the checkpoint names no end-of-sequence id, so no text could ever end")
        path = directory / TOKENIZER_FILE
        if not is_named(path):
            raise UnusableTokenizer(f"the checkpoint has no {TOKENIZER_FILE}")
        try:
            content = read_regular(path, max_bytes=MAX_TOKENIZER_BYTES)
            tables = _tables(content, ends)
        except ValueError as error:
            raise UnusableTokenizer(f"{TOKENIZER_FILE}: {one_line(str(error))}") from error
        return cls(tables, xxhash.xxh3_64_intdigest(content))

    def matcher(self, definition: str) -> GrammarMatcher:
        """At the beginning of a text. Drops the GIL. Raises GrammarError for what is no grammar."""
        return GrammarMatcher(LLMatcher(self._tables, definition, log_level=_QUIET, limits=_limits()))


class GrammarMatcher:
    """Where one text is in its grammar. To be used by one thread at a time.

    The library never raises: it reports a wrong token or a dead end as a state, and in that state its mask
    lets the text end. Here each of them is an error, and stays one.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._check()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the library has ignored in the grammar."""
        return tuple(self._matcher.get_grammar_warnings())

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        return self._matcher.is_accepting()

    def consume(self, tokens: Sequence[int]) -> None:
        """Goes on by these tokens. Raises GrammarError where the grammar does not allow one."""
        if not self._matcher.consume_tokens(list(tokens)):
            self._check()
            raise GrammarError("the text has ended")

    def mask(self) -> bytes:
        """The tokens that may come next, a bit per id, the lowest bit first; a multiple of 4 bytes.

        Only end-of-sequence ids where the text is complete. Drops the GIL. Raises GrammarError where no token
        may come next.
        """
        mask = self._matcher.compute_bitmask()
        self._check()
        return mask

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(one_line(_plain(self._matcher.get_error())))


def one_line(reason: str) -> str:
    """The library's reason in one line, without its echo of the source and the carets below."""
    lines = [line.strip() for line in reason.splitlines()]
    told = [line for line in lines if line.strip("^ ") and not _is_echo(line)]
    text = " ".join(told)
    return text if len(text) <= _MAX_REASON_CHARACTERS else text[:_MAX_REASON_CHARACTERS] + " ..."


def _tables(content: bytes, eos_token_ids: list[int]) -> LLTokenizer:
    text = content.decode().lstrip()
    if not text.startswith("{"):
        raise ValueError("is no JSON object")  # the library would take it for the name of a file
    return LLTokenizer(text, eos_token=eos_token_ids)


def _is_echo(line: str) -> bool:
    number, bar, _ = line.partition(" | ")
    return bool(bar) and number.isdigit()


def _plain(error: str) -> str:
    """Without the state of the parser, which the library appends."""
    for mark in ("<non-verbose/>", "<state>"):
        error = error.partition(mark)[0]
    return "the grammar allows no token here" if error.startswith("NoExtension") else error


def _limits() -> LLParserLimits:
    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
