"""How many calls and connections one host may have at a server, and all hosts together."""

from __future__ import annotations

from collections import Counter
from typing import Any

import grpc

from wire.addresses import host_of
from wire.errors import Overloaded

MAX_CONNECTIONS_PER_HOST = 1024
"""Connections with open calls; gRPC closes others after 5 minutes, and limits all connections together."""
MAX_CALLS_PER_HOST = 8192
MAX_CALLS = 32_768
_RETRY_AFTER_S = 1.0


class PeerLimits:
    """Counts the open calls of each host and connection.

    A call costs some 30 KB of a server's memory, whatever the servicer does.
    """

    def __init__(
        self,
        *,
        max_connections_per_host: int = MAX_CONNECTIONS_PER_HOST,
        max_calls_per_host: int = MAX_CALLS_PER_HOST,
        max_calls: int = MAX_CALLS,
    ) -> None:
        self._max_connections = max_connections_per_host
        self._max_calls_per_host, self._max_calls = max_calls_per_host, max_calls
        self._calls: dict[str, Counter[str]] = {}
        self._num_of_host = Counter[str]()
        self._num = 0

    def enter(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Count a call until it ends. Raises Overloaded for one too many."""
        untyped: Any = context  # the stubs lack `peer`, and name a callback class that does not exist
        peer: str = untyped.peer()
        host = host_of(peer)
        self._check(host, peer)
        self._num += 1
        self._num_of_host[host] += 1
        self._calls.setdefault(host, Counter())[peer] += 1
        untyped.add_done_callback(lambda _: self._leave(host, peer))

    def _check(self, host: str, peer: str) -> None:
        connections = self._calls.get(host, Counter[str]())
        if peer not in connections and len(connections) >= self._max_connections:
            raise _too_many(
                f"host {host} has {len(connections)} connections with calls", self._max_connections
            )
        if (num := self._num_of_host[host]) >= self._max_calls_per_host:
            raise _too_many(f"host {host} has {num} calls", self._max_calls_per_host)
        if self._num >= self._max_calls:
            raise _too_many(f"the server has {self._num} calls", self._max_calls)

    def _leave(self, host: str, peer: str) -> None:
        self._num -= 1
        connections = self._calls[host]
        for counter, key in ((connections, peer), (self._num_of_host, host)):
            counter[key] -= 1
            if not counter[key]:
                del counter[key]
        if not connections:
            del self._calls[host]


def _too_many(what: str, limit: int) -> Overloaded:
    return Overloaded(f"{what}, the limit is {limit}", retry_after_s=_RETRY_AFTER_S)
