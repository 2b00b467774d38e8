"""`stageline.v1.Cluster` and `stageline.v1.StepResults`: decode, one domain call, encode."""

import asyncio
import sys
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from coordinator.api.call_context import Operators
from coordinator.api.status import StatusReporter
from coordinator.cluster.connections import WorkerConnection
from coordinator.cluster.controller import Controller
from coordinator.cluster.messages import decode_hello
from coordinator.scheduler.kv_events import KvChange, KvEventPublisher, KvSnapshot
from kvcache import CachedBlock, Removed, Stored
from stageline_rpc.v1 import cluster_pb2, cluster_pb2_grpc, stage_pb2, stage_pb2_grpc
from wire.addresses import peer_host
from wire.channels import when_call_ends
from wire.errors import InvalidRequest, StaleStream, StepFault
from wire.frames import decode_result_frame
from wire.step_codec import decode_fault

BLOCKS_PER_MESSAGE = 4096
"""About 130 KB of a snapshot, far below gRPC's default message limit."""

TOKENS_PER_MESSAGE = 65_536
"""Token ids per snapshot message, at most 5 bytes each; a single block may have more."""


def encode_snapshot(
    snapshot: KvSnapshot, *, with_token_ids: bool = False
) -> Iterator[cluster_pb2.KvEventsResponse]:
    """Yield at least one message; the last one has `is_last`."""
    size = BLOCKS_PER_MESSAGE
    if with_token_ids:
        size = max(1, min(size, TOKENS_PER_MESSAGE // max(1, snapshot.block_size)))
    num_messages = max(1, -(-len(snapshot.blocks) // size))
    for index in range(num_messages):
        blocks = snapshot.blocks[index * size : (index + 1) * size]
        yield cluster_pb2.KvEventsResponse(
            snapshot=cluster_pb2.KvSnapshot(
                epoch=snapshot.epoch,
                block_size=snapshot.block_size,
                blocks=[_block(block, with_token_ids=with_token_ids) for block in blocks],
                is_last=index == num_messages - 1,
                next_event_id=snapshot.next_event_id,
            )
        )


def encode_change(change: KvChange, *, with_token_ids: bool = False) -> cluster_pb2.KvEventsResponse:
    """Encode one change; token ids only on request."""
    message = cluster_pb2.KvEvent(event_id=change.event.event_id, epoch=change.epoch)
    match change.event:
        case Stored(parent, sequence_hashes, block_hashes):
            message.stored.sequence_hashes.extend(sequence_hashes)
            message.stored.block_hashes.extend(block_hashes)
            if parent is not None:
                message.stored.parent = parent
            if with_token_ids:
                message.stored.token_ids.extend(_token_ids(change.packed_tokens))
        case Removed(sequence_hashes):
            message.removed.sequence_hashes.extend(sequence_hashes)
        case _:
            message.cleared.SetInParent()
    return cluster_pb2.KvEventsResponse(event=message)


def _block(block: CachedBlock, *, with_token_ids: bool) -> cluster_pb2.KvBlock:
    return cluster_pb2.KvBlock(
        sequence_hash=block.sequence_hash,
        block_hash=block.block_hash,
        parent=block.parent,
        token_ids=_token_ids(block.packed_tokens) if with_token_ids else (),
    )


def _token_ids(packed_tokens: bytes) -> Sequence[int]:
    """Decode little-endian u32 ids, as packed by `kvcache.hashing.pack_tokens`."""
    tokens = array("I", packed_tokens)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


_Message = TypeVar("_Message")


class ClusterService(cluster_pb2_grpc.ClusterServicer):
    """Called by workers and operators."""

    def __init__(
        self, controller: Controller, status: StatusReporter, kv_feed: KvEventPublisher, operators: Operators
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
        hello = await _first(
            request_iterator, cluster_pb2.WorkerMessage(), self._controller.policy.hello_timeout_s
        )
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
            reason = f"it sent an invalid message: {error}"
        finally:
            self._controller.leave(connection, reason)


class StepResultsService(stage_pb2_grpc.StepResultsServicer):
    """Called by LAST."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def Deliver(  # noqa: N802
        self,
        request_iterator: AsyncIterator[stage_pb2.DeliverRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[stage_pb2.DeliverResponse]:
        first = await _first(
            request_iterator, stage_pb2.DeliverRequest(), self._controller.policy.hello_timeout_s
        )
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


async def _first(messages: AsyncIterator[_Message], nothing: _Message, timeout_s: float) -> _Message:
    """First message of a stream, `nothing` if it ends before. Raises InvalidRequest after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(aiter(messages), nothing)
    except TimeoutError:
        raise InvalidRequest(f"no hello within {timeout_s:g} s") from None
