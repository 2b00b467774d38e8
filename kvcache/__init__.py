"""KV cache accounting: blocks, sequences, signals, and the pools that apply them.

Pure Python and deterministic; only `kvcache.pages`, which is not imported here, uses torch.
"""

from kvcache.block_table import BlockTable, BlockTables
from kvcache.blocks import (
    Block,
    Deref,
    Destroy,
    Event,
    FullBlock,
    Grow,
    PartialBlock,
    Promote,
    Removed,
    Signal,
    Stored,
    Use,
)
from kvcache.errors import (
    BlockNotActive,
    BlockNotHeld,
    BlockShared,
    HashCollision,
    IntegrityBroken,
    InvalidSignal,
    KvCacheError,
    NothingToPop,
    OutOfBlocks,
    OutputLimitExceeded,
    SequenceHoldsBlocks,
    UnknownSequence,
)
from kvcache.groups import KvGroup, first_needed_block, group_windows, longest_hit
from kvcache.hashing import DEFAULT_SALT, block_hash, combined_digest, salt_of, sequence_hash
from kvcache.integrity import IntegrityMonitor, IntegrityReport
from kvcache.ledger import Announced, CachedBlock, Ledger
from kvcache.pool import BlockPool
from kvcache.sequence import ActiveSequence, KvWindow

__all__ = [
    "DEFAULT_SALT",
    "ActiveSequence",
    "Announced",
    "Block",
    "BlockNotActive",
    "BlockNotHeld",
    "BlockPool",
    "BlockShared",
    "BlockTable",
    "BlockTables",
    "CachedBlock",
    "Deref",
    "Destroy",
    "Event",
    "FullBlock",
    "Grow",
    "HashCollision",
    "IntegrityBroken",
    "IntegrityMonitor",
    "IntegrityReport",
    "InvalidSignal",
    "KvCacheError",
    "KvGroup",
    "KvWindow",
    "Ledger",
    "NothingToPop",
    "OutOfBlocks",
    "OutputLimitExceeded",
    "PartialBlock",
    "Promote",
    "Removed",
    "SequenceHoldsBlocks",
    "Signal",
    "Stored",
    "UnknownSequence",
    "Use",
    "block_hash",
    "combined_digest",
    "first_needed_block",
    "group_windows",
    "longest_hit",
    "salt_of",
    "sequence_hash",
]
