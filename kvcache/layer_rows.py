"""Rows that some layers of a stage keep of their blocks beside the pages of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import torch
from torch import Tensor

from kvcache.state_store import zeros


class RowKind(Enum):
    """What the rows beside a page are."""

    PENDING = "what entries are pooled of, a row per token"
    ENTRY = "entries"
    ENTRY_KEY = "keys of entries for the indexer"


class LayerRows:
    """Rows of one kind, of layers by their numbers; each has a number of rows per block, and a width.

    They are in the run dtype, even where pages have 8 bits. A *slot* is block * rows per block + row.
    `num_spare` blocks after the others are for padding, as in the pages.
    """

    def __init__(
        self,
        shapes: Mapping[int, tuple[int, int]],
        *,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device | str,
        num_spare: int = 0,
    ) -> None:
        """Allocate zeroed rows; `shapes` has rows per block and width of each layer that has some."""
        if num_blocks < 1 or not shapes or min(map(min, shapes.values())) < 1:
            raise ValueError(f"blocks, rows and widths must be at least 1, got {num_blocks} and {shapes}")
        device = torch.device(device)
        self._blocks = {
            layer: zeros((num_blocks + num_spare, *shape), dtype, device) for layer, shape in shapes.items()
        }
        self._rows = {layer: blocks.view(-1, blocks.shape[2]) for layer, blocks in self._blocks.items()}

    @property
    def size_bytes(self) -> int:
        """Memory of all layers."""
        return sum(blocks.numel() * blocks.element_size() for blocks in self._blocks.values())

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have rows."""
        return tuple(self._blocks)

    def rows_per_block(self, layer: int) -> int:
        """Rows of one block in one layer."""
        return self._blocks[layer].shape[1]

    def blocks(self, layer: int) -> Tensor:
        """All rows of one layer, [num_blocks, rows per block, width]."""
        return self._blocks[layer]

    def write(self, layer: int, rows: Tensor, slots: Tensor) -> None:
        """Store `rows` [n, width] in `slots` int64 [n] of one layer."""
        self._rows[layer].index_copy_(0, slots, rows)

    def at(self, layer: int, slots: Tensor) -> Tensor:
        """Copies [..., width] of the rows in `slots` int64 [...] of one layer."""
        rows = self._rows[layer]
        return rows.index_select(0, slots.flatten()).view(*slots.shape, rows.shape[1])

    def gather(self, layer: int, pages: Tensor) -> Tensor:
        """Copies [b, p * rows per block, width] of the rows of one layer in `pages` int64 [b, p]."""
        blocks: Tensor = self._blocks[layer].index_select(0, pages.flatten())
        return blocks.view(len(pages), -1, blocks.shape[2])

    def clear(self, pages: Tensor) -> None:
        """Set whole blocks (int64 [n]) to zero in all layers."""
        self.fill(0.0, pages)

    def fill(self, value: float, pages: Tensor) -> None:
        """Set whole blocks (int64 [n]) to `value` in all layers."""
        for blocks in self._blocks.values():
            blocks.index_fill_(0, pages, value)


NO_ROWS: Mapping[RowKind, LayerRows] = {}
