"""Memory of a step in which queries choose tokens, or blocks of them."""

from __future__ import annotations

from checkpoint import Attention, DType
from checkpoint.block_indexer import BlockIndexer
from checkpoint.step_sizes import (
    BLOCK_SCORES,
    CHOICE_PART,
    CHOICE_QUERIES,
    CHOICE_ROWS,
    CHOICE_SCORES,
    FEWEST_QUERIES,
    INDEX_ELEMENTS,
    KEY_SPLIT,
)
from coordinator.planner.plan import StepLimits


def group_elements(limits: StepLimits, longest: int, top_k: int) -> int:
    """Scores of a group of queries, and the choices of parts of two levels, of 4 bytes each.

    The longest sequence has `longest` tokens or blocks.
    """
    rows = min(CHOICE_ROWS, limits.max_step_tokens)
    of_row = longest + CHOICE_QUERIES  # rounded up
    scores = min(rows * of_row, max(CHOICE_SCORES, CHOICE_QUERIES * of_row))
    parts = -(-longest // CHOICE_PART)
    further = -(-parts * top_k // CHOICE_PART)
    return scores + rows * (parts + further) * top_k


def block_choice_bytes(
    mixer: Attention, indexer: BlockIndexer, dtype: DType, limits: StepLimits, longest: int, gathered: int
) -> int:
    """What kernels of a GPU need, for sequences of up to `longest` tokens that have `gathered` together.

    Keys of all blocks; and for a group scores, choices, copies of queries and outputs, and results of parts
    of keys.
    """
    size, top_blocks = indexer.block_size, indexer.top_blocks
    if longest // size <= top_blocks:
        return 0
    keys = (gathered // size + limits.max_step_sequences) * indexer.head_dim * dtype.size_bytes
    rows = min(CHOICE_ROWS, limits.max_step_tokens)
    choices = 4 * (group_elements(limits, longest // size, top_blocks) + rows * (top_blocks + 1))
    copies = 2 * rows * mixer.q_size * dtype.size_bytes
    parts = -(-(top_blocks * size + size - 1) // KEY_SPLIT)
    rows = min(rows, limits.max_step_sequences)
    partial = rows * parts * mixer.num_heads * (mixer.head_dim + 2) * 4 if parts > 1 else 0
    return keys + choices + copies + partial


def block_mask_bytes(indexer: BlockIndexer, dtype: DType, longest: int, gathered: int) -> int:
    """What torch's operators need: keys of `gathered` tokens and of blocks, with a float32 copy, scores of
    blocks, and masks of tokens.
    """
    if longest // indexer.block_size <= indexer.top_blocks:
        return 0
    keys = gathered * indexer.head_dim * (dtype.size_bytes + 4)
    of_blocks = 2 * keys // indexer.block_size
    pairs = max(gathered, BLOCK_SCORES, FEWEST_QUERIES * longest)
    scores = pairs // indexer.block_size
    return keys + of_blocks + (max(INDEX_ELEMENTS, scores) + 5 * scores) * 4 + pairs * (2 * 4 + 1)
