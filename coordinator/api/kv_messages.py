"""The KV feed -> protobuf messages."""

import sys
from array import array
from collections.abc import Iterator, Sequence

from coordinator.scheduling.kv_feed import KvChange, KvSnapshot
from kvcache import CachedBlock, Removed, Stored
from stageline_rpc.v1 import cluster_pb2

BLOCKS_PER_MESSAGE = 4096
"""About 130 KB of a snapshot, far below the largest message that a gRPC client takes by default."""

TOKENS_PER_MESSAGE = 65_536
"""Token ids in a part of a snapshot, at most 5 bytes each, unless one block has more."""


def encode_snapshot(
    snapshot: KvSnapshot, *, with_token_ids: bool = False
) -> Iterator[cluster_pb2.KvEventsResponse]:
    """At least one message; the last one is marked."""
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
    """One change as a message; token ids only where they were asked for."""
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
    """The ids that `kvcache.hashing.pack_tokens` packed as little-endian u32."""
    tokens = array("I", packed_tokens)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens
