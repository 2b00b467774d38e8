"""Errors of the accounting. Only `OutOfBlocks`, `OutOfStates` and `HashCollision` occur without a defect."""

# The conformance vectors fix the name OutOfBlocks; the other names follow it and omit "Error".


class KvCacheError(Exception):
    """Base of this package's errors. A method that raises one has changed nothing."""


class OutOfBlocks(KvCacheError):
    """The pool has too few free and evictable pages; free blocks or preempt a sequence first."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"{needed} blocks needed, {available} free or evictable")
        self.needed = needed
        self.available = available


class OutOfStates(KvCacheError):
    """All slots have live states; a sequence must end, or be preempted, before another one starts."""

    def __init__(self, num_states: int) -> None:
        super().__init__(f"all {num_states} states are in use")
        self.num_states = num_states


class StateNotHeld(KvCacheError):
    """A signal or query names a state that has no slot, or that another sequence owns."""


class StateTaken(KvCacheError):
    """A state begins that has a slot already, or a sequence gets a second one."""


class BlockNotActive(KvCacheError):
    """A signal or query names a block without owners (for `page_of`: an absent block)."""


class BlockShared(KvCacheError):
    """A partial block with several owners cannot be promoted or used by another sequence."""


class InvalidSignal(KvCacheError, ValueError):
    """A self-contradictory signal, such as block hashes that do not match its blocks."""


class OutputLimitExceeded(KvCacheError):
    """More tokens were pushed than the sequence may generate."""

    def __init__(self, max_output_tokens: int) -> None:
        super().__init__(
            f"sequence already has {max_output_tokens} output tokens, the limit is {max_output_tokens}"
        )
        self.max_output_tokens = max_output_tokens


class NothingToPop(KvCacheError):
    """Only the last push can be undone, once, directly after it."""


class HashCollision(KvCacheError):
    """A sequence hash has other content; the sequence must use private ids from this block on."""

    def __init__(self, block_index: int, sequence_hash: int) -> None:
        super().__init__(f"sequence hash {sequence_hash} of block {block_index} has other content")
        self.block_index = block_index
        self.sequence_hash = sequence_hash


class IntegrityBroken(KvCacheError):
    """The accounting contradicts itself: a defect."""


class UnknownSequence(KvCacheError):
    """The key has no block table."""


class BlockNotHeld(KvCacheError):
    """A signal releases or promotes a block that is not at that place of the sequence's table."""


class SequenceHoldsBlocks(KvCacheError):
    def __init__(self, key: object, num_blocks: int) -> None:
        super().__init__(f"sequence {key!r} ended but still holds {num_blocks} blocks")
        self.num_blocks = num_blocks


class SequenceHoldsState(KvCacheError):
    def __init__(self, key: object) -> None:
        super().__init__(f"sequence {key!r} ended but still holds a state")
