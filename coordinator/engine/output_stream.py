"""The output stream of one client call, with a cursor per choice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from coordinator.engine.output_buffer import Piece
from coordinator.engine.request import Choice, Request
from wire.errors import InvalidRequest, Superseded
from wire.ids import id_text
from wire.steps import TokenLogprobs

if TYPE_CHECKING:
    from coordinator.engine.output_batch import OutputBatch

MESSAGE_ENTRIES = 512
"""Tokens and alternatives in a message: it is encoded within a millisecond, as other calls wait meanwhile."""

TEXT_TOKENS_PER_TURN = 64
"""Tokens that a reader detokenizes per turn of the event loop: 0.2 to 0.5 ms."""


def max_message_tokens(num_top: int | None) -> int:
    """Tokens in a message, if each comes with `num_top` alternatives; None without log-probabilities."""
    return MESSAGE_ENTRIES if num_top is None else max(1, MESSAGE_ENTRIES // (num_top + 2))


@dataclass(frozen=True, slots=True)
class Positions:
    """Read positions of a client: tokens received per choice, and prompt log-probabilities received.

    `by_choice` overrides `default`. `prompt_token` None means none if choice 0 is read from its first token,
    otherwise all.
    """

    default: int = 0
    by_choice: Mapping[int, int] | None = None
    prompt_token: int | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """One message: new output of one choice.

    `prompt_logprobs` start at prompt token `first_prompt_token_index`; the first prompt token has None.
    """

    choice: Choice
    piece: Piece
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    first_prompt_token_index: int = 0


class OutputStream:
    """Reads the output of a request from given positions until another stream supersedes it.

    Tokens are buffered in the request, so a slow reader does not delay other requests. `num_unread_tokens`
    counts the tokens generated since the stream was opened and not read yet. With `batch`, the output is read
    together with the output of other requests.
    """

    batch: OutputBatch | None = None

    def __init__(self, request: Request, positions: Positions) -> None:
        """Raises InvalidRequest for a position beyond the output and for an unknown choice."""
        self.request = request
        self._cursors = _cursors(request, positions)
        self._is_read = [False] * len(request.choices)
        self._prompt_cursor = _prompt_cursor(request, positions, self._cursors[0])
        self._changed = asyncio.Event()
        self._is_superseded = False
        self._next_choice = 0
        self.num_unread_tokens = 0

    def wake(self) -> None:
        """Signal new output or the end of the request."""
        self._changed.set()

    def supersede(self) -> None:
        """End this stream because another call reads the request; no more output is sent on it."""
        self._is_superseded = True
        self._changed.set()

    async def outputs(self) -> AsyncIterator[Output]:
        """Yield output as it is generated, until all choices are read.

        Raises the request's error after all output before it, and Superseded immediately.
        """
        while True:
            if self._is_superseded:
                raise Superseded(f"another call attached to request {id_text(self.request.name)}")
            if (output := self._next_prompt_logprobs()) is not None:
                yield output
            elif (choice := self._unread_choice()) is not None:
                if self._has_text(choice):
                    yield self._read(choice)
                else:
                    await asyncio.sleep(0)  # others first: text of a long output takes up to a second
            elif all(self._is_read):
                return
            elif self.request.error is not None:
                raise self.request.error
            else:
                self._changed.clear()
                await self._changed.wait()  # no timeout: every request ends

    def _unread_choice(self) -> Choice | None:
        """The next choice with output; round-robin, so that one busy choice cannot starve the others."""
        choices = self.request.choices
        for choice in (*choices[self._next_choice :], *choices[: self._next_choice]):
            index = choice.index
            if not self._is_read[index] and choice.buffer.has_output(self._cursors[index]):
                return choice
        return None

    def _has_text(self, choice: Choice) -> bool:
        """Produce text of the choice's next message; return whether it is complete."""
        end = self._cursors[choice.index] + max_message_tokens(choice.sequence.sampling.logprobs)
        return choice.buffer.detokenize(end, max_new=TEXT_TOKENS_PER_TURN)

    def _read(self, choice: Choice) -> Output:
        index = choice.index
        most = max_message_tokens(choice.sequence.sampling.logprobs)
        piece = choice.buffer.read(self._cursors[index], max_tokens=most)
        self._cursors[index] += len(piece.tokens)
        self._is_read[index] = piece.is_last
        self.num_unread_tokens = max(0, self.num_unread_tokens - len(piece.tokens))
        self._next_choice = index + 1
        return Output(choice, piece)

    def _next_prompt_logprobs(self) -> Output | None:
        request, start = self.request, self._prompt_cursor
        if request.num_top_prompt_logprobs is None or start >= request.num_known_prompt_logprobs:
            return None
        most = max_message_tokens(request.num_top_prompt_logprobs)
        end = min(request.num_known_prompt_logprobs, start + most)
        self._prompt_cursor = end
        choice = request.choices[0]
        piece = choice.buffer.read(self._cursors[0], max_tokens=1)
        no_tokens = replace(piece, tokens=(), text="", logprobs=(), is_last=False)
        return Output(choice, no_tokens, request.prompt_logprobs(start, end), start)


OpenStream = Callable[[Request, Positions], OutputStream]
CallSoon = Callable[[Callable[[], None]], object]

READERS_PER_TURN = 8
"""Readers woken per turn of the event loop; sending a message takes one of them some 0.1 ms."""


class ReaderWakeups:
    """Wakes readers a few at a time, so that results, heartbeats and other calls get in between.

    Holds a reader at most once: one that waits gets all output of its request in one turn. A batch of readers
    is woken once per step, when all results are delivered.
    """

    def __init__(self, call_soon: CallSoon, *, is_delivering: Callable[[], bool]) -> None:
        """`is_delivering` while results are delivered in the next turns of the loop."""
        self._call_soon = call_soon
        self._is_delivering = is_delivering
        self._waiting: dict[OutputStream, None] = {}
        self._batches: dict[OutputBatch, None] = {}
        self._is_due = False

    def add(self, *streams: OutputStream) -> None:
        """Wake `streams` after those that were added before."""
        for stream in streams:
            if (batch := stream.batch) is not None:
                batch.add(stream)
                self._batches[batch] = None
            else:
                self._waiting[stream] = None
            self._wake_soon()

    def _wake_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._call_soon(self._wake_some)

    def _wake_some(self) -> None:
        self._is_due = False
        for stream in list(islice(self._waiting, READERS_PER_TURN)):
            del self._waiting[stream]
            stream.wake()
        if self._batches and not self._is_delivering():
            for batch in self._batches:
                batch.wake()
            self._batches.clear()
        if self._waiting or self._batches:
            self._wake_soon()


def _cursors(request: Request, positions: Positions) -> list[int]:
    by_choice = positions.by_choice or {}
    if unknown := sorted(set(by_choice) - set(range(len(request.choices)))):
        raise InvalidRequest(f"choice is {unknown[0]}, the request has {len(request.choices)} choices")
    cursors = [by_choice.get(choice.index, positions.default) for choice in request.choices]
    for choice, cursor in zip(request.choices, cursors, strict=True):
        if cursor > choice.buffer.num_tokens:
            num_tokens = choice.buffer.num_tokens
            raise InvalidRequest(
                f"from_token is {cursor}, choice {choice.index} has {num_tokens} tokens so far"
            )
    return cursors


def _prompt_cursor(request: Request, positions: Positions, first_cursor: int) -> int:
    cursor = positions.prompt_token
    if cursor is None:
        return request.num_prompt_tokens if first_cursor else 0
    if cursor > request.num_prompt_tokens:
        raise InvalidRequest(
            f"from_prompt_token is {cursor}, the prompt has {request.num_prompt_tokens} tokens"
        )
    return cursor
