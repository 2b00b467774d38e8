"""What a model whose layers all have a sliding window needs of its KV cache. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvWindow:
    """Every query sees at most `num_tokens` positions, its own included; a step computes at most
    `max_step_tokens` of a sequence.
    """

    num_tokens: int
    max_step_tokens: int

    @classmethod
    def of(cls, layer_windows: Sequence[int | None], max_step_tokens: int) -> "KvWindow | None":
        """The widest of the layers' windows; None when one layer sees everything, so nothing is ever hidden.

        All layers: every stage frees the same blocks, also one whose own layers see less.
        """
        windows = [window for window in layer_windows if window is not None]
        if len(windows) < len(layer_windows) or not windows:
            return None
        return cls(max(windows), max_step_tokens)

    def first_visible(self, first_query: int) -> int:
        """The earliest position that a query at or after `first_query` sees."""
        return max(0, first_query - self.num_tokens + 1)

    def num_blocks(self, block_size: int) -> int:
        """The most blocks that a sequence holds while a step of it is computed.

        Its queries see num_tokens - 1 + max_step_tokens consecutive positions at most, which may begin with
        the last slot of a block. The block before the first query is held even if a window of one token hides
        it, for a sequence never releases the newest block that it has.
        """
        return self._num_blocks(block_size, self.max_step_tokens)

    def min_blocks(self, block_size: int) -> int:
        """The blocks without which a sequence of any length cannot be computed: a step takes one block of its
        prompt at least.
        """
        return self._num_blocks(block_size, min(block_size, self.max_step_tokens))

    def admission_blocks(self, block_size: int, num_blocks: int) -> int:
        """Blocks with which a sequence begins in a cache of `num_blocks`: enough for the longest step, but no
        more than half of the cache where fewer do. Longer steps are cut to the blocks that are left.
        """
        return max(self.min_blocks(block_size), min(self.num_blocks(block_size), num_blocks // 2))

    def _num_blocks(self, block_size: int, num_step_tokens: int) -> int:
        num_positions = max(1, self.num_tokens - 1) + num_step_tokens
        return (num_positions + block_size - 2) // block_size + 1
