"""`stageline.internal.v1.MembershipService` and `StepResultsService`, which workers call."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from coordinator.cluster.connections import WorkerConnection
from coordinator.cluster.controller import Controller
from coordinator.cluster.membership import WorkerIdentity
from coordinator.cluster.messages import decode_hello
from stageline_rpc.internal.v1 import deliver_pb2, deliver_pb2_grpc, forward_pb2, join_pb2, join_pb2_grpc
from wire.addresses import peer_host
from wire.channels import when_call_ends
from wire.errors import AccessDenied, HandshakeMismatch, InvalidRequest, StaleStream, StepFault
from wire.frames import decode_result_frame
from wire.message_reads import receive_within
from wire.peer_identity import peer_identity
from wire.peer_secrets import RefusedPeers
from wire.step_codec import decode_fault

log = logging.getLogger(__name__)

_Message = TypeVar("_Message")


class MembershipService(join_pb2_grpc.MembershipServiceServicer):
    """Called by every worker."""

    def __init__(self, controller: Controller, refused: RefusedPeers) -> None:
        """`refused` counts and logs workers that join under another's name."""
        self._controller, self._refused = controller, refused
        self._hello_timeout_s = controller.policy.hello_timeout_s

    async def Join(  # noqa: N802
        self,
        request_iterator: AsyncIterator[join_pb2.JoinRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[join_pb2.JoinResponse]:
        hello = await _first(request_iterator, join_pb2.JoinRequest(), self._hello_timeout_s)
        identity = _identity(hello, context)
        self._check_name(identity.name, context)
        connection = self._controller.join(identity, hello.hello.rejoin_secret)
        when_call_ends(context, lambda: self._controller.leave(connection, "its stream broke"))
        reader = asyncio.create_task(self._read(request_iterator, connection))
        try:
            async for message in connection.messages():
                yield message
        finally:
            reader.cancel()
        raise StaleStream(connection.close_reason)

    def _check_name(self, name: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Raises AccessDenied for a name that is not in the caller's certificate."""
        caller = peer_identity(context)
        if caller is not None and caller.name != name:
            problem = f"{caller} may not join as {name!r}: start it with --name {caller.name}"
            self._refused.note("a worker", problem, host=peer_host(context))
            raise AccessDenied(problem)

    async def _read(
        self, messages: AsyncIterator[join_pb2.JoinRequest], connection: WorkerConnection
    ) -> None:
        reason = "its stream ended"
        try:
            async for message in messages:
                if message.WhichOneof("message") == "fault":
                    self._controller.receive_fault(connection, decode_fault(message.fault))
                else:
                    self._controller.receive(connection, message)
        except ValueError as error:
            reason = f"it sent an invalid message: {error}"
        finally:
            self._controller.leave(connection, reason)


class StepResultsService(deliver_pb2_grpc.StepResultsServiceServicer):
    """Called by LAST."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._hello_timeout_s = controller.policy.hello_timeout_s

    async def Deliver(  # noqa: N802
        self,
        request_iterator: AsyncIterator[deliver_pb2.DeliverRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[deliver_pb2.DeliverResponse]:
        first = await _first(request_iterator, deliver_pb2.DeliverRequest(), self._hello_timeout_s)
        if first.WhichOneof("message") != "hello":
            raise InvalidRequest("the first message of Deliver must be hello")
        epoch = self._controller.open_results(
            first.hello, host=peer_host(context), caller=peer_identity(context)
        )
        when_call_ends(
            context, lambda: self._controller.stream_broke(epoch, "the stream of results from LAST broke")
        )
        yield deliver_pb2.DeliverResponse(accepted=forward_pb2.HopAccepted())
        try:
            async for message in request_iterator:
                self._controller.complete(epoch, decode_result_frame(message))
        except (DecodeError, StepFault) as error:
            self._controller.fail_epoch(epoch, f"a result of LAST is corrupt: {error}")


def _identity(message: join_pb2.JoinRequest, context: grpc.aio.ServicerContext[Any, Any]) -> WorkerIdentity:
    """Decode a hello, and log a worker of another protocol version. Raises like `decode_hello`."""
    try:
        return decode_hello(message)
    except HandshakeMismatch as error:
        log.warning("refused a worker: %s, host=%s", error, peer_host(context))
        raise


async def _first(messages: AsyncIterator[_Message], nothing: _Message, timeout_s: float) -> _Message:
    """Return a stream's first message, or `nothing` if it ends. Raises InvalidRequest after `timeout_s`."""
    try:
        return await receive_within(lambda: anext(aiter(messages), nothing), timeout_s)
    except TimeoutError:
        raise InvalidRequest(f"no hello within {timeout_s:g} s") from None
