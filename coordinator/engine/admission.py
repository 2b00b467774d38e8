"""Admission control: limits of waiting and active sequences, with a retry-after hint."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from coordinator.engine.request import Request, RequestRegistry
from wire.errors import ClusterUnavailable, InvalidRequest, Overloaded

_SHORTEST_S = 0.1
_LONGEST_S = 30.0
_UNKNOWN_S = 1.0
_WEIGHT = 0.2


class RetryAfterEstimator:
    """A moving average of the time between two requests that end."""

    def __init__(self) -> None:
        self._interval_s: float | None = None
        self._last_s: float | None = None

    def note_end(self, now_s: float) -> None:
        """A request has ended."""
        if self._last_s is not None:
            interval_s = now_s - self._last_s
            average_s = interval_s if self._interval_s is None else self._interval_s
            self._interval_s = average_s + _WEIGHT * (interval_s - average_s)
        self._last_s = now_s

    @property
    def retry_after_s(self) -> float:
        """When there is a place again, as far as the past can tell: between 0.1 and 30 seconds from now."""
        interval_s = _UNKNOWN_S if self._interval_s is None else self._interval_s
        return min(max(interval_s, _SHORTEST_S), _LONGEST_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """`queue_size` bounds the sequences that wait for blocks, for a tokenizer or for a pipeline;
    `max_client_requests` those of one client, waiting or running (None: no bound); `max_unread_tokens` how
    far a reader may be behind its request. A request with n choices counts as n.
    """

    queue_size: int
    max_client_requests: int | None = None
    max_unread_tokens: int = 4096

    def __post_init__(self) -> None:
        for name in ("queue_size", "max_client_requests", "max_unread_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


class Admission:
    """Says no, and when to come again."""

    def __init__(self, limits: AdmissionLimits, registry: RequestRegistry, pace: RetryAfterEstimator) -> None:
        self._limits = limits
        self._registry = registry
        self._pace = pace
        self._num_preparing: Counter[str] = Counter()

    @property
    def num_preparing(self) -> int:
        """Sequences of requests that are prepared and not live yet."""
        return self._num_preparing.total()

    @contextmanager
    def preparing(self, client: str, num_sequences: int = 1) -> Iterator[None]:
        """Room for the sequences of a request while it is prepared. Raises Overloaded, and InvalidRequest for
        more sequences than the limits ever let in.
        """
        self._check_possible(num_sequences)
        self._check_queue(self._num_queued + self.num_preparing, num_sequences)
        self._check_client(client, num_sequences)
        self._num_preparing[client] += num_sequences
        try:
            yield
        finally:
            self._num_preparing[client] -= num_sequences
            self._num_preparing += Counter()  # drops what is zero

    def check_queue(self, num_sequences: int = 1) -> None:
        """Raises Overloaded when there is no room for more sequences to wait for blocks."""
        self._check_queue(self._num_queued, num_sequences)

    @property
    def _num_queued(self) -> int:
        return sum(request.num_queued for request in self._registry.live)

    def _check_possible(self, num_sequences: int) -> None:
        for name in ("queue_size", "max_client_requests"):
            limit: int | None = getattr(self._limits, name)
            if limit is not None and num_sequences > limit:
                raise InvalidRequest(f"n is {num_sequences}, the limit is {limit} ({name})")

    def _check_queue(self, num_waiting: int, num_sequences: int) -> None:
        limit = self._limits.queue_size
        if num_waiting + num_sequences > limit:
            self._refuse(f"{num_waiting} sequences are waiting, and the limit is {limit} (queue_size)")

    def _check_client(self, client: str, num_sequences: int) -> None:
        limit = self._limits.max_client_requests
        num_here = self._registry.num_live_of(client) + self._num_preparing[client]
        if limit is not None and num_here + num_sequences > limit:
            self._refuse(f"client {client} has {num_here} sequences here, and the limit is {limit}")

    def _refuse(self, reason: str) -> None:
        retry_after_s = self._pace.retry_after_s
        raise Overloaded(f"{reason}; try again in {retry_after_s:.1f} s", retry_after_s=retry_after_s)


def misfit(request: Request, max_sequence_tokens: int | None) -> ClusterUnavailable | None:
    """Why the present plan, of so many tokens per request (None: there is none), can never hold a request
    that was accepted under another one.
    """
    needed = request.max_sequence_tokens
    if max_sequence_tokens is None or needed <= max_sequence_tokens:
        return None
    reason = f"the current plan holds {max_sequence_tokens} tokens per request"
    return ClusterUnavailable(f"{reason}; this one may need {needed}")
