"""Admission control: limits of waiting and active sequences, with a retry-after hint."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from coordinator.engine.request import Request, RequestRegistry
from wire.errors import ClusterUnavailable, InvalidRequest, Overloaded
from wire.tenant_shares import has_room

_SHORTEST_S = 0.1
_LONGEST_S = 30.0
_UNKNOWN_S = 1.0
_WEIGHT = 0.2


class RetryAfterEstimator:
    """Estimates the retry-after hint: a moving average of the time between two request ends."""

    def __init__(self) -> None:
        self._interval_s: float | None = None
        self._last_s: float | None = None

    def record_end(self, now_s: float) -> None:
        if self._last_s is not None:
            interval_s = now_s - self._last_s
            average_s = interval_s if self._interval_s is None else self._interval_s
            self._interval_s = average_s + _WEIGHT * (interval_s - average_s)
        self._last_s = now_s

    @property
    def retry_after_s(self) -> float:
        """Expected time until the next request ends, between 0.1 and 30 seconds."""
        interval_s = _UNKNOWN_S if self._interval_s is None else self._interval_s
        return min(max(interval_s, _SHORTEST_S), _LONGEST_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """Limits of waiting and active sequences. A request with n choices counts as n.

    Attributes:
        queue_size: sequences that wait for preparation, blocks or a pipeline. A client has its equal part of
            them although others have filled them.
        max_client_requests: waiting and running sequences of one client; None means no limit.
        max_unread_tokens: generated tokens that a reader may lag behind its request.

    Raises:
        ValueError: a limit is below 1.
    """

    queue_size: int
    max_client_requests: int | None = None
    max_unread_tokens: int = 4096

    def __post_init__(self) -> None:
        for name in ("queue_size", "max_client_requests", "max_unread_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}, must be in [1, inf)")


class Admission:
    """Admission control; rejects with a retry-after hint."""

    def __init__(
        self, limits: AdmissionLimits, registry: RequestRegistry, retry_after: RetryAfterEstimator
    ) -> None:
        self._limits = limits
        self._registry = registry
        self._retry_after = retry_after
        self._num_preparing: Counter[str] = Counter()

    @property
    def num_preparing(self) -> int:
        """Sequences of requests in preparation, which are not active yet."""
        return self._num_preparing.total()

    @contextmanager
    def preparing(
        self, client: str, num_sequences: int = 1, *, client_limit: int | None = None
    ) -> Iterator[None]:
        """Reserve room for the sequences of a request while it is prepared.

        `client_limit` holds for this client beside `max_client_requests`.

        Raises:
            Overloaded: the queue is full or the client has too many sequences.
            InvalidRequest: the request has more sequences than a limit allows at any time.
        """
        self._check_possible(num_sequences, client_limit)
        self._check_queue(self._num_queued + self._num_preparing, client, num_sequences)
        self._check_client(client, num_sequences, client_limit)
        self._num_preparing[client] += num_sequences
        try:
            yield
        finally:
            self._num_preparing[client] -= num_sequences
            self._num_preparing += Counter()  # drops zero counts

    def check_queue(self, client: str, num_sequences: int = 1) -> None:
        """Raise Overloaded if the queue has no room for `num_sequences` more of a client."""
        self._check_queue(self._num_queued, client, num_sequences)

    @property
    def _num_queued(self) -> Counter[str]:
        queued = Counter[str]()
        for request in self._registry.live:
            if number := request.num_queued:
                queued[request.client] += number
        return queued

    def _check_possible(self, num_sequences: int, client_limit: int | None) -> None:
        limits = self._limits
        for name, limit in (
            ("queue_size", limits.queue_size),
            ("max_client_requests", limits.max_client_requests),
            ("max_concurrent of the tenant", client_limit),
        ):
            if limit is not None and num_sequences > limit:
                raise InvalidRequest(f"n is {num_sequences}, the limit is {limit} ({name})")

    def _check_queue(self, num_waiting: Counter[str], client: str, num_sequences: int) -> None:
        limit = self._limits.queue_size
        if not has_room(num_waiting, client, num_sequences, limit=limit):
            self._refuse(f"{num_waiting.total()} sequences are waiting, the limit is {limit} (queue_size)")

    def _check_client(self, client: str, num_sequences: int, own_limit: int | None) -> None:
        limits = (self._limits.max_client_requests, own_limit)
        limit = min((limit for limit in limits if limit is not None), default=None)
        num_active = self._registry.num_live_of(client) + self._num_preparing[client]
        if limit is not None and num_active + num_sequences > limit:
            text = f"client {client} has {num_active} active sequences, the limit is {limit}"
            self._refuse(f"{text} (max_client_requests)")

    def _refuse(self, reason: str) -> None:
        retry_after_s = self._retry_after.retry_after_s
        raise Overloaded(f"{reason}; retry in {retry_after_s:.1f} s", retry_after_s=retry_after_s)


def plan_limit_error(request: Request, max_sequence_tokens: int | None) -> ClusterUnavailable | None:
    """The error of a request that is too long for the current plan, or None.

    A smaller plan may follow the one under which the request was accepted. `max_sequence_tokens` is the
    plan's limit, None without a plan.
    """
    needed = request.max_sequence_tokens
    if max_sequence_tokens is None or needed <= max_sequence_tokens:
        return None
    return ClusterUnavailable(
        f"request may need {needed} tokens, the limit of the current plan is {max_sequence_tokens}"
    )
