"""Peers of a stage worker, played by the test over real gRPC on port 0.

`CoordinatorDouble` serves MembershipService.Join and StepResultsService.Deliver, `NextStageDouble` serves
StageService.Forward, and `PredecessorDouble` dials a worker's. Every wait has a deadline.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Any

import grpc

from stageline_rpc.internal.v1 import (
    deliver_pb2,
    deliver_pb2_grpc,
    forward_pb2,
    forward_pb2_grpc,
    join_pb2,
    join_pb2_grpc,
)
from wire.channels import new_server
from wire.frames import Frame, FrameAssembler, StepFrame, decode_result_frame
from wire.ids import Incarnation, new_incarnation
from wire.step_codec import decode_fault
from wire.steps import FaultReport, StepResult
from wire.transport import PLAIN

DEADLINE_S = 20.0
HEARTBEAT_MS = 20


class WorkerLink:
    """The coordinator's end of one worker's Join stream."""

    def __init__(self, hello: join_pb2.WorkerHello) -> None:
        self.hello = hello
        self.orders: asyncio.Queue[join_pb2.JoinResponse | None] = asyncio.Queue()
        self.answers: asyncio.Queue[join_pb2.JoinRequest] = asyncio.Queue()
        self.heartbeats: list[join_pb2.Heartbeat] = []
        self.last_message_s: list[float] = []
        self.heartbeat_came = asyncio.Event()
        self.has_ended = asyncio.Event()

    def send(self, **message: Any) -> None:
        self.orders.put_nowait(join_pb2.JoinResponse(**message))

    def hang_up(self) -> None:
        """End the stream as a crashed coordinator would."""
        self.orders.put_nowait(None)

    async def answer(self, kind: str) -> Any:
        """Return the next message other than a heartbeat; it must be of this kind."""
        async with asyncio.timeout(DEADLINE_S):
            message = await self.answers.get()
        assert message.WhichOneof("message") == kind, message
        return getattr(message, kind)

    async def fault(self) -> FaultReport:
        return decode_fault(await self.answer("fault"))

    async def next_heartbeat(self) -> join_pb2.Heartbeat:
        """Return a heartbeat that was sent after this call."""
        self.heartbeat_came.clear()
        async with asyncio.timeout(DEADLINE_S):
            # The first one after the call may have been on its way before it.
            await self.heartbeat_came.wait()
            self.heartbeat_came.clear()
            await self.heartbeat_came.wait()
        return self.heartbeats[-1]


class CoordinatorDouble(join_pb2_grpc.MembershipServiceServicer, deliver_pb2_grpc.StepResultsServiceServicer):
    """Accepts every worker unless `refusal` is set; keeps the results of LAST."""

    def __init__(self) -> None:
        self.incarnation: Incarnation = new_incarnation()
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.links: asyncio.Queue[WorkerLink] = asyncio.Queue()
        self.hop_hellos: asyncio.Queue[forward_pb2.HopHello] = asyncio.Queue()
        self.results: asyncio.Queue[StepResult] = asyncio.Queue()
        self.num_ignored = 0
        self.lease_ms = self.drain_timeout_ms = 0
        self._server = new_server()
        self.address = ""

    async def start(self, address: str = "127.0.0.1:0") -> None:
        join_pb2_grpc.add_MembershipServiceServicer_to_server(self, self._server)
        deliver_pb2_grpc.add_StepResultsServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{PLAIN.bind(self._server, address)}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def link(self) -> WorkerLink:
        """The next worker that joins."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.links.get()

    async def result(self) -> StepResult:
        async with asyncio.timeout(DEADLINE_S):
            return await self.results.get()

    async def _ignore(self) -> None:
        """The next `num_ignored` streams are neither accepted nor refused."""
        if self.num_ignored:
            self.num_ignored -= 1
            await asyncio.Event().wait()

    async def Join(  # noqa: N802
        self, request_iterator: AsyncIterator[join_pb2.JoinRequest], context: Any
    ) -> AsyncIterator[join_pb2.JoinResponse]:
        if self.refusal is not None:
            await context.abort(*self.refusal)
        link = WorkerLink((await anext(request_iterator)).hello)
        self.links.put_nowait(link)
        welcome = join_pb2.Welcome(
            coordinator_incarnation=self.incarnation,
            heartbeat_interval_ms=HEARTBEAT_MS,
            lease_ms=self.lease_ms,
            drain_timeout_ms=self.drain_timeout_ms,
        )
        yield join_pb2.JoinResponse(welcome=welcome)
        reader = asyncio.create_task(_collect_answers(request_iterator, link))
        try:
            while (order := await link.orders.get()) is not None:
                yield order
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            link.has_ended.set()

    async def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def Deliver(  # noqa: N802
        self, request_iterator: AsyncIterator[deliver_pb2.DeliverRequest], context: Any
    ) -> AsyncIterator[deliver_pb2.DeliverResponse]:
        self.hop_hellos.put_nowait((await anext(request_iterator)).hello)
        await self._ignore()
        yield deliver_pb2.DeliverResponse(accepted=forward_pb2.HopAccepted())
        async for request in request_iterator:
            self.results.put_nowait(decode_result_frame(request))


async def _collect_answers(requests: AsyncIterator[join_pb2.JoinRequest], link: WorkerLink) -> None:
    async for message in requests:
        if message.WhichOneof("message") == "heartbeat":
            link.heartbeats.append(message.heartbeat)
            link.last_message_s.append(time.monotonic())
            link.heartbeat_came.set()
        else:
            link.answers.put_nowait(message)


class NextStageDouble(forward_pb2_grpc.StageServiceServicer):
    """Accepts every stream, unless `refusal` is set, and keeps its frames. Reads none while `may_read` is not
    set.
    """

    def __init__(self, *, max_payload_bytes: int = 1 << 24) -> None:
        self.incarnation: Incarnation = new_incarnation()
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.hellos: asyncio.Queue[forward_pb2.HopHello] = asyncio.Queue()
        self.steps: asyncio.Queue[StepFrame] = asyncio.Queue()
        """Steps as they arrive, ahead of their frames."""
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()
        self.stream_ended = asyncio.Event()
        self.num_ignored = 0
        self.num_messages = 0
        self.breaks_with: grpc.StatusCode | None = None
        self.may_read = asyncio.Event()
        self.may_read.set()
        self._max_payload_bytes = max_payload_bytes
        self._server = new_server()
        self.address = ""

    async def start(self) -> None:
        forward_pb2_grpc.add_StageServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{PLAIN.bind(self._server, '127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def step(self) -> StepFrame:
        async with asyncio.timeout(DEADLINE_S):
            return await self.steps.get()

    async def frame(self) -> Frame:
        async with asyncio.timeout(DEADLINE_S):
            return await self.frames.get()

    async def _ignore(self) -> None:
        """The next `num_ignored` streams are neither accepted nor refused."""
        if self.num_ignored:
            self.num_ignored -= 1
            await asyncio.Event().wait()

    async def Forward(  # noqa: N802
        self, request_iterator: AsyncIterator[forward_pb2.ForwardRequest], context: Any
    ) -> AsyncIterator[forward_pb2.ForwardResponse]:
        self.hellos.put_nowait((await anext(request_iterator)).hello)
        if self.refusal is not None:
            await context.abort(*self.refusal)
        await self._ignore()
        yield forward_pb2.ForwardResponse(accepted=forward_pb2.HopAccepted())
        await self.may_read.wait()
        assembler = FrameAssembler(max_payload_bytes=self._max_payload_bytes)
        try:
            async for request in request_iterator:
                self.num_messages += 1
                for received in assembler.add(request.SerializeToString()):
                    if isinstance(received, StepFrame):
                        self.steps.put_nowait(received)
                        continue
                    self.frames.put_nowait(received)
                    if self.breaks_with is not None:
                        await context.abort(self.breaks_with, "broken by the test")
        finally:
            self.stream_ended.set()


class StreamEnded(Exception):
    """The worker ended the Forward stream."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


class PredecessorDouble:
    """One Forward stream into a worker."""

    def __init__(self, address: str) -> None:
        self._channel = PLAIN.channel(address)
        self._call: Any = forward_pb2_grpc.StageServiceStub(self._channel).Forward(wait_for_ready=True)

    async def hello(self, hello: forward_pb2.HopHello) -> None:
        """Raises StreamEnded unless the hello is accepted."""
        async with asyncio.timeout(DEADLINE_S):
            await self.send([forward_pb2.ForwardRequest(hello=hello)])
            answer = await self._read()
        assert answer.WhichOneof("message") == "accepted"

    async def send(self, messages: Iterable[forward_pb2.ForwardRequest]) -> None:
        """Ignores a stream already ended by the worker; `end` reports that."""
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            for message in messages:
                await self._call.write(message)

    async def connected(self) -> None:
        """Wait until the call is open; raw writes need that."""
        async with asyncio.timeout(DEADLINE_S):
            await self._call.wait_for_connection()

    async def send_raw(self, message: bytes) -> None:
        """Write bytes, bypassing the serialiser."""
        await self._call._cython_call.send_serialized_message(message)

    async def done_writing(self) -> None:
        await self._call.done_writing()

    async def end(self) -> StreamEnded:
        """Waits until the worker ends the stream."""
        async with asyncio.timeout(DEADLINE_S):
            try:
                await self._read()
            except StreamEnded as ended:
                return ended
        raise AssertionError("the worker sent a message where it should have ended the stream")

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()

    async def _read(self) -> Any:
        try:
            answer = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise StreamEnded(error.code(), error.details() or "") from None
        if answer is grpc.aio.EOF:
            raise StreamEnded(await self._call.code(), await self._call.details())
        return answer
