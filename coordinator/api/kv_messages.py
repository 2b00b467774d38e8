"""The KV feed -> protobuf messages."""

from collections.abc import Iterator

from coordinator.scheduling.kv_feed import KvChange, KvSnapshot
from kvcache import CachedBlock, Removed, Stored
from stageline_rpc.v1 import cluster_pb2

BLOCKS_PER_MESSAGE = 4096
"""About 130 KB of a snapshot, far below the largest message that a gRPC client takes by default."""


def encode_snapshot(snapshot: KvSnapshot) -> Iterator[cluster_pb2.KvEventsResponse]:
    """At least one message; the last one is marked."""
    num_messages = max(1, -(-len(snapshot.blocks) // BLOCKS_PER_MESSAGE))
    for index in range(num_messages):
        blocks = snapshot.blocks[index * BLOCKS_PER_MESSAGE : (index + 1) * BLOCKS_PER_MESSAGE]
        yield cluster_pb2.KvEventsResponse(
            snapshot=cluster_pb2.KvSnapshot(
                epoch=snapshot.epoch,
                block_size=snapshot.block_size,
                blocks=map(_block, blocks),
                is_last=index == num_messages - 1,
                next_event_id=snapshot.next_event_id,
            )
        )


def encode_change(change: KvChange) -> cluster_pb2.KvEventsResponse:
    message = cluster_pb2.KvEvent(event_id=change.event.event_id, epoch=change.epoch)
    match change.event:
        case Stored(parent, sequence_hashes, block_hashes):
            message.stored.sequence_hashes.extend(sequence_hashes)
            message.stored.block_hashes.extend(block_hashes)
            if parent is not None:
                message.stored.parent = parent
        case Removed(sequence_hashes):
            message.removed.sequence_hashes.extend(sequence_hashes)
        case _:
            message.cleared.SetInParent()
    return cluster_pb2.KvEventsResponse(event=message)


def _block(block: CachedBlock) -> cluster_pb2.KvBlock:
    return cluster_pb2.KvBlock(
        sequence_hash=block.sequence_hash, block_hash=block.block_hash, parent=block.parent
    )
