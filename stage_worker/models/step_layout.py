"""Everything about a step that all layers share, computed once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from stage_worker.models.attention_views import (
    DecodeView,
    PrefillView,
    ViewRules,
    decode_views,
    prefill_view,
)
from stage_worker.models.kernels import Kernels
from stage_worker.models.rope import Rope
from stage_worker.slice_layout import SliceLayout


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KvWrites:
    """Which rows of the step's keys and values go to which slots (page * block_size + offset).

    `rows` int64 [w], or None for all rows in order; `slots` int64 [w]; `by_row` int64 [num_tokens] says the
    same for each row, -1 where it is not written; `highest_slot` is -1 where none is. `begun` int64 [c] are
    the pages that this step begins and does not fill, or None. They are zeroed first, because a reused page
    may hold the NaN of a failed sequence, which no mask can hide (0 * NaN is NaN).
    """

    rows: Tensor | None
    slots: Tensor
    by_row: Tensor
    highest_slot: int
    begun: Tensor | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionViews:
    """What the step's queries see through one window: `decodes` for the one-token slices (whatever their
    phase: one query is computed alike in both), `prefills` for the others, in the order of
    `StepLayout.prefill_rows`."""

    decodes: tuple[DecodeView, ...]
    prefills: tuple[PrefillView, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepLayout:
    """A step of `num_tokens` rows, the slices' tokens one after another, for a stage that computes by
    `kernels`.

    `cos` and `sin` are [num_tokens, 1, head_dim], see `Rope.cos_sin`. `prefill_rows` are the row ranges of
    the slices of several tokens. `views` has an entry for each distinct window of the stage's layers.
    """

    num_tokens: int
    kernels: Kernels
    cos: Tensor
    sin: Tensor
    writes: KvWrites
    prefill_rows: tuple[tuple[int, int], ...]
    views: Mapping[int | None, AttentionViews]

    @classmethod
    def build(
        cls,
        slices: Sequence[SliceLayout],
        *,
        windows: Collection[int | None],
        rope: Rope,
        rules: ViewRules,
        device: torch.device,
    ) -> StepLayout:
        """The layout of `slices`, whose rows follow each other in this order.

        `windows` are the stage's distinct windows. Raises ValueError when a slice's pages do not hold the
        positions it writes or sees, or when there is no slice.
        """
        if not slices:
            raise ValueError("a step layout needs at least one slice")
        for item in slices:
            for window in windows:
                item.check(rules.block_size, window)
        ranges = _row_ranges(slices)
        cos, sin = rope.cos_sin(
            [position for item in slices for position in range(item.first_position, item.end_position)]
        )
        singles = [item for item in slices if item.num_tokens == 1]
        single_rows = [begin for begin, end in ranges if end - begin == 1]
        longer = [item for item in slices if item.num_tokens > 1]

        def view(window: int | None) -> AttentionViews:
            decodes = decode_views(singles, single_rows, window, rules)
            prefills = [prefill_view(item, window, rules) for item in longer]
            if len(decodes) == 1 and not longer:
                decodes = [replace(decodes[0], rows=None)]
            return AttentionViews(
                decodes=tuple(view.to(device) for view in decodes),
                prefills=tuple(view.to(device) for view in prefills),
            )

        return cls(
            num_tokens=ranges[-1][1],
            kernels=rules.kernels,
            cos=cos,
            sin=sin,
            writes=_kv_writes(slices, ranges, rules.block_size, device),
            prefill_rows=tuple((begin, end) for begin, end in ranges if end - begin > 1),
            views={window: view(window) for window in windows},
        )


def _row_ranges(slices: Sequence[SliceLayout]) -> list[tuple[int, int]]:
    ranges, begin = [], 0
    for item in slices:
        ranges.append((begin, begin + item.num_tokens))
        begin += item.num_tokens
    return ranges


def _kv_writes(
    slices: Sequence[SliceLayout], ranges: Sequence[tuple[int, int]], block_size: int, device: torch.device
) -> KvWrites:
    rows: list[int] = []
    slots: list[int] = []
    begun: list[int] = []
    for item, (row_begin, _) in zip(slices, ranges, strict=True):
        for begin, end in item.written_runs():
            rows.extend(range(row_begin + begin - item.first_position, row_begin + end - item.first_position))
        for page, begin, end in item.written_blocks(block_size):
            base = page * block_size
            slots.extend(range(base + begin, base + end))
            if begin == 0 and end < block_size:
                begun.append(page)
    num_rows = ranges[-1][1]
    where = _indices(slots, device)
    if len(rows) == num_rows:
        every, by_row = None, where
    else:
        every = _indices(rows, device)
        by_row = torch.full((num_rows,), -1, device=device).index_copy_(0, every, where)
    return KvWrites(
        rows=every,
        slots=where,
        by_row=by_row,
        highest_slot=max(slots, default=-1),
        begun=_indices(begun, device) if begun else None,
    )


def _indices(values: list[int], device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(values, np.int64)).to(device)
