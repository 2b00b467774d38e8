"""Calls as gRPC makes them, without gRPC: two directions, each in order, over a network that may break them.
Statuses are as grpc.aio has them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from typing import TYPE_CHECKING, Any

import grpc

from tests.simulation.virtual_loop import Process
from wire.channels import ATTACH_SECRET_KEY

if TYPE_CHECKING:
    from tests.simulation.network import Direction

Status = tuple[grpc.StatusCode, str]
UNAVAILABLE, CANCELLED, DEADLINE_EXCEEDED, OK = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.OK,
)
_NO_METADATA = grpc.aio.Metadata()
_WITH_METADATA = "/Serve"
_SECRET = "the-attach-secret-of-every-client"


class Inbox:
    """Messages that have arrived, and their waiting readers."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.messages: deque[Any] = deque()
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter


class ClientCall:
    """The caller's end. `up` and `down` are set by the network."""

    up: Direction
    down: Direction

    def __init__(
        self,
        process: Process,
        method: str,
        serialize: Callable[[Any], bytes] | None,
        deserialize: Callable[[bytes], Any] | None,
        *,
        timeout_s: float | None,
        wait_for_ready: bool,
    ) -> None:
        self.process = process
        self.method = method
        self.server: ServerCall | None = None
        self.wait_for_ready = wait_for_ready
        self.deadline_s = None if timeout_s is None else process.loop.time() + timeout_s
        self.status: Status | None = None
        self._serialize = serialize or bytes
        self._deserialize = deserialize or bytes
        self._inbox = Inbox(process.loop)
        self._requests: asyncio.Task[None] | None = None
        self._metadata: grpc.aio.Metadata | None = None

    def feed(self, requests: AsyncIterator[Any]) -> None:
        """Writes what an iterator has, as it comes."""
        self._requests = self.process.spawn(self._feed(requests))

    async def write(self, message: Any) -> None:
        if self.status is not None:
            raise asyncio.InvalidStateError("RPC already finished")
        self.up.send(self._serialize(message))

    def write_last(self, message: Any) -> None:
        self.up.send(self._serialize(message))
        self.up.send(None)

    async def read(self) -> Any:
        inbox = self._inbox
        while True:
            if inbox.messages:
                return self._deserialize(inbox.messages.popleft())
            if self.status is not None:
                if self.status[0] is OK:
                    return grpc.aio.EOF
                raise self._error()
            await inbox.wait()

    def cancel(self) -> None:
        self.finish((CANCELLED, "Locally cancelled by application!"))

    def finish(self, status: Status, *, from_server: bool = False) -> None:
        """The call is over at this end; the first status counts."""
        if self.status is not None:
            return
        self.status = status
        if self._requests is not None:
            self._requests.cancel()
        self._inbox.wake()
        if not from_server:
            self.up.send(CANCELLED)

    async def code(self) -> grpc.StatusCode:
        return (await self._final())[0]

    async def details(self) -> str:
        return (await self._final())[1]

    def done(self) -> bool:
        return self.status is not None

    async def initial_metadata(self) -> grpc.aio.Metadata:
        """Waits for the server only where that sends some."""
        while self.method.endswith(_WITH_METADATA) and self._metadata is None and self.status is None:
            await self._inbox.wait()
        return self._metadata or _NO_METADATA

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return _NO_METADATA

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def __await__(self) -> Generator[Any, None, Any]:
        """The response of a call that has one."""
        return self.read().__await__()

    def arrive(self, item: Any) -> None:
        """From the network: metadata, bytes, or the status."""
        if self.status is not None:
            return
        if isinstance(item, grpc.aio.Metadata):
            self._metadata = item
            self._inbox.wake()
        elif isinstance(item, tuple):
            self.finish(item, from_server=True)
        else:
            self._inbox.messages.append(item)
            self._inbox.wake()

    async def _final(self) -> Status:
        while self.status is None:
            await self._inbox.wait()
        return self.status

    async def _feed(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            self.up.send(self._serialize(request))
        self.up.send(None)

    def _error(self) -> grpc.aio.AioRpcError:
        assert self.status is not None
        return grpc.aio.AioRpcError(self.status[0], _NO_METADATA, _NO_METADATA, details=self.status[1])


class ServerCall:
    """The callee's end, and the context that the servicer sees."""

    def __init__(self, client: ClientCall, process: Process, handler: Any) -> None:
        self.client = client
        self.process = process
        self._handler = handler
        self._inbox = Inbox(process.loop)
        self._is_half_closed = False
        self._on_done: list[Callable[[Any], None]] = []
        self._task: asyncio.Task[None] | None = None
        self._status: Status | None = None

    def start(self) -> None:
        self._task = self.process.spawn(self._serve())

    def arrive(self, item: Any) -> None:
        """From the network: bytes, None for the last one, or CANCELLED."""
        if item is CANCELLED:
            self.break_off()
        elif item is None:
            self._is_half_closed = True
            self._inbox.wake()
        else:
            self._inbox.messages.append(item)
            self._inbox.wake()

    def break_off(self) -> None:
        """The caller is gone."""
        if self._task is not None:
            self._task.cancel()

    # What servicers ask of their context.

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._on_done.append(callback)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self._status = (code, details)
        raise grpc.aio.AbortError

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Clients of Generate neither attach nor cancel by it."""
        if self.client.method.endswith(_WITH_METADATA):
            self.client.down.send(grpc.aio.Metadata(*metadata))

    def set_trailing_metadata(self, metadata: Any) -> None:
        """Not carried: health checks describe the coordinator in it, and no gateway decides by it."""

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def peer(self) -> str:
        return f"ipv4:{self.client.process.name}:1"

    def time_remaining(self) -> float | None:
        deadline_s = self.client.deadline_s
        return None if deadline_s is None else deadline_s - self.process.loop.time()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """All clients have the same secret: permission to attach is not simulated."""
        return ((ATTACH_SECRET_KEY, _SECRET),)

    async def _serve(self) -> None:
        try:
            await self._run_handler()
            self._status = (OK, "")
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            self._status = (CANCELLED, "cancelled")
        finally:
            self.client.down.send(self._status)
            for callback in self._on_done:
                self.process.loop.call_soon(callback, self)

    async def _run_handler(self) -> None:
        """Every method of a product's server takes a stream of requests, see `ErrorInterceptor`."""
        handler, respond = self._handler, self._handler.response_serializer
        if handler.stream_unary is not None:
            self.client.down.send(respond(await handler.stream_unary(self._requests(), self)))
            return
        async for response in handler.stream_stream(self._requests(), self):
            self.client.down.send(respond(response))

    async def read(self) -> Any:
        """The next request, or EOF."""
        return await anext(self._requests(), grpc.aio.EOF)

    async def _requests(self) -> AsyncIterator[Any]:
        inbox, parse = self._inbox, self._handler.request_deserializer or bytes
        while True:
            if inbox.messages:
                yield parse(inbox.messages.popleft())
            elif self._is_half_closed:
                return
            else:
                await inbox.wait()
