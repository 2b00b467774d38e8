"""How many calls and connections one host may have at a server, and all hosts together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc

from wire.addresses import counted_host, host_of
from wire.errors import InvalidRequest, Overloaded
from wire.message_reads import MessageReads
from wire.peer_identity import peer_identity

MAX_CONNECTIONS_PER_HOST = 1024
"""Connections with open calls; gRPC closes others after 5 minutes, and limits all connections together."""
MAX_CALLS_PER_HOST = 8192
MAX_CALLS = 32_768
MAX_USER_STREAMS_PER_CALLER = 16
"""Open calls of Serve, whose messages may each be unfinished for any time: a gateway has one.

A caller is the identity of a certificate, and without one a host.
"""
MAX_WORKER_STREAMS_PER_CALLER = 128
"""The same between workers and coordinator: a worker has one or two."""
MAX_OTHER_STREAMS_PER_CALLER = 16
"""The same of reflection, and of methods that there are not."""
MAX_STREAMS = 256
"""Of all callers together, of users and of others; workers have their own limit."""
_WORKER_METHODS = "/stageline.internal."
_USER_METHODS = "/stageline.v1.Inference/"
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
        max_user_streams_per_caller: int = MAX_USER_STREAMS_PER_CALLER,
        max_worker_streams_per_caller: int = MAX_WORKER_STREAMS_PER_CALLER,
        max_other_streams_per_caller: int = MAX_OTHER_STREAMS_PER_CALLER,
        max_streams: int = MAX_STREAMS,
        reads: MessageReads | None = None,
    ) -> None:
        self._reads = reads or MessageReads()
        self._users = _Streams("Serve streams", max_user_streams_per_caller, max_streams)
        self._workers = _Streams("streams of workers", max_worker_streams_per_caller, max_calls)
        self._others = _Streams("streams", max_other_streams_per_caller, max_streams)
        self._max_connections = max_connections_per_host
        self._max_calls_per_host, self._max_calls = max_calls_per_host, max_calls
        self._calls: dict[str, Counter[str]] = {}
        self._num_of_host = Counter[str]()
        self._num = 0

    def enter(self, context: grpc.aio.ServicerContext[Any, Any], method: str, *, is_stream: bool) -> None:
        """Count a call until it ends; `is_stream` if its client may send several messages.

        Raises Overloaded for one too many.
        """
        untyped: Any = context  # the stubs lack `peer`, and name a callback class that does not exist
        peer: str = untyped.peer()
        host = counted_host(host_of(peer))
        self._check(host, peer)
        if is_stream:
            streams, caller = self._streams_of(method), str(peer_identity(context) or f"host {host}")
            streams.enter(caller)
            untyped.add_done_callback(lambda _: streams.leave(caller))
        self._num += 1
        self._reads.begin_call()
        self._num_of_host[host] += 1
        self._calls.setdefault(host, Counter())[peer] += 1
        untyped.add_done_callback(lambda _: self._leave(host, peer))

    async def read_message(
        self, context: grpc.aio.ServicerContext[Any, Any], check: Callable[[Any], None]
    ) -> Any:
        """Return the only message of a call whose client has sent all.

        So nothing can arrive that nothing would read. Raises Overloaded if it takes too long, InvalidRequest
        for none and for several, and what `check` raises for the message.
        """
        untyped: Any = context  # the stubs of `peer` and `read` are missing and wrong

        async def receive() -> Any:
            message = await untyped.read()
            if message is grpc.aio.EOF:
                raise InvalidRequest("the call has no complete message")
            check(message)
            if await untyped.read() is not grpc.aio.EOF:
                raise InvalidRequest("the call has more than one message")
            return message

        return await self._reads.read(counted_host(host_of(untyped.peer())), receive)

    def _streams_of(self, method: str) -> _Streams:
        if method.startswith(_WORKER_METHODS):
            return self._workers
        return self._users if method.startswith(_USER_METHODS) else self._others

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
        self._reads.end_call()
        connections = self._calls[host]
        for counter, key in ((connections, peer), (self._num_of_host, host)):
            _decrement(counter, key)
        if not connections:
            del self._calls[host]


class _Streams:
    """Open streams of requests of one kind, by caller."""

    def __init__(self, kind: str, max_per_caller: int, max_streams: int) -> None:
        self._kind, self._max_per_caller, self._max_streams = kind, max_per_caller, max_streams
        self._num_of_caller = Counter[str]()

    def enter(self, caller: str) -> None:
        if (num := self._num_of_caller[caller]) >= self._max_per_caller:
            raise _too_many(f"{caller} has {num} {self._kind}", self._max_per_caller)
        if (num := self._num_of_caller.total()) >= self._max_streams:
            raise _too_many(f"the server has {num} {self._kind}", self._max_streams)
        self._num_of_caller[caller] += 1

    def leave(self, caller: str) -> None:
        _decrement(self._num_of_caller, caller)


def _decrement(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


def _too_many(what: str, limit: int) -> Overloaded:
    return Overloaded(f"{what}, the limit is {limit}", retry_after_s=_RETRY_AFTER_S)
