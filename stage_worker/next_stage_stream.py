"""Sending end of one stream: to the next stage, or from LAST to the coordinator."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import grpc

from stage_worker.backends.contract import HandedOn, StageOutput, TimedOutput
from stage_worker.hop_payloads import OutgoingPayloads
from stage_worker.policy import WORKER_POLICY
from stageline_rpc.internal.v1 import deliver_pb2, deliver_pb2_grpc, forward_pb2
from stageline_rpc.v1 import cluster_pb2
from wire.channels import OrderedWrites, StartedWrite, finish_write
from wire.errors import StaleStream, StepFault, StepFaultKind
from wire.frames import encode_hidden_states, encode_result_frame
from wire.payloads import PayloadNotice
from wire.stage_calls import HELLO_RETRY_S, open_forward
from wire.transport import PLAIN, Transport

Request = bytes | deliver_pb2.DeliverRequest
Call = grpc.aio.StreamStreamCall[Any, Any]


class NextStageStream:
    """A stream that exchanges hello and accepted, then sends outputs.

    Failures raise StepFault NEIGHBOUR. If the receiver aborts an accepted stream, the error is StaleStream
    instead: the epoch has ended, or the receiver reports its own fault, which a second report would race
    with.
    """

    def __init__(
        self,
        peer: str,
        address: str,
        hello: Request,
        open_call: Callable[[grpc.aio.Channel], Call],
        payloads: OutgoingPayloads | None = None,
        transport: Transport = PLAIN,
    ) -> None:
        """`peer` is the receiver's name in messages; without `payloads` all outputs travel on the stream."""
        self._peer = f"{peer} at {address}"
        self._address = address
        self._hello = hello
        self._open_call = open_call
        self._payloads = payloads
        self._transport = transport
        self._channel: grpc.aio.Channel | None = None
        self._call: Call | None = None
        self._is_accepted = False
        self._writes = OrderedWrites()
        self._steps: list[bytes] = []

    @property
    def payload_fallback(self) -> str:
        """Why large hidden states travel on the stream instead of their own connection; empty otherwise."""
        return "" if self._payloads is None else self._payloads.fallback

    @property
    def same_host_fallback(self) -> str:
        """Why hidden states do not travel the fastest way to a stage on this host; empty otherwise."""
        return "" if self._payloads is None else self._payloads.same_host_fallback

    @property
    def hop_transport(self) -> cluster_pb2.HopTransport.ValueType:
        """How hidden states travel to the next stage; unspecified to the coordinator, and before `dial`."""
        if self._payloads is None:
            return cluster_pb2.HOP_TRANSPORT_UNSPECIFIED
        return self._payloads.transport

    async def dial(self) -> None:
        """Connect, send hello, and wait for accepted."""
        self._channel = self._transport.channel(self._address)
        try:
            async with asyncio.timeout(WORKER_POLICY.dial_timeout_s):
                answer = await self._greet(self._channel)
                if self._payloads is not None and answer.WhichOneof("message") == "accepted":
                    await self._payloads.open(answer.accepted)
        except TimeoutError:
            raise self._fault(
                f"did not accept the stream within {WORKER_POLICY.dial_timeout_s:g} s"
            ) from None
        if answer.WhichOneof("message") != "accepted":
            raise self._fault(f"answered {answer.WhichOneof('message')!r} where 'accepted' was due")
        self._is_accepted = True

    def forward(self, steps: Iterable[bytes]) -> None:
        """Pass steps on with the next output, or at `flush`."""
        self._steps.extend(steps)

    def flush(self) -> None:
        """Write the steps that wait for an output; see `room`."""
        if self._steps:
            self._writes.put(self._with_steps(b""))

    async def room(self) -> None:
        """Wait until few messages are unwritten: the receiver reads."""
        await self._writes.room()

    async def send(self, output: TimedOutput) -> None:
        """Write one output; returns when few of its messages are unwritten."""
        notice = await self._send_payload(output.output)
        for message in _encode(output, notice):
            self._writes.put(self._with_steps(message) if isinstance(message, bytes) else message)
            await self._writes.room()

    async def write(self) -> None:
        """Finish the writes of `forward` and `send` until the stream ends."""
        assert self._call is not None, "write before dial"
        try:
            await self._writes.run(self._call)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise await self._ended(self._call) from None

    async def watch(self) -> None:
        """Wait for the stream to end, which the receiver does on failure only."""
        assert self._call is not None, "watch before dial"
        answer = await self._read(self._call)
        raise self._fault(f"sent an unexpected {answer.WhichOneof('message')!r}")

    async def close(self) -> None:
        """End call and connections. Idempotent."""
        if self._payloads is not None:
            self._payloads.close()
        if self._call is not None:
            self._call.cancel()
        if self._channel is not None:
            await self._channel.close()

    async def _greet(self, channel: grpc.aio.Channel) -> Any:
        """Return the answer to hello; retry in a new call while the receiver has too many streams."""
        while True:
            call = self._call = self._open_call(channel)
            try:
                await self._write(call, self._hello)
                return await self._read(call)
            except StepFault:
                if await call.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
            await asyncio.sleep(HELLO_RETRY_S)

    def _with_steps(self, message: bytes) -> bytes:
        """Serialised messages may be concatenated."""
        if self._steps:
            message = b"".join((*self._steps, message))
            self._steps.clear()
        return message

    async def _send_payload(self, output: StageOutput) -> PayloadNotice | None:
        """Send large hidden states on the payload connection; None if they belong into the frame."""
        if self._payloads is None or not isinstance(output, HandedOn) or not output.hidden:
            return None
        try:
            return await self._payloads.send(output.hidden)
        except ConnectionError as error:
            raise await self._payload_failed(error) from None

    async def _payload_failed(self, error: ConnectionError) -> StepFault | StaleStream:
        """A receiver that ends its epoch closes both connections, and the stream says why."""
        assert self._call is not None and self._payloads is not None
        try:
            async with asyncio.timeout(WORKER_POLICY.payload_grace_s):
                return await self._ended(self._call)
        except TimeoutError:
            self._payloads.note_broken(error)
            return self._fault(f"lost the payload connection: {error}")

    async def _write(self, call: Call, message: Request) -> None:
        try:
            await finish_write(call, StartedWrite(call.write(message)))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise await self._ended(call) from None

    async def _read(self, call: Call) -> Any:
        try:
            answer = await call.read()
        except grpc.aio.AioRpcError:
            raise await self._ended(call) from None
        if answer is grpc.aio.EOF:
            raise await self._ended(call)
        return answer

    async def _ended(self, call: Call) -> StepFault | StaleStream:
        code, details = await call.code(), await call.details()
        fault = self._fault(f"ended the stream: {code.name}{f': {details}' if details else ''}")
        if self._is_accepted and code is grpc.StatusCode.ABORTED:
            return StaleStream(fault.message)
        return fault

    def _fault(self, text: str) -> StepFault:
        return StepFault(StepFaultKind.NEIGHBOUR, f"{self._peer} {text}")


def stream_to_stage(
    stage: int,
    address: str,
    hello: forward_pb2.HopHello,
    payloads: OutgoingPayloads | None = None,
    transport: Transport = PLAIN,
) -> NextStageStream:
    """Stream to the next stage."""
    return NextStageStream(
        f"stage {stage}",
        address,
        forward_pb2.ForwardRequest(hello=hello).SerializeToString(),
        open_forward,
        payloads,
        transport,
    )


def stream_to_coordinator(
    address: str, hello: forward_pb2.HopHello, transport: Transport = PLAIN
) -> NextStageStream:
    """Stream of results from LAST to the coordinator."""
    return NextStageStream(
        "the coordinator",
        address,
        deliver_pb2.DeliverRequest(hello=hello),
        lambda channel: deliver_pb2_grpc.StepResultsServiceStub(channel).Deliver(wait_for_ready=True),
        transport=transport,
    )


def _encode(timed: TimedOutput, notice: PayloadNotice | None) -> Iterable[Request]:
    output = timed.output
    if isinstance(output, HandedOn):
        return encode_hidden_states(
            output.step_id,
            output.step_checksum,
            output.hidden,
            timed.stage_times,
            ready_at_us=timed.ready_at_us,
            notice=notice,
        )
    timed_result = replace(output, stage_times=timed.stage_times, ready_at_us=timed.ready_at_us)
    return (encode_result_frame(timed_result),)
