"""How many requests may wait, and how many of one client may be here at all."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from coordinator.requests.pace import Pace
from coordinator.requests.registry import Registry
from coordinator.requests.request import Request
from wire.errors import ClusterUnavailable, Overloaded


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """`queue_size` bounds the requests that wait for blocks, for a tokenizer or for a pipeline;
    `max_client_requests` those of one client, waiting or running (None: no bound); `max_unread_tokens` how
    far a reader may be behind its request.
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

    def __init__(self, limits: AdmissionLimits, registry: Registry, pace: Pace) -> None:
        self._limits = limits
        self._registry = registry
        self._pace = pace
        self._num_preparing: Counter[str] = Counter()

    @property
    def num_preparing(self) -> int:
        """Requests that are made ready, and are not live yet."""
        return self._num_preparing.total()

    @contextmanager
    def preparing(self, client: str) -> Iterator[None]:
        """A place while a request is made ready to be submitted. Raises Overloaded."""
        self._check_queue(self._num_queued + self.num_preparing)
        self._check_client(client)
        self._num_preparing[client] += 1
        try:
            yield
        finally:
            self._num_preparing[client] -= 1
            self._num_preparing += Counter()  # drops what is zero

    def check_queue(self) -> None:
        """Raises Overloaded when as many requests wait for blocks as may."""
        self._check_queue(self._num_queued)

    @property
    def _num_queued(self) -> int:
        return sum(request.is_queued for request in self._registry.live)

    def _check_queue(self, num_waiting: int) -> None:
        if num_waiting >= self._limits.queue_size:
            self._refuse(f"{self._limits.queue_size} requests are waiting, which is the limit")

    def _check_client(self, client: str) -> None:
        limit = self._limits.max_client_requests
        num_here = self._registry.num_live_of(client) + self._num_preparing[client]
        if limit is not None and num_here >= limit:
            self._refuse(f"client {client} has {num_here} requests here, and the limit is {limit}")

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
    reason = f"the cluster was planned anew and holds {max_sequence_tokens} tokens per request"
    return ClusterUnavailable(f"{reason}; this one may need {needed}")
