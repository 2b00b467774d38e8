"""The output of all requests of one Serve stream: columns of tokens, one message per step."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from coordinator.engine.output_stream import OutputStream, Positions
from coordinator.engine.request import Choice, Request
from wire.errors import InvalidRequest, Overloaded, RequestNotFound, ServingError, Superseded
from wire.ids import id_text
from wire.steps import TokenLogprobs
from wire.tenant_shares import has_room

MAX_NUMBERS = 4096
"""Live requests of one stream. A tenant has its equal part of them although others have filled them."""

MESSAGE_TOKENS = 4096
"""Tokens in a message."""

LOGPROBS_COST = 8
"""Tokens that the encoding of one log-probability counts as."""

STATE_BYTES_PER_TOKEN = 64
"""Bytes of client state that count as a token."""


class Accepted(NamedTuple):
    """A request that begins to be read; `secret` is empty if its client chose it."""

    number: int
    request: Request
    secret: str
    client_state: bytes

    def __repr__(self) -> str:
        return f"Accepted({self.number})"


class LogprobRows(NamedTuple):
    """Log-probabilities of tokens, for a choice of a request."""

    number: int
    choice: Choice
    first_index: int
    tokens: Sequence[int]
    rows: Sequence[TokenLogprobs | None]


class Failure(NamedTuple):
    """An error of a request, or of a command for it."""

    number: int
    error: Exception


@dataclass(slots=True)
class BatchMessage:
    """New output: counts[i] tokens of choice choices[i] of request numbers[i], one after the other."""

    accepted: list[Accepted] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobRows] = field(default_factory=list)
    prompt_logprobs: list[LogprobRows] = field(default_factory=list)
    ends: list[tuple[int, Choice]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    rejections: list[Failure] = field(default_factory=list)
    room: int = MESSAGE_TOKENS
    """Tokens that still fit."""

    @property
    def has_content(self) -> bool:
        parts = (self.accepted, self.numbers, self.prompt_logprobs, self.ends, self.failures, self.rejections)
        return any(parts)


class NumberedStream(OutputStream):
    """Reads one request for an `OutputBatch`, up to its credit."""

    batch: "OutputBatch"

    def __init__(
        self, request: Request, positions: Positions, *, opening: "NumberedOpening", credit: int
    ) -> None:
        super().__init__(request, positions)
        self.batch = opening.batch
        self.number = opening.number
        self.credit = credit
        state = request.client_state if opening.includes_state else b""
        self._acceptance: Accepted | None = Accepted(opening.number, request, opening.secret, state)

    def wake(self) -> None:
        self.batch.add(self)
        self.batch.wake()

    def supersede(self) -> None:
        request = id_text(self.request.name)
        self.batch.fail(self.number, Superseded(f"another call attached to request {request}"))

    def collect(self, message: BatchMessage) -> bool:
        """Move output into `message` while it has room; return whether the number has ended."""
        if (acceptance := self._acceptance) is not None:
            self._acceptance = None
            message.accepted.append(acceptance)
            message.room -= len(acceptance.client_state) // STATE_BYTES_PER_TOKEN
        if self.request.num_top_prompt_logprobs is not None:
            self._collect_prompt_logprobs(message)
        for choice in self.request.choices:
            if not self._is_read[choice.index]:
                self._collect_choice(choice, message)
        if all(self._is_read):
            return True
        if (error := self.request.error) is None or self._has_unread:
            return False
        message.failures.append(Failure(self.number, error))
        return True

    def skip(self, choice: Choice) -> None:
        """Read no further tokens of an ended choice; its end follows."""
        self._cursors[choice.index] = choice.buffer.num_tokens

    def _collect_choice(self, choice: Choice, message: BatchMessage) -> None:
        index, buffer = choice.index, choice.buffer
        cursor, readable = self._cursors[index], buffer.num_readable_tokens
        num_top = choice.sequence.sampling.logprobs
        cost = 1 if num_top is None else LOGPROBS_COST * (num_top + 2)
        if (count := min(readable - cursor, self.credit, -(-message.room // cost))) > 0:
            end = self._cursors[index] = cursor + count
            tokens = buffer.token_ids(cursor, end)
            message.numbers.append(self.number)
            message.choices.append(index)
            message.counts.append(count)
            message.token_ids.extend(tokens)
            message.room -= count * cost
            self.credit -= count
            self.num_unread_tokens = max(0, self.num_unread_tokens - count)
            if num_top is not None:
                rows = buffer.logprobs(cursor, end)
                message.logprobs.append(LogprobRows(self.number, choice, cursor, tokens, rows))
            cursor = end
        if buffer.is_finished and cursor >= readable:
            self._is_read[index] = True
            message.ends.append((self.number, choice))

    def _collect_prompt_logprobs(self, message: BatchMessage) -> None:
        request, start = self.request, self._prompt_cursor
        assert request.num_top_prompt_logprobs is not None
        cost = LOGPROBS_COST * (request.num_top_prompt_logprobs + 2)
        count = min(request.num_known_prompt_logprobs - start, self.credit, -(-message.room // cost))
        if count <= 0:
            return
        self._prompt_cursor = end = start + count
        self.credit -= count
        message.room -= count * cost
        tokens = request.choices[0].sequence.all_tokens[start:end]
        rows = request.prompt_logprobs(start, end)
        message.prompt_logprobs.append(LogprobRows(self.number, request.choices[0], start, tokens, rows))

    @property
    def _has_unread(self) -> bool:
        """Output waits for credit or room."""
        request = self.request
        if request.num_top_prompt_logprobs is not None and (
            self._prompt_cursor < request.num_known_prompt_logprobs
        ):
            return True
        cursors = zip(request.choices, self._cursors, strict=True)
        return any(cursor < choice.buffer.num_readable_tokens for choice, cursor in cursors)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedOpening:
    """Opens the stream of a number's request; `secret` is what the client must be told of it."""

    batch: "OutputBatch"
    number: int
    secret: str = field(default="", repr=False)
    includes_state: bool = False

    def __call__(self, request: Request, positions: Positions) -> OutputStream:
        return self.batch.open(self, request, positions)


class OutputBatch:
    """Owns the numbers of one Serve stream and collects the output of their requests.

    A number is reserved, then read by a `NumberedStream`, then ended. Output is collected when a message can
    be sent, so what a slow connection does not take waits in the requests.
    """

    def __init__(self, on_end: Callable[[NumberedStream], None]) -> None:
        """`on_end` is called once for the stream of a number that has ended."""
        self._on_end = on_end
        self._reserved: dict[int, int] = {}  # credit by number
        self._streams: dict[int, NumberedStream] = {}
        self._owners: dict[int, str] = {}
        self._last_number = -1
        self._changed: dict[NumberedStream, None] = {}
        self._next = BatchMessage()
        self._woken = asyncio.Event()
        self._is_closed = False
        self._error: Exception | None = None

    def reserve(self, number: int, credit: int, *, owner: str = "") -> None:
        """Reserve a new number; each owner has a part of them.

        Raises InvalidRequest, and Overloaded above `MAX_NUMBERS`.
        """
        if number <= self._last_number:
            raise InvalidRequest(
                f"number is {number}, must be greater than {self._last_number}, the last one"
            )
        num_live = len(self._owners)
        if num_live >= MAX_NUMBERS and not has_room(
            Counter(self._owners.values()), owner, 1, limit=MAX_NUMBERS
        ):
            raise Overloaded(f"{num_live} requests are live on this stream, the limit is {MAX_NUMBERS}")
        self._last_number = number
        self._reserved[number] = credit
        self._owners[number] = owner

    def open(self, opening: NumberedOpening, request: Request, positions: Positions) -> NumberedStream:
        """Begin to read the request of a reserved number. Raises InvalidRequest for the positions."""
        number = opening.number
        stream = NumberedStream(request, positions, opening=opening, credit=self._reserved[number])
        del self._reserved[number]
        self._streams[number] = stream
        stream.wake()
        return stream

    def is_reserved(self, number: int) -> bool:
        """Whether the request of a number is not accepted yet."""
        return number in self._reserved

    def find(self, number: int) -> NumberedStream | None:
        """The stream of a number; None before it is open and after its end.

        Raises RequestNotFound for a number that was never reserved.
        """
        if number > self._last_number:
            raise RequestNotFound(f"number {number} is not in use")
        return self._streams.get(number)

    def grant(self, number: int, tokens: int) -> None:
        """Add to the credit of a number; no effect after its end. Raises RequestNotFound."""
        stream = self.find(number)
        if stream is not None:
            stream.credit += tokens
            stream.wake()
        elif number in self._reserved:
            self._reserved[number] += tokens

    def fail(self, number: int, error: Exception) -> None:
        """End a number with `error`, before output that was not sent; no effect after its end."""
        stream, credit = self._streams.get(number), self._reserved.pop(number, None)
        if stream is not None:
            self._end(stream)
        elif credit is None:
            return
        else:
            del self._owners[number]
        failures = self._next.failures
        failures.append(Failure(number, error))
        self.wake()

    def end(self, number: int) -> None:
        """End a number without a message; no effect after its end."""
        if self._reserved.pop(number, None) is not None:
            del self._owners[number]
        if (stream := self._streams.get(number)) is not None:
            self._end(stream)

    def reject(self, number: int, error: ServingError) -> None:
        """Report a command that had no effect."""
        rejections = self._next.rejections
        rejections.append(Failure(number, error))
        self.wake()

    def add(self, stream: OutputStream) -> None:
        """Collect the output of `stream`, one of this batch, for the next message."""
        assert isinstance(stream, NumberedStream)
        if stream.number in self._streams:
            self._changed[stream] = None

    def wake(self) -> None:
        """Send a message soon."""
        self._woken.set()

    def close(self, error: Exception | None = None) -> None:
        """End `messages` after what can be sent, with `error` if given."""
        self._is_closed, self._error = True, error
        self._woken.set()

    def end_all(self) -> None:
        """End all numbers without a message."""
        for stream in list(self._streams.values()):
            self._end(stream)

    async def messages(self) -> AsyncIterator[BatchMessage]:
        """Yield messages until `close`."""
        while True:
            message = self._take()
            if message.has_content:
                yield message
            elif self._changed:
                continue
            elif self._error is not None:
                raise self._error
            elif self._is_closed:
                return
            else:
                self._woken.clear()
                await self._woken.wait()  # no timeout: the stream may be idle for hours

    def _take(self) -> BatchMessage:
        """Collect each stream once: an end may deliver further output, which is for the next message."""
        waiting, self._changed = self._changed, {}
        while waiting and self._next.room > 0:
            stream = next(iter(waiting))
            del waiting[stream]
            if self._streams.get(stream.number) is not stream:
                continue  # the end of another one ended it
            if stream.collect(self._next):
                self._end(stream)
            elif self._next.room <= 0:
                waiting[stream] = None  # behind the others
        self._changed = waiting | self._changed
        message, self._next = self._next, BatchMessage()
        return message

    def _end(self, stream: NumberedStream) -> None:
        del self._streams[stream.number], self._owners[stream.number]
        self._changed.pop(stream, None)
        self._on_end(stream)
