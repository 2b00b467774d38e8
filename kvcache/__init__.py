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
    OutOfStates,
    OutputLimitExceeded,
    SequenceHoldsBlocks,
    SequenceHoldsState,
    StateNotHeld,
    StateTaken,
    UnknownSequence,
)
from kvcache.groups import KvGroup, first_needed_block, group_windows, longest_hit
from kvcache.hashing import DEFAULT_SALT, block_hash, combined_digest, salt_of, sequence_hash
from kvcache.integrity import IntegrityMonitor, IntegrityReport
from kvcache.ledger import Announced, CachedBlock, Ledger
from kvcache.pool import BlockPool
from kvcache.sequence import ActiveSequence, KvWindow
from kvcache.state_ledger import SNAPSHOT_GRID_TOKENS, StateLedger
from kvcache.state_table import StateTable
from kvcache.states import (
    CopyState,
    FreeState,
    LiveState,
    SavedState,
    SlotChange,
    State,
    StatePool,
    StateSignal,
    TakeState,
)

__all__ = [
    "DEFAULT_SALT",
    "SNAPSHOT_GRID_TOKENS",
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
    "CopyState",
    "Deref",
    "Destroy",
    "Event",
    "FreeState",
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
    "LiveState",
    "NothingToPop",
    "OutOfBlocks",
    "OutOfStates",
    "OutputLimitExceeded",
    "PartialBlock",
    "Promote",
    "Removed",
    "SavedState",
    "SequenceHoldsBlocks",
    "SequenceHoldsState",
    "Signal",
    "SlotChange",
    "State",
    "StateLedger",
    "StateNotHeld",
    "StatePool",
    "StateSignal",
    "StateTable",
    "StateTaken",
    "Stored",
    "TakeState",
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
