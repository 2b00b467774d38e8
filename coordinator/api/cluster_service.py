"""`stageline.v1.Cluster`: decode, one domain call, encode."""

import sys
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from certificates.identity import Role
from coordinator.api.call_context import Operators
from coordinator.api.status import StatusReporter
from coordinator.cluster.controller import Controller
from coordinator.scheduler.kv_events import KvChange, KvEventPublisher, KvSnapshot
from kvcache import CachedBlock, Removed, Stored
from stageline_rpc.v1 import cluster_pb2, cluster_pb2_grpc, kv_events_pb2
from wire.audit import Action, AuditLog, AuditOutcome
from wire.authorization import caller_of
from wire.channels import when_call_ends
from wire.peer_identity import peer_identity

BLOCKS_PER_MESSAGE = 4096
"""About 130 KB of a snapshot, far below gRPC's default message limit."""

_NOT_FOR_GATEWAYS: Final = ("detail", "journal", "self_check", "workers")
"""Fields with names and addresses of processes and texts about them; what is left are counts and states."""

TOKENS_PER_MESSAGE = 65_536
"""Token ids per snapshot message, at most 5 bytes each; a single block may have more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOrigin:
    """Source of KV events: name of the cluster, UUID of the coordinator's process, model fingerprint."""

    cluster: str
    incarnation: str
    fingerprint: str


def encode_snapshot(
    snapshot: KvSnapshot, origin: KvOrigin, *, with_token_ids: bool = False
) -> Iterator[kv_events_pb2.WatchKvEventsResponse]:
    """Yield at least one message; the last one has `is_last`."""
    size = BLOCKS_PER_MESSAGE
    if with_token_ids:
        size = max(1, min(size, TOKENS_PER_MESSAGE // max(1, snapshot.block_size)))
    num_messages = max(1, -(-len(snapshot.blocks) // size))
    for index in range(num_messages):
        blocks = snapshot.blocks[index * size : (index + 1) * size]
        yield kv_events_pb2.WatchKvEventsResponse(
            snapshot=kv_events_pb2.KvSnapshot(
                epoch=snapshot.epoch,
                block_size=snapshot.block_size,
                blocks=[_block(block, with_token_ids=with_token_ids) for block in blocks],
                is_last=index == num_messages - 1,
                next_event_id=snapshot.next_event_id,
                cluster=origin.cluster,
                incarnation=origin.incarnation,
                fingerprint=origin.fingerprint,
            )
        )


def encode_change(
    change: KvChange, cluster: str, *, with_token_ids: bool = False
) -> kv_events_pb2.WatchKvEventsResponse:
    """Encode one change; token ids only on request."""
    message = kv_events_pb2.KvEvent(event_id=change.event.event_id, epoch=change.epoch, cluster=cluster)
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
    return kv_events_pb2.WatchKvEventsResponse(event=message)


def _block(block: CachedBlock, *, with_token_ids: bool) -> kv_events_pb2.KvBlock:
    return kv_events_pb2.KvBlock(
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


class ClusterService(cluster_pb2_grpc.ClusterServicer):
    """Called by operators and routers."""

    def __init__(
        self,
        controller: Controller,
        status: StatusReporter,
        kv_events: KvEventPublisher,
        kv_origin: KvOrigin,
        operators: Operators,
        audit: AuditLog,
    ) -> None:
        self._controller = controller
        self._status = status
        self._kv_events = kv_events
        self._kv_origin = kv_origin
        self._operators = operators
        self._audit = audit

    async def Drain(  # noqa: N802
        self, request: cluster_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> cluster_pb2.DrainResponse:
        caller = self._operators.check_drain(request.worker, context)
        outcome = AuditOutcome.OK if request.worker in self._controller.connections else AuditOutcome.FAILED
        self._audit.record(Action.DRAIN, outcome, **caller, worker=request.worker)
        await self._controller.drain(request.worker)
        return cluster_pb2.DrainResponse()

    async def GetStatus(  # noqa: N802
        self, request: cluster_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> cluster_pb2.GetStatusResponse:
        status, caller = self._status.cluster(), peer_identity(context)
        if caller is not None and caller.role is Role.GATEWAY:
            for field in _NOT_FOR_GATEWAYS:
                status.ClearField(field)
        return status

    async def WatchKvEvents(  # noqa: N802
        self, request: kv_events_pb2.WatchKvEventsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[kv_events_pb2.WatchKvEventsResponse]:
        with_token_ids = request.with_token_ids
        caller = caller_of(context)
        self._audit.record(Action.WATCH, AuditOutcome.OK, **caller, with_token_ids=with_token_ids)
        subscription = self._kv_events.subscribe()
        when_call_ends(context, subscription.close)
        origin = self._kv_origin
        for message in encode_snapshot(subscription.snapshot, origin, with_token_ids=with_token_ids):
            yield message
        async for change in subscription.changes():
            yield encode_change(change, origin.cluster, with_token_ids=with_token_ids)
