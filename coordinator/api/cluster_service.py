"""`stageline.v1.Cluster` and `stageline.v1.StepResults`: decode, one domain call, encode."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from coordinator.api.kv_messages import encode_change, encode_snapshot
from coordinator.api.operators import Operators
from coordinator.api.status import StatusReporter
from coordinator.cluster.controller import Controller
from coordinator.cluster.messages import decode_hello
from coordinator.cluster.worker_connection import WorkerConnection
from coordinator.scheduling.kv_feed import KvFeed
from stageline_rpc.v1 import cluster_pb2, cluster_pb2_grpc, stage_pb2, stage_pb2_grpc
from wire.calls import when_call_ends
from wire.errors import InvalidRequest, StaleStream, StepFault
from wire.peer_host import peer_host
from wire.result_frames import decode_result_frame
from wire.step_codec import decode_fault

HELLO_TIMEOUT_S = 10.0

_Message = TypeVar("_Message")


class ClusterService(cluster_pb2_grpc.ClusterServicer):
    """What workers and operators call."""

    def __init__(
        self, controller: Controller, status: StatusReporter, kv_feed: KvFeed, operators: Operators
    ) -> None:
        self._controller = controller
        self._status = status
        self._kv_feed = kv_feed
        self._operators = operators

    async def Join(  # noqa: N802
        self,
        request_iterator: AsyncIterator[cluster_pb2.WorkerMessage],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[cluster_pb2.CoordinatorMessage]:
        hello = await _first(request_iterator, cluster_pb2.WorkerMessage())
        connection = self._controller.join(decode_hello(hello), hello.hello.rejoin_secret)
        when_call_ends(context, lambda: self._controller.leave(connection, "its stream broke"))
        reader = asyncio.create_task(self._read(request_iterator, connection))
        try:
            async for message in connection.messages():
                yield message
        finally:
            reader.cancel()
        raise StaleStream(connection.close_reason)

    async def Drain(  # noqa: N802
        self, request: cluster_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> cluster_pb2.DrainResponse:
        self._operators.check(context)
        await self._controller.drain(request.worker)
        return cluster_pb2.DrainResponse()

    async def GetStatus(  # noqa: N802
        self, request: cluster_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> cluster_pb2.GetStatusResponse:
        return self._status.cluster()

    async def KvEvents(  # noqa: N802
        self, request: cluster_pb2.KvEventsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[cluster_pb2.KvEventsResponse]:
        subscription = self._kv_feed.subscribe()
        when_call_ends(context, subscription.close)
        with_token_ids = request.with_token_ids
        for message in encode_snapshot(subscription.snapshot, with_token_ids=with_token_ids):
            yield message
        async for change in subscription.changes():
            yield encode_change(change, with_token_ids=with_token_ids)

    async def _read(
        self, messages: AsyncIterator[cluster_pb2.WorkerMessage], connection: WorkerConnection
    ) -> None:
        reason = "it ended its stream"
        try:
            async for message in messages:
                if message.WhichOneof("message") == "fault":
                    self._controller.receive_fault(connection, decode_fault(message.fault))
                else:
                    self._controller.receive(connection, message)
        except ValueError as error:
            reason = f"it sent something unknown: {error}"
        finally:
            self._controller.leave(connection, reason)


class StepResultsService(stage_pb2_grpc.StepResultsServicer):
    """What LAST calls."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def Deliver(  # noqa: N802
        self,
        request_iterator: AsyncIterator[stage_pb2.DeliverRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[stage_pb2.DeliverResponse]:
        first = await _first(request_iterator, stage_pb2.DeliverRequest())
        if first.WhichOneof("message") != "hello":
            raise InvalidRequest("the first message of Deliver must be hello")
        epoch = self._controller.open_results(first.hello, host=peer_host(context))
        when_call_ends(
            context, lambda: self._controller.stream_broke(epoch, "the stream of results from LAST broke")
        )
        yield stage_pb2.DeliverResponse(accepted=stage_pb2.HopAccepted())
        try:
            async for message in request_iterator:
                self._controller.complete(epoch, decode_result_frame(message))
        except (DecodeError, StepFault) as error:
            self._controller.fail_epoch(epoch, f"a result of LAST is damaged: {error}")


async def _first(messages: AsyncIterator[_Message], nothing: _Message) -> _Message:
    """The first message of a stream, `nothing` if it ends before. Raises InvalidRequest for a silent one."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            return await anext(aiter(messages), nothing)
    except TimeoutError:
        raise InvalidRequest(f"no hello within {HELLO_TIMEOUT_S:g} s") from None
