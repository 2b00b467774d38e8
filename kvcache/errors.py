"""What can go wrong in the accounting: in health `OutOfBlocks` and `HashCollision`, the rest by a defect."""

# The conformance vectors fix the name OutOfBlocks; the others follow it and drop the suffix "Error" too.


class KvCacheError(Exception):
    """Root of this package's errors. Whatever raises one has changed nothing."""


class OutOfBlocks(KvCacheError):
    """The pool has too few free and evictable pages; something must be freed or preempted first."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} blocks needed, {available} free or evictable")
        self.needed = needed
        self.available = available


class BlockNotActive(KvCacheError):
    """A signal or query names a block that has no owner (or, for a page, is absent)."""


class BlockShared(KvCacheError):
    """A partial block with more than one owner cannot be promoted, nor be used by a second sequence."""


class InvalidSignal(KvCacheError, ValueError):
    """A signal that contradicts itself, such as block hashes that do not match its blocks."""


class OutputLimitExceeded(KvCacheError):
    """More tokens were pushed than the sequence may generate."""

    def __init__(self, max_output_tokens: int) -> None:
        super().__init__(f"the sequence has generated its {max_output_tokens} output tokens already")
        self.max_output_tokens = max_output_tokens


class NothingToPop(KvCacheError):
    """Only the last push can be undone, once, and only while nothing else has happened since."""


class HashCollision(KvCacheError):
    """A sequence hash is known with other content; the sequence must use private ids from this block on."""

    def __init__(self, block_index: int, sequence_hash: int) -> None:
        super().__init__(f"sequence hash {sequence_hash} of block {block_index} is known with other content")
        self.block_index = block_index
        self.sequence_hash = sequence_hash


class IntegrityBroken(KvCacheError):
    """The accounting contradicts itself: a defect of this package or of whoever reached into it."""


class UnknownSequence(KvCacheError):
    """No block table exists under this key."""


class BlockNotHeld(KvCacheError):
    """A signal releases or promotes a block that the sequence does not hold at that place of its table."""


class SequenceHoldsBlocks(KvCacheError):
    """A sequence ended before all its blocks were freed."""

    def __init__(self, key: object, num_blocks: int) -> None:
        super().__init__(f"sequence {key!r} ends while it holds {num_blocks} blocks")
        self.num_blocks = num_blocks
