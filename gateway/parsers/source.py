"""Text that arrives in pieces, read by generators, and JSON in it.

A reading function is a generator that yields where it needs more text, and goes on when there is some. So it
reads as if the text were complete, and what it returns cannot depend on how the text is cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

from gateway.parsers.events import SPACE
from text.json_text import ESCAPED_HALF, whole_characters
from wire.errors import require

_Result = TypeVar("_Result")
Reading: TypeAlias = Generator[None, None, _Result]
"""Yields when it needs more text; at the end of the text it never yields."""
Emit: TypeAlias = Callable[[str], None]

MAX_HELD_CHARACTERS = 32_768
"""Limit of text that waits because it may be a call: its name, and arguments that come before the name."""
MAX_NAME_CHARACTERS = 256
_MAX_SCALAR_CHARACTERS = 1_024

_NAME = re.compile(r"[^\s<>{}\[\]\"'`;,]+")
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u(?![dD][89abAB])[0-9a-fA-F]{4})')
_PAIR_OF_ESCAPES = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_FIRST_OF_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_PART_OF_ESCAPE = re.compile(
    r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?))?"
)
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_SPACE_RUN = re.compile(f"[{SPACE}]+")


class Markers:
    """Literals to search for. None contains another, so that the first match is final."""

    def __init__(self, *literals: str) -> None:
        require(
            not any(a != b and a in b for a in literals for b in literals), f"markers overlap: {literals}"
        )
        self.literals = literals
        self._pattern = re.compile("|".join(map(re.escape, literals)))
        self._longest = max(map(len, literals))
        self._firsts = frozenset(literal[0] for literal in literals)

    def search(self, text: str, begin: int) -> re.Match[str] | None:
        return self._pattern.search(text, begin)

    def begin_of_held(self, text: str, begin: int) -> int:
        """Return where the longest suffix of `text` begins that may become a marker."""
        for index in range(max(begin, len(text) + 1 - self._longest), len(text)):
            if text[index] in self._firsts and self._may_begin(text[index:]):
                return index
        return len(text)

    def _may_begin(self, text: str) -> bool:
        return any(literal.startswith(text) for literal in self.literals)


class TextSource:
    """The text of one answer that has arrived, and the position of the reader."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._hold_at: int | None = None
        self._is_finished = False

    def append(self, text: str) -> None:
        begin = self._at if self._hold_at is None else self._hold_at
        self._text = self._text[begin:] + text
        self._at -= begin
        if self._hold_at is not None:
            self._hold_at = 0

    def finish(self) -> None:
        """No more text follows."""
        self._is_finished = True

    def hold(self) -> None:
        """Keep the text from here on, for `rewind`."""
        self._hold_at = self._at

    def release(self) -> None:
        """Keep no more text."""
        self._hold_at = None

    def rewind(self) -> None:
        """Go back to where `hold` was called."""
        if self._hold_at is not None:
            self._at, self._hold_at = self._hold_at, None

    @property
    def ended_in_held(self) -> bool:
        """The text ended while it was held, and what is held is more than white space."""
        is_at_end = self._is_finished and self._at == len(self._text)
        return is_at_end and bool(self._text[self._hold_at :].strip(SPACE))

    @property
    def is_overfull(self) -> bool:
        """More text is held than a call may have before its name."""
        return self._hold_at is not None and self._at - self._hold_at > MAX_HELD_CHARACTERS

    def until(self, markers: Markers, emit: Emit) -> Reading[str | None]:
        """Emit the text before the first marker and return it; None at the end of the text."""
        while True:
            if match := markers.search(self._text, self._at):
                emit(self._text[self._at : match.start()])
                self._at = match.end()
                return match.group()
            end = len(self._text) if self._is_finished else markers.begin_of_held(self._text, self._at)
            emit(self._text[self._at : end])
            self._at = end
            if self._is_finished:
                return None
            yield

    def rest(self, emit: Emit) -> Reading[None]:
        """Emit all text that follows."""
        while True:
            emit(self._text[self._at :])
            self._at = len(self._text)
            if self._is_finished:
                return
            yield

    def peek(self) -> Reading[str]:
        """Return the next character; nothing at the end of the text."""
        while self._at == len(self._text):
            if self._is_finished:
                return ""
            yield
        return self._text[self._at]

    def literal(self, *literals: str) -> Reading[str]:
        """Read the one of these texts that stands here and return it; nothing if none does."""
        found = yield from self.sees(*literals)
        self._at += len(found)
        return found

    def sees(self, *literals: str) -> Reading[str]:
        """Return the one of these texts that stands here, without reading it."""
        while True:
            for literal in literals:
                if self._text.startswith(literal, self._at):
                    return literal
            rest = self._text[self._at : self._at + max(map(len, literals))]
            if self._is_finished or not any(literal.startswith(rest) for literal in literals):
                return ""
            yield

    def run(self, pattern: re.Pattern[str], limit: int) -> Reading[str]:
        """Read the characters that `pattern` matches; nothing if they are more than `limit`."""
        while True:
            match = pattern.match(self._text, self._at)
            end = self._at if match is None else match.end()
            if end - self._at > limit:
                return ""
            if end < len(self._text) or self._is_finished:
                text = self._text[self._at : end]
                self._at = end
                return text
            yield

    def pass_on(self, pattern: re.Pattern[str], emit: Emit) -> Reading[None]:
        """Emit the characters that `pattern` matches, as they arrive."""
        while not self.is_overfull:
            if (match := pattern.match(self._text, self._at)) is not None:
                emit(match.group())
                self._at = match.end()
            if self._at < len(self._text) or self._is_finished:
                return
            yield

    def skip_space(self) -> Reading[None]:
        yield from self.pass_on(_SPACE_RUN, _ignore)

    def name(self) -> Reading[str]:
        """Read a tool's name; nothing if it is too long or none stands here."""
        name = yield from self.run(_NAME, MAX_NAME_CHARACTERS)
        return "" if self.is_overfull else name

    def string_part(self, emit: Emit) -> Reading[bool]:
        """Emit a string from behind its first quote to its last one; False where it is invalid.

        Control characters, which JSON demands as escapes, are emitted as such.
        """
        while True:
            if self.is_overfull:
                return False
            yield from self.pass_on(_STRING_RUN, emit)
            character = yield from self.peek()
            if character == "\\":
                if not (escape := (yield from self._escape())):
                    return False
                emit(escape)
            elif character:
                self._at += 1
                emit(character if character == '"' else json.dumps(character)[1:-1])
                if character == '"':
                    return True
            else:
                return False

    def _escape(self) -> Reading[str]:
        """Read an escape, or two that are one character; half of a surrogate pair becomes U+FFFD."""
        while True:
            if match := _ESCAPE.match(self._text, self._at) or _PAIR_OF_ESCAPES.match(self._text, self._at):
                self._at = match.end()
                return whole_characters(match.group())
            if self._is_finished or not _PART_OF_ESCAPE.fullmatch(self._text, self._at):
                half = _FIRST_OF_PAIR.match(self._text, self._at)
                self._at = self._at if half is None else half.end()
                return "" if half is None else ESCAPED_HALF
            yield

    def scalar(self, emit: Emit) -> Reading[bool]:
        """Emit a number, true, false or null; False where none stands."""
        text = yield from self.run(_SCALAR_RUN, _MAX_SCALAR_CHARACTERS)
        if not _SCALAR.fullmatch(text):
            self._at -= len(text)
            return False
        emit(text)
        return True

    def json_string(self) -> Reading[str | None]:
        """Read a JSON string and return its value; None where it is invalid."""
        parts = ['"']
        if not (yield from self.literal('"')) or not (yield from self.string_part(parts.append)):
            return None
        if self.is_overfull:
            return None
        value: str = json.loads("".join(parts))
        return value

    def json_value(self, emit: Emit) -> Reading[bool]:
        """Emit a JSON value; False at the first character that cannot continue it.

        What is emitted until then begins a valid value. Nesting is not limited.
        """
        return (yield from _JsonReading(self, emit).value())


class _JsonReading:
    """One JSON value: `closers` has the closing brackets of the containers around the position."""

    def __init__(self, source: TextSource, emit: Emit) -> None:
        self._source, self._emit = source, emit
        self._closers: list[str] = []
        self._is_closed = False

    def value(self) -> Reading[bool]:
        while True:
            opener = yield from self._token('"', "{", "[")
            if opener == '"':
                is_valid = yield from self._source.string_part(self._emit)
            elif opener:
                is_valid = yield from self._open("}" if opener == "{" else "]")
                if is_valid and self._closers and not self._is_closed:
                    continue
            else:
                is_valid = yield from self._source.scalar(self._emit)
            if not is_valid or self._source.is_overfull:
                return False
            has_next = yield from self._next()
            if has_next is not True:
                return has_next is None

    def _open(self, closer: str) -> Reading[bool]:
        """Enter a container: read its first key, or its end if it is empty."""
        self._is_closed = bool((yield from self._token(closer)))
        if self._is_closed:
            return True
        self._closers.append(closer)
        return closer == "]" or (yield from self._key())

    def _next(self) -> Reading[bool | None]:
        """Read up to the next value of a container; None at the end of the outermost value."""
        while self._closers:
            closer = self._closers[-1]
            separator = yield from self._token(",", closer)
            if separator == ",":
                return closer == "]" or (yield from self._key())
            if not separator:
                return False
            self._closers.pop()
        return None

    def _key(self) -> Reading[bool]:
        if not (yield from self._token('"')) or not (yield from self._source.string_part(self._emit)):
            return False
        return bool((yield from self._token(":")))

    def _token(self, *tokens: str) -> Reading[str]:
        """Read one of these characters and the white space before it."""
        yield from self._source.pass_on(_SPACE_RUN, self._emit)
        token = yield from self._source.literal(*tokens)
        self._emit(token)
        return token


def _ignore(text: str) -> None:
    """White space between the parts of a call is of no use."""
