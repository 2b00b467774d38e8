"""Addresses, connections, and what happens to messages on their way; single frames can be tampered with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc

from tests.simulation.calls import DEADLINE_EXCEEDED, UNAVAILABLE, ClientCall, ServerCall
from tests.simulation.virtual_loop import Process, VirtualLoop
from wire.addresses import Address
from wire.channels import STREAM_WINDOW_BYTES
from wire.interceptors import ErrorInterceptor, OnRefusal
from wire.payloads import TICKET_BYTES
from wire.peer_limits import PeerLimits
from wire.transport import Transport

if TYPE_CHECKING:
    from tests.simulation.payloads import SimListener, SimSender

KEEPALIVE_S = 20.0
"""A connection that nothing passes for so long is broken: `grpc.keepalive_time_ms` and its timeout."""
RECONNECT_S = 0.25

Tampering = Callable[["Direction", bytes], list[bytes]]
"""What arrives in the place of one message."""


class Direction:
    """One direction of one call: by default everything arrives in order after some time."""

    def __init__(
        self, network: Network, sender: Process, receiver: Callable[[Any], None], to: Process | None
    ) -> None:
        self.network = network
        self.sender = sender
        self.receiver = receiver
        self.to = to
        self.num_sent = 0
        self.tampering: list[Tampering] = []
        self.history: list[bytes] | None = None
        self.is_held = False
        self._last_s = 0.0
        self._held: list[Any] = []

    def send(self, item: Any) -> None:
        """A message, or how the call ends."""
        if self.sender.is_dead:
            return
        self.num_sent += 1
        if self.history is not None and isinstance(item, bytes):
            self.history.append(item)
        if self.tampering and self.num_sent > 1 and isinstance(item, bytes):
            self.network.num_tampered += 1
            for altered in self.tampering.pop(0)(self, item):
                self.pass_on(altered)
        else:
            self.pass_on(item)

    def pass_on(self, item: Any) -> None:
        """Without further alteration."""
        network = self.network
        if self.to is None or self.is_held or network.is_cut(self.sender, self.to):
            self._held.append(item)
            return
        loop = network.loop
        self._last_s = max(self._last_s, loop.time() + network.latency_s())
        loop.call_at(self._last_s, self._arrive, item, context=self.to.context)

    def flush(self) -> None:
        """What was held back goes on its way."""
        held, self._held = self._held, []
        for item in held:
            self.pass_on(item)

    def _arrive(self, item: Any) -> None:
        if self.to is None or self.to.is_dead:
            return
        self.network.num_messages += 1
        self.receiver(item)


class Server:
    """What `wire.channels.new_server` makes."""

    def __init__(
        self,
        *,
        authorization: Sequence[grpc.aio.ServerInterceptor] = (),
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        limits: PeerLimits | None = None,
        stream_window_bytes: int = STREAM_WINDOW_BYTES,
        on_refusal: OnRefusal | None = None,
    ) -> None:
        """A window is not simulated."""
        self.handlers: list[Callable[[str], Any]] = []
        self._interceptors = (*authorization, ErrorInterceptor(limits, on_refusal), *interceptors)

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
        for handler in handlers:
            self.handlers.append(
                lambda method, handler=handler: handler.service(SimpleNamespace(method=method))
            )

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        named = {f"/{service}/{name}": handler for name, handler in handlers.items()}
        self.handlers.append(named.get)

    async def start(self) -> None:
        pass

    async def stop(self, grace: float | None) -> None:
        pass

    def handler(self, method: str) -> Any:
        """With errors mapped and messages limited as in the product."""
        found = next(found for lookup in self.handlers if (found := lookup(method)) is not None)
        details: Any = SimpleNamespace(method=method)
        for interceptor in reversed(self._interceptors):

            async def continuation(details: Any, inner: Any = found) -> Any:
                return inner

            found = _result_of(interceptor.intercept_service(continuation, details))
        return found


class Channel:
    """What `Transport.channel` makes."""

    def __init__(self, network: Network, address: str) -> None:
        self._network = network
        self._address = address
        self._calls: list[ClientCall] = []

    def stream_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Callable[..., ClientCall]:
        def call(
            requests: AsyncIterator[Any] | None = None,
            *,
            timeout: float | None = None,
            wait_for_ready: bool = False,
        ) -> ClientCall:
            opened = self._open(method, request_serializer, response_deserializer, timeout, wait_for_ready)
            if requests is not None:
                opened.feed(requests)
            return opened

        return call

    def unary_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Callable[..., ClientCall]:
        def call(request: Any, *, timeout: float | None = None, wait_for_ready: bool = True) -> ClientCall:
            opened = self._open(method, request_serializer, response_deserializer, timeout, wait_for_ready)
            opened.write_last(request)
            return opened

        return call

    unary_unary = unary_stream
    stream_unary = stream_stream

    def _open(self, method: str, serialize: Any, parse: Any, timeout: float | None, wait: bool) -> ClientCall:
        call = ClientCall(Process.current(), method, serialize, parse, timeout_s=timeout, wait_for_ready=wait)
        self._calls.append(call)
        self._network.connect(call, self._address)
        return call

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Network:
    """Listening addresses, open calls and partitions."""

    def __init__(self, loop: VirtualLoop, random: Random) -> None:
        self.loop = loop
        self.calls: list[ClientCall] = []
        self.on_call: Callable[[ClientCall], None] = lambda call: None
        """Called with each call that has reached its server."""
        self.num_messages = 0
        self.history: dict[str, list[bytes]] = {}
        """Messages of each worker to the coordinator, on all its streams."""
        self.num_tampered = 0
        self.num_stalls = 0
        self.slowest_s = 0.002
        self._random = random
        self._servers: dict[str, tuple[Process, Server]] = {}
        self.payload_listeners: dict[Address, SimListener] = {}
        self.payload_links: list[SimSender] = []
        self._cuts: set[frozenset[str]] = set()
        self._unseen: list[tuple[Direction, Callable[..., None], tuple[Any, ...]]] = []

    def latency_s(self) -> float:
        return 0.0002 + self.slowest_s * self._random.random() ** 3

    def bind(self, server: Server, address: str) -> int:
        """As `Transport.bind`."""
        self._servers[address] = (Process.current(), server)
        return int(address.rpartition(":")[2])

    def connect(self, call: ClientCall, address: str) -> None:
        call.up = Direction(self, call.process, lambda item: None, None)
        call.down = Direction(self, call.process, call.arrive, call.process)
        if call.deadline_s is not None:
            late = (DEADLINE_EXCEEDED, "Deadline Exceeded")
            self.loop.call_at(call.deadline_s, call.finish, late, context=call.process.context)
        self.loop.call_later(self.latency_s(), self._dial, call, address)

    def ticket(self) -> bytes:
        """Of a payload connection."""
        return self._random.randbytes(TICKET_BYTES)

    def is_cut(self, one: Process, other: Process) -> bool:
        return bool(self._cuts) and frozenset((one.name, other.name)) in self._cuts

    def cut(self, one: str, other: str) -> None:
        """Drop all messages between the two, without an error."""
        pair = frozenset((one, other))
        self._cuts.add(pair)
        self.num_stalls += 1
        self.loop.call_later(KEEPALIVE_S, self._expire, pair)

    def heal(self, one: str, other: str) -> None:
        self._cuts.discard(frozenset((one, other)))
        for call in self.calls:
            call.up.flush()
            call.down.flush()
        for link in self.payload_links:
            link.up.flush()
        unseen, self._unseen = self._unseen, []
        for way, action, args in unseen:
            self._later(way, action, *args)

    def heal_all(self) -> None:
        for pair in tuple(self._cuts):
            one, other = pair
            self.heal(one, other)

    def forget(self, process: Process) -> None:
        """The process has died, and its kernel closes its connections."""
        self._servers = {at: server for at, server in self._servers.items() if server[0] is not process}
        for link in tuple(self.payload_links):
            if process in (link.process, link.up.to):
                link.break_off()
        for call in self.calls:
            server = call.server
            assert server is not None
            if call.process is process and call.status is None:
                self._later(call.up, server.break_off)
            elif server.process is process:
                self._later(call.down, call.arrive, (UNAVAILABLE, "Connection reset by peer"))
        self.calls = [call for call in self.calls if call.status is None]

    def forwards(self) -> list[ClientCall]:
        """The open hops of the pipeline, from the coordinator's on; results come last."""
        kinds = ("/Forward", "/Deliver")
        return [call for call in self.calls if call.status is None and call.method.endswith(kinds)]

    def break_call(self, call: ClientCall) -> None:
        """The connection of one call is reset at both ends."""
        assert call.server is not None
        self._later(call.up, call.server.break_off)
        self._later(call.down, call.arrive, (UNAVAILABLE, "Connection reset by peer"))

    def _dial(self, call: ClientCall, address: str) -> None:
        if call.status is not None or call.process.is_dead:
            return
        found = self._servers.get(address)
        if found is None or self.is_cut(call.process, found[0]):
            if not call.wait_for_ready and found is None:
                refused = (UNAVAILABLE, "failed to connect to all addresses")
                self.loop.call_soon(call.arrive, refused, context=call.process.context)
            else:
                self.loop.call_later(RECONNECT_S, self._dial, call, address)
            return
        process, server = found
        call.server = ServerCall(call, process, server.handler(call.method))
        call.up.to, call.up.receiver = process, call.server.arrive
        if call.method.endswith("/Join"):
            call.up.history = self.history.setdefault(call.process.name, [])
        call.down.sender = process
        self.calls = [rpc for rpc in self.calls if rpc.status is None]
        self.calls.append(call)
        self.on_call(call)
        self.loop.call_soon(call.server.start, context=process.context)
        call.up.flush()

    def _later(self, way: Direction, action: Callable[..., None], *args: Any) -> None:
        """Seen at the far end of a direction, and where that is cut off, when it is no more."""
        if way.to is None:
            return
        if self.is_cut(way.sender, way.to):
            self._unseen.append((way, action, args))
        else:
            self.loop.call_later(self.latency_s(), action, *args, context=way.to.context)

    def _expire(self, pair: frozenset[str]) -> None:
        if pair not in self._cuts:
            return
        for call in self.calls:
            assert call.server is not None
            if {call.process.name, call.server.process.name} == pair:
                self.loop.call_soon(call.server.break_off, context=call.server.process.context)
                status = (UNAVAILABLE, "keepalive watchdog timeout")
                self.loop.call_soon(call.arrive, status, context=call.process.context)


def _result_of(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


class SimTransport(Transport):
    """Makes channels and ports in the network of the running process."""

    def channel(self, address: str) -> Any:
        return Channel(Process.current().network, address)

    def bind(self, server: Any, address: str) -> int:
        return Process.current().network.bind(server, address)
