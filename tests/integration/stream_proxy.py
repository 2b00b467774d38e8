"""A gRPC proxy between two peers that relays their streams and breaks them on request."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import xxhash

from stageline_rpc.internal.v1 import deliver_pb2, forward_pb2, step_pb2
from tests.frame_messages import add_message
from wire.channels import new_server
from wire.frames import Frame, FrameAssembler, StepFrame
from wire.payloads import PayloadNotice
from wire.steps import Step
from wire.transport import PLAIN

FORWARD = "/stageline.internal.v1.StageService/Forward"
DELIVER = "/stageline.internal.v1.StepResultsService/Deliver"

Messages = Iterable[forward_pb2.ForwardRequest]


class StreamCut(Exception):
    """The proxy ends the stream in both directions."""


class StreamProxy(grpc.GenericRpcHandler):
    """Relays every stream-stream call to `target`; `relay_for` transforms the messages.

    `refusals` are the statuses with which the target itself ended calls.
    """

    def __init__(self) -> None:
        self.address = ""
        self.target = ""
        self.refusals: list[tuple[grpc.StatusCode, str]] = []
        self._server = new_server()

    async def start(self) -> None:
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{PLAIN.bind(self._server, '127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = str(handler_call_details.method)

        async def relay(
            requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
        ) -> AsyncIterator[bytes]:
            async for response in self._relay(method, requests, context):
                yield response

        handler: Any = relay
        return grpc.stream_stream_rpc_method_handler(handler)

    def relay_for(self, method: str) -> Callable[[bytes], Awaitable[Iterable[bytes]]]:
        """Transformation of messages, one function per stream."""

        async def unchanged(message: bytes) -> Iterable[bytes]:
            return (message,)

        return unchanged

    async def _relay(
        self, method: str, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        async with PLAIN.channel(self.target) as channel:
            call: Any = channel.stream_stream(method)(wait_for_ready=True)
            pump = asyncio.create_task(self._pump(self.relay_for(method), requests, call))
            pump.add_done_callback(lambda _: call.cancel() if _is_cut(pump) else None)
            try:
                async for response in call:
                    yield response
            except grpc.aio.AioRpcError as error:
                self.refusals.append((error.code(), error.details() or ""))
                _end(context, error.code(), error.details() or "")
            except asyncio.CancelledError:
                if not _is_cut(pump):
                    raise
                _end(context, grpc.StatusCode.UNAVAILABLE, "the stream was cut")
            finally:
                pump.cancel()
                await asyncio.gather(pump, return_exceptions=True)
                call.cancel()

    async def _pump(
        self,
        relay: Callable[[bytes], Awaitable[Iterable[bytes]]],
        requests: AsyncIterator[bytes],
        call: Any,
    ) -> None:
        try:
            async for request in requests:
                for message in await relay(request):
                    await call.write(message)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The call has ended; the reader of its responses sees that.
            return


def _end(context: grpc.aio.ServicerContext[Any, Any], code: grpc.StatusCode, details: str) -> None:
    """Unlike `abort`, raises nothing when the caller has disconnected."""
    context.set_code(code)
    context.set_details(details)


def _is_cut(pump: "asyncio.Task[None]") -> bool:
    return pump.done() and not pump.cancelled() and isinstance(pump.exception(), StreamCut)


@dataclass(eq=False)
class HopStream:
    """One stream of frames: `previous` is the last one passed, `held` are sent after the next frame.

    Into FIRST, frames have no hidden states. Elsewhere a step waits in `ahead` for its hidden states, so
    that an alteration sees the whole frame.
    """

    is_to_first: bool
    assembler: FrameAssembler = field(init=False)
    ahead: deque[forward_pb2.ForwardRequest] = field(default_factory=deque)
    chunks: list[forward_pb2.ForwardRequest] = field(default_factory=list)
    previous: Frame | None = None
    held: list[forward_pb2.ForwardRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.assembler = FrameAssembler(max_payload_bytes=1 << 30, takes_hidden=not self.is_to_first)

    def complete(
        self, message: forward_pb2.ForwardRequest
    ) -> tuple[Frame, list[forward_pb2.ForwardRequest]] | None:
        """The frame that this message completes, and all messages of it."""
        received = add_message(self.assembler, message)
        if isinstance(received, StepFrame):
            if self.is_to_first:
                return received.without_hidden, [message]
            self.ahead.append(message)
            return None
        self.chunks.append(message)
        if isinstance(received, PayloadNotice):
            received = self.assembler.add_payload(bytes(received.size_bytes))
        if received is None:
            return None
        chunks, self.chunks = self.chunks, []
        return received, [self.ahead.popleft(), *chunks]


Alteration = Callable[[Frame, HopStream], Awaitable[Messages]]
HelloAlteration = Callable[[forward_pb2.HopHello], None]


@dataclass(eq=False)
class Injection:
    """Alters every frame that matches `when`, at most `times`; `steps` are the altered ones."""

    alter: Alteration
    when: Callable[[Frame], bool]
    times: int
    happened: asyncio.Event = field(default_factory=asyncio.Event)
    at_s: float = 0.0
    steps: list[Step] = field(default_factory=list)

    def matches(self, frame: Frame) -> bool:
        return len(self.steps) < self.times and self.when(frame)

    def note(self, step: Step) -> None:
        self.at_s = asyncio.get_running_loop().time()
        self.steps.append(step)
        self.happened.set()


class HopProxy(StreamProxy):
    """Proxy for a worker's Stage service. `steps` are the received ones, by (epoch, step id)."""

    def __init__(self) -> None:
        super().__init__()
        self.injection: Injection | None = None
        self.alter_hello: HelloAlteration | None = None
        self.steps: dict[tuple[int, int], Step] = {}

    def inject(self, alter: Alteration, *, when: Callable[[Frame], bool], times: int = 1) -> Injection:
        """Replace the current injection."""
        self.injection = Injection(alter, when, times)
        return self.injection

    def relay_for(self, method: str) -> Callable[[bytes], Awaitable[Iterable[bytes]]]:
        if method != FORWARD:
            return super().relay_for(method)
        stream: HopStream | None = None

        async def relay(data: bytes) -> Iterable[bytes]:
            nonlocal stream
            message = forward_pb2.ForwardRequest.FromString(data)
            if message.HasField("hello"):
                stream = HopStream(is_to_first=message.hello.sender_stage < 0)
                return (self._hello(message).SerializeToString(),)
            assert stream is not None, "a hello comes first"
            relayed: list[bytes] = []
            for part in _parts(message):
                if (completed := stream.complete(part)) is not None:
                    frame, messages = completed
                    altered = await self._altered(frame, stream, messages)
                    relayed += [request.SerializeToString() for request in altered]
            return relayed

        return relay

    def _hello(self, message: forward_pb2.ForwardRequest) -> forward_pb2.ForwardRequest:
        if (alter := self.alter_hello) is not None:
            self.alter_hello = None
            alter(message.hello)
        return message

    async def _altered(
        self, frame: Frame, stream: HopStream, messages: list[forward_pb2.ForwardRequest]
    ) -> Messages:
        self.steps[frame.step.epoch, frame.step.step_id] = frame.step
        held, stream.held = stream.held, []
        altered: Messages = messages
        is_here = not messages[-1].hidden_states.remote_payload
        if (injection := self.injection) is not None and is_here and injection.matches(frame):
            injection.note(frame.step)
            altered = await injection.alter(frame, stream)
        stream.previous = frame
        return [*altered, *held]


def _parts(message: forward_pb2.ForwardRequest) -> Iterator[forward_pb2.ForwardRequest]:
    """A message for each step, and one for the hidden states."""
    for step in message.steps:
        yield forward_pb2.ForwardRequest(steps=[step])
    if message.HasField("hidden_states"):
        yield forward_pb2.ForwardRequest(hidden_states=message.hidden_states)


ResultAlteration = Callable[[step_pb2.StepResult], None]


class CoordinatorProxy(StreamProxy):
    """Proxy for the coordinator, for the results of the worker that runs LAST."""

    def __init__(self) -> None:
        super().__init__()
        self.alter_result: ResultAlteration | None = None
        self.num_altered = 0

    def relay_for(self, method: str) -> Callable[[bytes], Awaitable[Iterable[bytes]]]:
        if method != DELIVER:
            return super().relay_for(method)

        async def relay(data: bytes) -> Iterable[bytes]:
            message = deliver_pb2.DeliverRequest.FromString(data)
            if message.WhichOneof("message") != "frame":
                return (data,)
            result = step_pb2.StepResult.FromString(message.frame.result)
            if result.tokens and self.alter_result:
                alter, self.alter_result = self.alter_result, None
                alter(result)
                self.num_altered += 1
            message.frame.result = result.SerializeToString()
            message.frame.checksum = xxhash.xxh3_64_intdigest(message.frame.result)
            return (message.SerializeToString(),)

        return relay
