"""Which requests there are: the live ones, and those that have ended and whose output is kept. Pure."""

from collections import Counter

from coordinator.requests.request import Request
from wire.errors import RequestExists, RequestNotFound
from wire.ids import RequestId, id_text

MAX_KEPT = 1024
"""Ended requests whose output is kept at once; one more, and the one that ended first is forgotten."""


class Registry:
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
