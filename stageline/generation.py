"""The outputs of one request, over as many calls as it takes."""

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import grpc.aio

from stageline.connection import CLOSED, Connection, is_connection_loss, is_journalled, typed_errors
from stageline.continuity import Continuity
from stageline.errors import Cancelled, Unavailable, from_rpc_error
from stageline.output import GenerateOutput, output_from
from stageline.patience import Patience
from stageline.reattachment import Reattachment, Way
from stageline_rpc.v1 import inference_pb2, inference_pb2_grpc
from wire.calls import ATTACH_SECRET_KEY
from wire.trace_context import trace_headers

if TYPE_CHECKING:  # these classes are generic in the stubs only
    _Call: TypeAlias = (
        grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]
        | grpc.aio.UnaryStreamCall[inference_pb2.AttachRequest, inference_pb2.GenerateResponse]
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What is wanted: a request that is to be sent, or (`request` None) one that is to be attached to.

    With `reattaches`, a call that the connection ends is followed by another one; else only where the
    coordinator has said that the request is in its journal.
    """

    request_id: str
    secret: str = field(repr=False)
    request: inference_pb2.GenerateRequest | None
    reattaches: bool
    timeout_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """How long to wait for the coordinator: before the first call, and while it is out of reach later."""

    connect_timeout_s: float
    reattach_timeout_s: float


class Generation:
    """Reads one request. Once only; leaving `outputs` ends the call that is under way."""

    def __init__(self, connection: Connection, ask: Ask, continuity: Continuity, waits: Waits) -> None:
        self._connection = connection
        self._ask = ask
        self._continuity = continuity
        self._waits = waits
        self._reattachment = Reattachment(can_generate=ask.request is not None)
        self._loss = ""
        self._reattaches = ask.reattaches

    async def outputs(self) -> AsyncGenerator[GenerateOutput, None]:
        """Raises errors of the StagelineError tree."""
        with typed_errors():
            channel = await self._connection.ready(self._waits.connect_timeout_s)
            self._patience = Patience(
                outage_s=self._waits.reattach_timeout_s, timeout_s=self._ask.timeout_s, now_s=_now_s()
            )
            while True:
                call = self._call(channel)
                try:
                    async for response in call:
                        output = self._take(response)
                        if output is not None:
                            yield output
                    self._continuity.check_finished()
                    return
                except grpc.aio.AioRpcError as error:
                    self._reattaches |= is_journalled(error)
                    if self._has_all(error):
                        return
                    self._check_worth_another_call(error)
                finally:
                    call.cancel()
                channel = await self._reconnected()

    def _call(self, channel: grpc.aio.Channel) -> "_Call":
        stub = inference_pb2_grpc.InferenceStub(channel)
        timeout_s = self._patience.time_left_s(_now_s())
        secret = ((ATTACH_SECRET_KEY, self._ask.secret),)
        if self._reattachment.way is Way.GENERATE:
            assert self._ask.request is not None, "a request that is not at hand is never sent"
            headers = (*trace_headers(), *secret)
            return stub.Generate(self._ask.request, timeout=timeout_s, metadata=headers)
        return stub.Attach(self._attach_request(), timeout=timeout_s, metadata=secret)

    def _attach_request(self) -> inference_pb2.AttachRequest:
        return inference_pb2.AttachRequest(
            request_id=self._ask.request_id,
            from_token=self._continuity.first_token,
            positions=[
                inference_pb2.ChoicePosition(choice=choice, from_token=num_tokens)
                for choice, num_tokens in self._continuity.positions.items()
            ],
        )

    def _take(self, response: inference_pb2.GenerateResponse) -> GenerateOutput | None:
        self._patience.succeed()
        self._reattachment.has_heard = True
        return self._continuity.check(output_from(response))

    def _has_all(self, error: grpc.aio.AioRpcError) -> bool:
        """Whether the connection was lost between the last message and the status that ends the call."""
        return self._reattaches and self._continuity.is_complete and is_connection_loss(error)

    def _check_worth_another_call(self, error: grpc.aio.AioRpcError) -> None:
        """Raises the error that ends the generation, unless another call may go on."""
        typed = from_rpc_error(error)
        if not self._reattaches:
            raise typed from None
        is_loss = is_connection_loss(error)
        if is_loss:
            self._loss = typed.message
        if not self._reattachment.follow(error.code(), is_connection_loss=is_loss):
            if self._reattachment.was_lost and error.code() == grpc.StatusCode.NOT_FOUND:
                message = f"{self._loss}; the coordinator does not know the request any more"
                raise Unavailable(f"{message}: {typed.message}") from None
            raise typed from None

    async def _reconnected(self) -> grpc.aio.Channel:
        """The channel for the next call. Raises Unavailable when the outage has lasted too long."""
        self._continuity.interrupt()
        pause_s = self._patience.fail(_now_s()) * random.uniform(0.5, 1.0)
        await asyncio.sleep(min(pause_s, self._patience.outage_left_s(_now_s())))
        if not self._connection.is_open:
            raise Cancelled(CLOSED)
        outage_left_s = self._patience.outage_left_s(_now_s())
        if outage_left_s == 0:
            raise Unavailable(f"{self._loss}; {self._describe_outage()}")
        try:
            return await self._connection.ready(outage_left_s)
        except Unavailable:
            self._patience.time_left_s(_now_s())  # where it is the timeout that has passed, this says so
            message = f"no coordinator at {self._connection.address}"
            raise Unavailable(f"{message}; {self._describe_outage()}") from None

    def _describe_outage(self) -> str:
        waited_s = self._waits.reattach_timeout_s
        return f"request {self._ask.request_id} could not be attached to for {waited_s:g} s"


def _now_s() -> float:
    return asyncio.get_running_loop().time()
