"""One client request and its choices; the registry of active and recently finished requests."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections import Counter
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from coordinator.engine.output_buffer import OutputBuffer
from coordinator.scheduler.sequence import Sequence
from wire.errors import (
    AttachSecretMismatch,
    InvalidRequest,
    RequestExists,
    RequestNotFound,
    ServingError,
    require,
)
from wire.ids import RequestId, id_text
from wire.steps import TokenLogprobs

if TYPE_CHECKING:
    from coordinator.engine.output_stream import OutputStream


_GIVEN = re.compile(r"[\x21-\x7e]{32,128}")


def new_attach_secret() -> str:
    """43 characters of base64url, for a request whose client brings none."""
    return secrets.token_urlsafe(32)


def digest_of(secret: str) -> bytes:
    """What is kept of a secret. Raises InvalidRequest for one that is too short to be one."""
    if not _GIVEN.fullmatch(secret):
        raise InvalidRequest(
            f"the attach secret has {len(secret)} characters, must be 32 to 128 of printable ASCII"
        )
    return hashlib.sha256(secret.encode()).digest()


def check_attach_secret(given: str, digest: bytes) -> None:
    """Raises AttachSecretMismatch unless `digest` is that of `given`; for an empty one nothing passes."""
    is_it = hmac.compare_digest(hashlib.sha256(given.encode()).digest(), digest)
    if not is_it:
        raise AttachSecretMismatch("the attach secret of the request is missing or wrong")


@dataclass(slots=True)
class RequestTotals:
    """Requests that have ended, since the coordinator started. `orphaned` of the cancelled ones were found by
    the sweeper.
    """

    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    orphaned: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the request's sequences, with the output that the client gets of it."""

    sequence: Sequence
    transcript: OutputBuffer

    @property
    def index(self) -> int:
        return self.sequence.key.choice


class Trace(Protocol):
    """The trace of a request, as far as requests know it."""

    arrived_s: float
    """When the call came, on the engine's clock."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""

    @property
    def traceparent(self) -> str:
        """W3C's header, of the request's span."""

    @property
    def caller_traceparent(self) -> str:
        """Of the span that it is below, or empty."""


@dataclass(slots=True)
class FailureHistory:
    """Failures that hit one request; `alone` means that nothing else ran."""

    num_failures: int = 0
    """Faults, breaks and lost workers while steps of the request were unfinished."""
    num_faults: int = 0
    num_tokens_at_fault: int = 0
    num_deaths_alone: int = 0
    num_unrelated_before_deaths: int = 0
    num_device_failures_alone: int = 0
    num_breaks_alone: int = 0
    num_tokens_before_breaks: int = 0

    def on_token(self) -> None:
        """What ran alone without a token in between counts no more."""
        self.num_deaths_alone = self.num_breaks_alone = self.num_device_failures_alone = 0


class Request:
    """Lives until each of its choices has finished, or it has ended as a whole with an error.

    `keep_s` None: it ends with the call that reads it. Otherwise it goes on without a reader, and when it has
    ended its output is kept for so long after the last reader has left.
    """

    def __init__(
        self,
        request_id: RequestId,
        choices: Items[Choice],
        *,
        client: str,
        keep_s: float | None = None,
        num_top_prompt_logprobs: int | None = None,
        num_top_echoed: int | None = None,
    ) -> None:
        """Log-probabilities of the prompt, with so many most likely tokens each, are for the client as such,
        and for the transcripts that echo it; None: they are not.
        """
        require(
            [choice.sequence.key for choice in choices]
            == [(request_id, index) for index in range(len(choices))],
            "the choices of a request are its sequences in order",
        )
        self._id = request_id
        self._choices = tuple(choices)
        self.client = client
        self.keep_s = keep_s
        self.num_top_prompt_logprobs = num_top_prompt_logprobs
        self._num_top_echoed = num_top_echoed
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._error: ServingError | None = None
        self._ended_s: float | None = None
        self.attachment: OutputStream | None = None
        self.deadline_s: float | None = None
        self.accepted_s = 0.0
        self.left_s = 0.0
        self.failures = FailureHistory()
        self.trace: Trace | None = None
        self.attach_digest = b""
        """Of the secret that Attach and Cancel need; empty: nobody has one."""
        self.awaited_until_s: float | None = None
        """Its reader was cut off by the end of a coordinator, and is expected back until then."""
        self.add_prompt_logprobs(())

    @property
    def id(self) -> RequestId:
        return self._id

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self._choices

    @property
    def is_live(self) -> bool:
        """It has not ended yet."""
        return self._ended_s is None

    @property
    def is_finished(self) -> bool:
        """The output of every choice is complete. (Sequences know it earlier: one step may end several.)"""
        return all(choice.transcript.is_finished for choice in self._choices)

    @property
    def is_detached(self) -> bool:
        """Nobody reads it, and that is as it should be."""
        return self.attachment is None and self.is_kept

    @property
    def is_kept(self) -> bool:
        """Without a reader it goes on, and its output is kept when it has ended."""
        return self.keep_s is not None or self.awaited_until_s is not None

    @property
    def live_sequences(self) -> list[Sequence]:
        return [choice.sequence for choice in self._choices if choice.sequence.state.is_live]

    @property
    def num_queued(self) -> int:
        """Sequences that wait for blocks."""
        return sum(choice.sequence.state.is_queued for choice in self._choices)

    @property
    def num_generated_tokens(self) -> int:
        """Of all choices."""
        return sum(choice.sequence.num_generated_tokens for choice in self._choices)

    @property
    def num_prompt_tokens(self) -> int:
        return self._choices[0].sequence.num_prompt_tokens

    @property
    def max_sequence_tokens(self) -> int:
        """The most tokens that one of its sequences may come to."""
        return self.num_prompt_tokens + self._choices[0].sequence.max_tokens

    @property
    def num_known_prompt_logprobs(self) -> int:
        """Leading tokens of the prompt whose log-probabilities are known; the first one has none, and waits
        for the second.
        """
        num_known = len(self._prompt_logprobs) + 1
        return num_known if num_known > 1 or self.num_prompt_tokens == 1 else 0

    @property
    def known_prompt_logprobs(self) -> list[TokenLogprobs]:
        """From the prompt's second token on, with as many of the most likely tokens as were computed."""
        return list(self._prompt_logprobs)

    def prompt_logprobs(self, start: int, end: int) -> tuple[TokenLogprobs | None, ...]:
        """Those of the prompt's tokens [start, end), which are known, as the client wants them."""
        assert self.num_top_prompt_logprobs is not None
        return _with_top([None, *self._prompt_logprobs][start:end], self.num_top_prompt_logprobs)

    @property
    def error(self) -> ServingError | None:
        """What ended it, if it did not finish."""
        return self._error

    @property
    def expires_s(self) -> float | None:
        """When its output is forgotten; None while it is live or read."""
        if self._ended_s is None or self.attachment is not None:
            return None
        return max(max(self._ended_s, self.left_s) + (self.keep_s or 0.0), self.awaited_until_s or 0.0)

    def add_prompt_logprobs(self, logprobs: Items[TokenLogprobs]) -> None:
        """Takes those that follow the known ones."""
        self._prompt_logprobs.extend(logprobs)
        waiting = [choice for choice in self._choices if choice.transcript.is_waiting_for_prompt_logprobs]
        if not waiting or self.num_known_prompt_logprobs < self.num_prompt_tokens:
            return
        assert self._num_top_echoed is not None
        echoed = _with_top([None, *self._prompt_logprobs], self._num_top_echoed)
        for choice in waiting:
            choice.transcript.set_prompt_logprobs(echoed)

    def end(self, now_s: float, error: ServingError | None = None) -> None:
        """Every choice has ended: all of them finished, or `error` ended what was live. Once."""
        require(self._ended_s is None, "a request ends twice")
        require(not self.live_sequences, "a request ends before its last choice")
        self._ended_s = now_s
        self._error = error
        self.wake()

    def wake(self) -> None:
        """Wakes the reader."""
        if self.attachment is not None:
            self.attachment.wake()


def _with_top(logprobs: Items[TokenLogprobs | None], num_top: int) -> tuple[TokenLogprobs | None, ...]:
    return tuple(row and replace(row, top=row.top[:num_top]) for row in logprobs)


MAX_KEPT = 1024
"""Ended requests whose output is kept at once; one more, and the one that ended first is forgotten."""


class RequestRegistry:
    """Owner of the requests by id."""

    def __init__(self) -> None:
        self._live: dict[RequestId, Request] = {}
        self._kept: dict[RequestId, Request] = {}
        self._num_live_of: Counter[str] = Counter()

    @property
    def live(self) -> list[Request]:
        """In the order of their acceptance."""
        return list(self._live.values())

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def num_live_of(self, client: str) -> int:
        """Sequences of the client's live requests, ended choices included."""
        return self._num_live_of[client]

    def check_new(self, request_id: RequestId) -> None:
        """Raises RequestExists when the id is in use."""
        if request_id in self._live:
            raise RequestExists(f"request {id_text(request_id)} is live already")
        if request_id in self._kept:
            raise RequestExists(f"request {id_text(request_id)} has ended, and its output is kept")

    def add(self, request: Request) -> None:
        """Takes a new live request. Raises RequestExists."""
        self.check_new(request.id)
        self._live[request.id] = request
        self._num_live_of[request.client] += len(request.choices)

    def live_request(self, request_id: RequestId) -> Request | None:
        return self._live.get(request_id)

    def has(self, request_id: RequestId) -> bool:
        """It is live or kept."""
        return request_id in self._live or request_id in self._kept

    def find(self, request_id: RequestId) -> Request:
        """A live or a kept request. Raises RequestNotFound."""
        request = self._live.get(request_id) or self._kept.get(request_id)
        if request is None:
            raise RequestNotFound(f"no request {id_text(request_id)} is live or kept")
        return request

    def end(self, request: Request) -> None:
        """A live request has ended; it is kept if that was asked for."""
        del self._live[request.id]
        self._num_live_of[request.client] -= len(request.choices)
        if not self._num_live_of[request.client]:
            del self._num_live_of[request.client]
        if request.is_kept:
            self._kept[request.id] = request
            if len(self._kept) > MAX_KEPT:
                del self._kept[next(iter(self._kept))]

    def forget(self, request_id: RequestId) -> None:
        """A kept request is not wanted any more."""
        del self._kept[request_id]

    def expire(self, now_s: float) -> None:
        """Forgets what was kept long enough."""
        for request in list(self._kept.values()):
            if (expires_s := request.expires_s) is not None and expires_s <= now_s:
                self.forget(request.id)
