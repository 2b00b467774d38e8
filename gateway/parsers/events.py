"""Events of a parsed answer, and the writer that orders and merges them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

SPACE = " \t\r\n"
_LONG_ID_CHARACTERS = 24
_SHORT_ID_CHARACTERS = 9


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins; its index counts the calls of the answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A part of a call's arguments. All parts of a complete call concatenate to a JSON object."""

    index: int
    fragment: str


ParserEvent: TypeAlias = Content | Reasoning | ToolCallStart | ToolCallArguments


def call_id(seed: str, index: int, *, is_short: bool = False) -> str:
    """Return the id of a call: the same one wherever the answer `seed` is parsed again.

    Short ids have 9 letters and digits, which the chat templates of Mistral's models demand.
    """
    digest = hashlib.sha256(f"{seed}:{index}".encode()).hexdigest()
    return digest[:_SHORT_ID_CHARACTERS] if is_short else f"call_{digest[:_LONG_ID_CHARACTERS]}"


def short_call_id(identifier: str) -> str:
    """Return the short id for another one, such as a client's; a short one stays."""
    if len(identifier) == _SHORT_ID_CHARACTERS and identifier.isascii() and identifier.isalnum():
        return identifier
    return hashlib.sha256(identifier.encode()).hexdigest()[:_SHORT_ID_CHARACTERS]


@dataclass(slots=True)
class ParsedCall:
    """A call of a whole answer."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedAnswer:
    """All events of an answer together."""

    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)

    def add(self, events: Iterable[ParserEvent]) -> None:
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case ToolCallStart(_, identifier, name):
                    self.calls.append(ParsedCall(identifier, name))
                case ToolCallArguments(index, fragment):
                    self.calls[index].arguments += fragment


class _Kind(Enum):
    CONTENT = "content"
    REASONING = "reasoning"
    ARGUMENTS = "arguments"


class EventWriter:
    """Collects the events of one answer: merges neighbours, and drops white space around markers.

    White space at the end of a text waits until it is known whether a marker follows.
    """

    def __init__(self, id_seed: str, *, has_short_ids: bool = False) -> None:
        self._id_seed, self._has_short_ids = id_seed, has_short_ids
        self._events: list[ParserEvent] = []
        self._kind = _Kind.CONTENT
        self._parts: list[str] = []
        self._space: list[str] = []
        self._skips_space = False
        self._num_calls = 0
        self.num_complete_calls = 0
        self.is_inside_call = False
        """The text ended, or is at the moment, within the markup of a call."""

    def content(self, text: str) -> None:
        self._text(_Kind.CONTENT, text)

    def reasoning(self, text: str) -> None:
        self._text(_Kind.REASONING, text)

    def boundary(self) -> None:
        """A marker was read: the white space on both sides of it is not text."""
        self._space.clear()
        self._skips_space = True

    def start_call(self, name: str) -> None:
        """Begin a call; `arguments` belong to it from now on."""
        self.boundary()
        self._flush()
        identifier = call_id(self._id_seed, self._num_calls, is_short=self._has_short_ids)
        self._events.append(ToolCallStart(self._num_calls, identifier, name))
        self._num_calls += 1

    def arguments(self, text: str) -> None:
        self._push(_Kind.ARGUMENTS, text)

    def end_call(self) -> None:
        """The arguments of the call are complete."""
        self.num_complete_calls += 1
        self.is_inside_call = False

    def finish(self) -> None:
        """Release white space that no marker follows."""
        space = "".join(self._space)
        self._space.clear()
        self._push(_Kind.REASONING if self._kind is _Kind.REASONING else _Kind.CONTENT, space)

    def drain(self) -> list[ParserEvent]:
        """Return the events since the last call."""
        self._flush()
        events, self._events = self._events, []
        return events

    def _text(self, kind: _Kind, text: str) -> None:
        if self._skips_space:
            text = text.lstrip(SPACE)
            self._skips_space = not text
        body = text.rstrip(SPACE)
        if body:
            self._push(kind, "".join(self._space))
            self._space.clear()
            self._push(kind, body)
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def _push(self, kind: _Kind, text: str) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._parts.append(text)

    def _flush(self) -> None:
        if not self._parts:
            return
        text = "".join(self._parts)
        self._parts.clear()
        if self._kind is _Kind.CONTENT:
            self._events.append(Content(text))
        elif self._kind is _Kind.REASONING:
            self._events.append(Reasoning(text))
        else:
            self._events.append(ToolCallArguments(self._num_calls - 1, text))
