"""Client requests, their choices, and the registry of live and kept requests."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from collections import Counter, abc
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from coordinator.engine.output_buffer import OutputBuffer
from coordinator.scheduler.sequence import FinishReason, Sequence
from wire.errors import (
    AttachSecretMismatch,
    InvalidRequest,
    Overloaded,
    RequestCancelled,
    RequestExists,
    RequestNotFound,
    ServingError,
    require,
)
from wire.ids import RequestId, id_text
from wire.log_context import log_context
from wire.steps import StartRecord, TokenLogprobs
from wire.tenant_shares import TenantCache

if TYPE_CHECKING:
    from coordinator.engine.output_stream import OutputStream


log = logging.getLogger(__name__)

MAX_OBSERVERS = 64
"""Streams that read one request beside its reader."""

_VALID_SECRET = re.compile(r"[\x21-\x7e]{32,128}")


def new_attach_secret() -> str:
    """Create a random secret: 43 characters of base64url."""
    return secrets.token_urlsafe(32)


def secret_digest(secret: str, tenant: str = "") -> bytes:
    """SHA-256 digest of a secret for one tenant. Raises InvalidRequest for an invalid length or character."""
    if not _VALID_SECRET.fullmatch(secret):
        raise InvalidRequest(
            f"attach secret has {len(secret)} characters, expected 32 to 128 printable ASCII characters"
        )
    return _digest(secret, tenant)


def _digest(secret: str, tenant: str) -> bytes:
    # No secret has a space: one of a tenant is no other's, and without tenants it is the secret's own digest.
    return hashlib.sha256(f"{secret} {tenant}".encode() if tenant else secret.encode()).digest()


def check_attach_secret(secret: str, digest: bytes, tenant: str = "") -> None:
    """Raise AttachSecretMismatch unless `digest` matches `secret` and `tenant`. An empty one never does."""
    if not hmac.compare_digest(_digest(secret, tenant), digest):
        raise AttachSecretMismatch("attach secret of the request is missing or wrong")


@dataclass(slots=True)
class RequestTotals:
    """Ended requests since the coordinator started; orphans are also counted as cancelled."""

    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    orphaned: int = 0


@dataclass(slots=True)
class ChoiceTimes:
    """Milestones of a choice on the engine's clock; None until then."""

    accepted_s: float = 0.0
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    def on_start(self, now_s: float) -> None:
        """A step with the choice was sent; only the first one counts."""
        if self.started_s is None:
            self.started_s = now_s

    def on_token(self, now_s: float) -> None:
        """Call for the first token and for the last one."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence of a request, its output buffer and its times."""

    sequence: Sequence
    buffer: OutputBuffer
    times: ChoiceTimes = field(default_factory=ChoiceTimes)

    @property
    def index(self) -> int:
        return self.sequence.key.choice

    def stop(self, after_token: int, *, now_s: float) -> None:
        """End the output after its first `after_token` generated tokens, of a sequence that has finished."""
        self.sequence.truncate(after_token)
        self.buffer.truncate(after_token)
        self.buffer.finish(FinishReason.STOP)
        self.times.on_token(now_s)


class Trace(Protocol):
    """The trace of a request."""

    arrived_s: float
    """Arrival of the call, on the engine's clock."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""

    @property
    def traceparent(self) -> str:
        """W3C `traceparent` header of the request's span."""

    @property
    def caller_traceparent(self) -> str:
        """`traceparent` header of the caller's span, or empty."""


@dataclass(slots=True)
class FailureHistory:
    """Failures while a request was running; `alone` means that no other request was running."""

    num_failures: int = 0
    """Faults, broken streams and lost workers while steps of the request were in flight."""
    num_faults: int = 0
    num_tokens_at_fault: int = 0
    num_deaths_alone: int = 0
    num_unrelated_before_deaths: int = 0
    num_device_failures_alone: int = 0
    num_breaks_alone: int = 0
    num_tokens_before_breaks: int = 0

    def on_token(self) -> None:
        """Reset the counters of failures while the request ran alone."""
        self.num_deaths_alone = self.num_breaks_alone = self.num_device_failures_alone = 0


class Request:
    """A request is live until all its choices have finished or an error ends it.

    `keep_s` None ends the request with the call that reads it. Otherwise it continues without a reader, and
    its output is kept for `keep_s` seconds after its end and after the last reader disconnects.
    """

    def __init__(
        self,
        request_id: RequestId,
        choices: abc.Sequence[Choice],
        *,
        client: str,
        client_state: bytes = b"",
        keep_s: float | None = None,
        num_top_prompt_logprobs: int | None = None,
        num_top_echoed: int | None = None,
    ) -> None:
        """`num_top_prompt_logprobs` alternatives per prompt token are reported to the client, and
        `num_top_echoed` with an echoed prompt; None reports none.
        """
        _take_choices(request_id, choices, client)
        self._id = self.name = request_id
        self.tenant = ""
        self._choices = tuple(choices)
        self.client = client
        self.client_state = client_state
        self.keep_s = keep_s
        self.num_top_prompt_logprobs = num_top_prompt_logprobs
        self._num_top_echoed = num_top_echoed
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._error: ServingError | None = None
        self._ended_s: float | None = None
        self.stream: OutputStream | None = None
        self._observers: dict[OutputStream, None] = {}
        self.deadline_s: float | None = None
        self.detached_s = 0.0
        self.failures = FailureHistory()
        self.trace: Trace | None = None
        self.attach_digest = b""
        """Digest of the secret for Attach and Cancel; empty rejects both."""
        self.reattach_until_s: float | None = None
        """Until when a reader that was disconnected by a coordinator restart may reattach."""
        self.add_prompt_logprobs(())

    @property
    def id(self) -> RequestId:
        """Unique among all requests. The client's `name` for it, unless another tenant's request has that."""
        return self._id

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self._choices

    @property
    def accepted_s(self) -> float:
        """When the request was accepted, or restored by this coordinator."""
        return self._choices[0].times.accepted_s

    @accepted_s.setter
    def accepted_s(self, now_s: float) -> None:
        for choice in self._choices:
            choice.times.accepted_s = now_s

    @property
    def streams(self) -> tuple[OutputStream, ...]:
        """The streams of the reader and of observers."""
        return (*self._observers,) if self.stream is None else (self.stream, *self._observers)

    def observe(self, open_stream: abc.Callable[[], OutputStream]) -> OutputStream:
        """Open an observer. Raises Overloaded if there are too many."""
        if (number := len(self._observers)) >= MAX_OBSERVERS:
            text = f"{number} calls observe request {id_text(self._id)}, the limit is {MAX_OBSERVERS}"
            raise Overloaded(text)
        stream = open_stream()
        self._observers[stream] = None
        return stream

    def drop_observer(self, stream: OutputStream) -> None:
        """No effect for a stream that does not observe."""
        self._observers.pop(stream, None)

    @property
    def is_live(self) -> bool:
        """True until `end`."""
        return self._ended_s is None

    @property
    def is_finished(self) -> bool:
        """The output of every choice is complete; sequences may finish before their output is written."""
        return all(choice.buffer.is_finished for choice in self._choices)

    @property
    def is_detached(self) -> bool:
        """Continues or is kept without a reader."""
        return self.stream is None and self.is_kept

    @property
    def is_kept(self) -> bool:
        """Continues without a reader, and its output is kept after the end."""
        return self.keep_s is not None or self.reattach_until_s is not None

    @property
    def live_sequences(self) -> list[Sequence]:
        return [choice.sequence for choice in self._choices if choice.sequence.state.is_live]

    @property
    def num_queued(self) -> int:
        """Sequences in the queue."""
        return sum(choice.sequence.state.is_queued for choice in self._choices)

    @property
    def num_generated_tokens(self) -> int:
        """Generated tokens of all choices."""
        return sum(choice.sequence.num_generated_tokens for choice in self._choices)

    @property
    def num_prompt_tokens(self) -> int:
        return self._choices[0].sequence.num_prompt_tokens

    @property
    def max_sequence_tokens(self) -> int:
        """Maximum length of one of its sequences, prompt included."""
        return self.num_prompt_tokens + self._choices[0].sequence.max_tokens

    @property
    def num_known_prompt_logprobs(self) -> int:
        """Leading prompt tokens whose log-probabilities are known.

        The first token has none; it counts as known together with the second.
        """
        num_known = len(self._prompt_logprobs) + 1
        return num_known if num_known > 1 or self.num_prompt_tokens == 1 else 0

    @property
    def known_prompt_logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities from the second prompt token on, with all computed alternatives."""
        return list(self._prompt_logprobs)

    def prompt_logprobs(self, start: int, end: int) -> tuple[TokenLogprobs | None, ...]:
        """Known log-probabilities of prompt tokens [start, end), with the requested alternatives."""
        assert self.num_top_prompt_logprobs is not None
        return _with_top([None, *self._prompt_logprobs][start:end], self.num_top_prompt_logprobs)

    @property
    def error(self) -> ServingError | None:
        """The error that ended the request, if any, as a new exception.

        A raised one holds the frames that it passed, and a kept request would hold those of all its readers.
        """
        return None if self._error is None else self._error.again()

    @property
    def expires_s(self) -> float | None:
        """When its output is removed; None while the request is live or has a reader."""
        if self._ended_s is None or self.stream is not None:
            return None
        return max(max(self._ended_s, self.detached_s) + (self.keep_s or 0.0), self.reattach_until_s or 0.0)

    def choice_to_stop(self, index: int, after_token: int) -> Choice:
        """The choice that a client may end after `after_token` tokens, or that has ended.

        Raises InvalidRequest for a choice or token that there is not, and where text decides the end.
        """
        if index >= len(self._choices):
            raise InvalidRequest(f"choice is {index}, the request has {len(self._choices)} choices")
        choice, buffer = self._choices[index], self._choices[index].buffer
        if buffer.has_text:
            raise InvalidRequest("the request's output has text, stop needs output TOKENS_ONLY")
        if not buffer.is_finished and not 1 <= after_token <= buffer.num_generated_tokens:
            raise InvalidRequest(
                f"after_token is {after_token}, choice {index} has {buffer.num_generated_tokens} tokens"
            )
        return choice

    def add_prompt_logprobs(self, logprobs: abc.Sequence[TokenLogprobs]) -> None:
        """Append log-probabilities of the next prompt tokens."""
        self._prompt_logprobs.extend(logprobs)
        waiting = [choice for choice in self._choices if choice.buffer.is_waiting_for_prompt_logprobs]
        if not waiting or self.num_known_prompt_logprobs < self.num_prompt_tokens:
            return
        assert self._num_top_echoed is not None
        echoed = _with_top([None, *self._prompt_logprobs], self._num_top_echoed)
        for choice in waiting:
            choice.buffer.set_prompt_logprobs(echoed)

    def end(self, now_s: float, error: ServingError | None = None) -> None:
        """End the request, once, after all its sequences have ended."""
        require(self._ended_s is None, "request already ended")
        require(not self.live_sequences, "request ended before its last sequence")
        self._ended_s = now_s
        self._error = error


def _take_choices(request_id: RequestId, choices: abc.Sequence[Choice], client: str) -> None:
    """Make the choices of a request those of its client. Raises InvariantBroken for choices of another."""
    require(
        [choice.sequence.key for choice in choices] == [(request_id, index) for index in range(len(choices))],
        "choice keys must be (request id, 0), (request id, 1), ...",
    )
    for choice in choices:
        choice.sequence.client = client


def _with_top(logprobs: abc.Sequence[TokenLogprobs | None], num_top: int) -> tuple[TokenLogprobs | None, ...]:
    return tuple(row and replace(row, top=row.top[:num_top]) for row in logprobs)


MAX_KEPT = 1024
"""Ended requests whose output is kept; beyond it the oldest one of the client with the most is removed."""

MAX_KEPT_STATE_BYTES = 64 * 2**20
"""Bytes of `client_state` of all ended requests; beyond it the client with the most bytes makes room."""


class RequestRegistry:
    """Owns live and kept requests by id."""

    def __init__(self) -> None:
        self._live: dict[RequestId, Request] = {}
        self._kept: dict[RequestId, Request] = {}
        self._named: dict[tuple[str, RequestId], Request] = {}
        """Live and kept requests by tenant and its name for them."""
        self._shares = TenantCache[RequestId, Request](max_entries=MAX_KEPT, max_bytes=MAX_KEPT_STATE_BYTES)
        self._num_live_of: Counter[str] = Counter()

    @property
    def live(self) -> list[Request]:
        """Live requests in the order of acceptance."""
        return list(self._live.values())

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def num_live_of(self, client: str) -> int:
        """Sequences of the client's live requests, ended choices included."""
        return self._num_live_of[client]

    def check_new(self, name: RequestId, tenant: str = "") -> None:
        """Raise RequestExists if a request of the tenant has this name."""
        if (known := self._named.get((tenant, name))) is not None:
            state = "is already live" if known.is_live else "has ended and its output is kept"
            raise RequestExists(f"request {id_text(name)} {state}")

    def add(self, request: Request) -> None:
        """Add a new live request. Raises RequestExists."""
        self.check_new(request.name, request.tenant)
        require(not self.has(request.id), "a request of another tenant has this id")
        self._live[request.id] = self._named[request.tenant, request.name] = request
        self._num_live_of[request.client] += len(request.choices)

    def live_request(self, request_id: RequestId) -> Request | None:
        return self._live.get(request_id)

    def note_starts(self, starts: abc.Iterable[StartRecord], now_s: float) -> None:
        """A step that starts these sequences was sent."""
        for start in starts:
            if (request := self._live.get(start.sequence.request_id)) is not None:
                request.choices[start.sequence.choice].times.on_start(now_s)

    def has(self, request_id: RequestId) -> bool:
        """Whether the request is live or kept."""
        return request_id in self._live or request_id in self._kept

    def find(self, request_id: RequestId) -> Request:
        """Find a live or kept request. Raises RequestNotFound."""
        request = self._live.get(request_id) or self._kept.get(request_id)
        if request is None:
            raise RequestNotFound(f"request {id_text(request_id)} not found")
        return request

    def find_named(self, name: RequestId, tenant: str) -> Request:
        """Find a request of a tenant. Raises RequestNotFound, also for those of others."""
        if (request := self._named.get((tenant, name))) is None:
            raise RequestNotFound(f"request {id_text(name)} not found")
        return request

    def end(self, request: Request) -> None:
        """Remove an ended request from the live ones and keep it if requested."""
        del self._live[request.id]
        self._num_live_of[request.client] -= len(request.choices)
        if not self._num_live_of[request.client]:
            del self._num_live_of[request.client]
        if not request.is_kept:
            del self._named[request.tenant, request.name]
        else:
            self._kept[request.id] = request
            size_bytes = len(request.client_state)
            for oldest in self._shares.add(request.client, request.id, request, num_bytes=size_bytes):
                self._drop(oldest)

    def forget(self, request_id: RequestId) -> None:
        """Remove a kept request."""
        request = self._kept[request_id]
        self._drop(request)
        self._shares.remove(request.client, request_id)

    def _drop(self, request: Request) -> None:
        del self._kept[request.id], self._named[request.tenant, request.name]

    def expire(self, now_s: float) -> None:
        """Remove expired requests."""
        for request in list(self._kept.values()):
            if (expires_s := request.expires_s) is not None and expires_s <= now_s:
                self.forget(request.id)


class Abandonment:
    """Decides what is to be cancelled because nobody waits for it; changes no request.

    A live request without a reader that is not kept is an orphan, and so is a sequence without a request:
    both are defects, which are counted and logged.
    """

    def __init__(self, totals: RequestTotals) -> None:
        self._totals = totals

    def error_of(self, request: Request, now_s: float) -> RequestCancelled | None:
        """Why a live request is to be cancelled; None while a client waits for it, or may return."""
        if request.stream is not None or request.keep_s is not None:
            return None
        if (until_s := request.reattach_until_s) is not None:
            is_over = until_s <= now_s
            return RequestCancelled("the client did not reattach in time") if is_over else None
        self._count_orphan(f"request {id_text(request.id)}", request.id)
        return RequestCancelled("the request has no reader")

    def orphans(self, sequences: abc.Iterable[Sequence], registry: RequestRegistry) -> abc.Iterator[Sequence]:
        """Yield the sequences of no live request."""
        for sequence in sequences:
            if registry.live_request(sequence.key.request_id) is None:
                self._count_orphan(f"sequence {sequence.key}", sequence.key.request_id)
                yield sequence

    def _count_orphan(self, what: str, request_id: RequestId) -> None:
        log.error(
            "cancelled orphan %s: no reader, not kept (defect)",
            what,
            extra=log_context(request_id=request_id),
        )
        self._totals.orphaned += 1
