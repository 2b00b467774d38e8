"""Where one slice of a step lies: its absolute positions, and the pages that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class SliceLayout:
    """One sequence's part of a step. Not modified once it is made; declaring it frozen would make it slow.

    Positions are absolute, counted from the sequence's first token. `pages[i]` is the physical page of block
    `first_block + i`; `first_block` is above 0 when a sliding window released the head of the sequence. The
    KV slots of the positions below `num_valid` are valid already and are not written again, nor are those
    outside `writable_runs`: (begin, end) positions in order, None for everything that the slice computes.
    """

    first_position: int
    num_tokens: int
    pages: Sequence[int]
    first_block: int = 0
    num_valid: int = 0
    writable_runs: Sequence[tuple[int, int]] | None = None

    @property
    def end_position(self) -> int:
        """One past the last position computed."""
        return self.first_position + self.num_tokens

    def first_visible(self, window: int | None) -> int:
        """The earliest position that any of the slice's queries sees through `window`."""
        return 0 if window is None else max(0, self.first_position - window + 1)

    def check(self, block_size: int, window: int | None) -> None:
        """Raise ValueError, with the numbers, unless the pages hold all positions that the slice needs."""
        if self.num_tokens < 1 or self.first_position < 0 or self.first_block < 0:
            raise ValueError(f"a slice of {self.num_tokens} tokens at {self.first_position} is impossible")
        held_end = (self.first_block + len(self.pages)) * block_size
        if self.end_position > held_end:
            raise ValueError(f"pages hold positions below {held_end}, the slice ends at {self.end_position}")
        held_begin = self.first_block * block_size
        if self.first_visible(window) < held_begin:
            raise ValueError(
                f"pages hold positions from {held_begin}, the slice at {self.first_position} sees"
                f" {self.first_visible(window)} with window {window}"
            )

    def visible_pages(self, block_size: int, window: int | None) -> tuple[int, Sequence[int]]:
        """The first block that a query sees, and the pages from there to the slice's last position."""
        first = self.first_visible(window) // block_size
        end = (self.end_position - 1) // block_size + 1
        return first, self.pages[first - self.first_block : end - self.first_block]

    def written_runs(self) -> Iterator[tuple[int, int]]:
        """The positions that this slice writes, as (begin, end) pairs in order."""
        runs = (
            ((self.first_position, self.end_position),) if self.writable_runs is None else self.writable_runs
        )
        for begin, end in runs:
            if max(begin, self.num_valid) < end:
                yield max(begin, self.num_valid), end

    def written_blocks(self, block_size: int) -> Iterator[tuple[int, int, int]]:
        """(page, begin, end) of every block this slice writes: offsets [begin, end) within the page."""
        for position, run_end in self.written_runs():
            while position < run_end:
                block, begin = divmod(position, block_size)
                end = min(block_size, run_end - block * block_size)
                yield self.pages[block - self.first_block], begin, end
                position = (block + 1) * block_size
