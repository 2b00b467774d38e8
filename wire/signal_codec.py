"""KV signals <-> protobuf messages."""

from kvcache import Block, Deref, Destroy, FullBlock, PartialBlock, Promote, Signal, Use
from stageline_rpc.v1 import stage_pb2
from wire.errors import StepFault, StepFaultKind


def encode_signal(signal: Signal, message: stage_pb2.SequenceSignal) -> None:
    """Writes `signal` into the oneof of `message`."""
    match signal:
        case Use():
            message.use.blocks.extend(_encode_block(block) for block in signal.blocks)
            message.use.block_hashes.extend(signal.block_hashes)
            if signal.parent is not None:
                message.use.parent = signal.parent
        case Promote():
            message.promote.partial = signal.partial.id
            message.promote.sequence_hash = signal.sequence_hash
            message.promote.block_hash = signal.block_hash
            if signal.parent is not None:
                message.promote.parent = signal.parent
        case Deref():
            message.deref.CopyFrom(_encode_block(signal.block))
        case Destroy():
            message.destroy.CopyFrom(_encode_block(signal.block))


def decode_signal(message: stage_pb2.SequenceSignal) -> Signal:
    """Raises StepFault UNDECODABLE for a signal without content."""
    match message.WhichOneof("signal"):
        case "use":
            use = message.use
            return Use(
                blocks=tuple(_decode_block(block) for block in use.blocks),
                block_hashes=tuple(use.block_hashes),
                parent=use.parent if use.HasField("parent") else None,
            )
        case "promote":
            promote = message.promote
            return Promote(
                partial=PartialBlock(promote.partial),
                sequence_hash=promote.sequence_hash,
                parent=promote.parent if promote.HasField("parent") else None,
                block_hash=promote.block_hash,
            )
        case "deref":
            return Deref(_decode_block(message.deref))
        case "destroy":
            return Destroy(_decode_block(message.destroy))
        case _:
            raise StepFault(StepFaultKind.UNDECODABLE, "a KV signal without content")


def _encode_block(block: Block) -> stage_pb2.Block:
    if isinstance(block, FullBlock):
        return stage_pb2.Block(full=block.sequence_hash)
    return stage_pb2.Block(partial=block.id)


def _decode_block(message: stage_pb2.Block) -> Block:
    match message.WhichOneof("block"):
        case "full":
            return FullBlock(message.full)
        case "partial":
            return PartialBlock(message.partial)
        case _:
            raise StepFault(StepFaultKind.UNDECODABLE, "a KV signal names a block without content")
