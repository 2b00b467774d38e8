"""Parts of recurrent states that programs of kernels keep in registers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton

from stage_worker.model.state_rows import SEQUENCE_FIELDS, StateRows
from stage_worker.model.triton_kernels.launch import Launch, padded

_TILE = {False: (32, 4), True: (8, 1)}
"""Columns of a state that one program has, and its warps: decodes read and write states as fast as memory
does, and longer slices wait for sums over the rows, which are fastest within one warp.
"""
_LARGE_TILE = {False: (32, 8), True: (4, 1)}
"""Of states of more than `_MOST_ROWS` rows, and in decodes, of those with a decay for each row, which spill
with `_TILE`.
"""
_MOST_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTiles:
    """`per_head` tiles of `columns` columns of a head's state, all its rows, for `num_warps` each."""

    columns: int
    per_head: int
    num_warps: int

    @classmethod
    def of(cls, rows: StateRows, height: int, width: int, *, has_row_decays: bool = False) -> StateTiles:
        """Tiles of states of `height` rows, each with a decay if `has_row_decays`, and `width` columns."""
        is_large = height > _MOST_ROWS or (has_row_decays and not rows.has_longer)
        most, num_warps = (_LARGE_TILE if is_large else _TILE)[rows.has_longer]
        columns = min(most, padded(width))
        return cls(columns=columns, per_head=triton.cdiv(width, columns), num_warps=num_warps)

    def launch(self, kernel: Any, num_heads: int, constants: Mapping[str, Any], num_sequences: int) -> Launch:
        """A kernel of a program for each sequence, head and tile: grid [sequences, HEADS * TILES]."""
        own = {"HEADS": num_heads, "VALUES": self.columns, "TILES": self.per_head, "FIELDS": SEQUENCE_FIELDS}
        return Launch(
            kernel, (num_sequences, num_heads * self.per_head), {**constants, **own}, self.num_warps
        )
