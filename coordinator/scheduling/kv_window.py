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
        num_positions = max(1, self.num_tokens - 1) + self.max_step_tokens
        return (num_positions + block_size - 2) // block_size + 1
