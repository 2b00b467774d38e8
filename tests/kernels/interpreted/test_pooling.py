"""Pooled entries are those of torch's operators: to 1e-5 in float32; in 16 bits, less than 2 % of the
elements are rounded otherwise.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from checkpoint import Norm, RopeConfig
from checkpoint.blueprint import NormKind
from checkpoint.compressed import Compressor
from stage_worker.model.compressed_writes import EntryPool
from stage_worker.model.decode_rows import DecodeRows
from stage_worker.model.entry_layout import source_slots
from stage_worker.model.layer_weights import PoolingWeights
from stage_worker.model.norms import NormWeights, row_norm
from stage_worker.model.rope import RotaryTable, rotate_last_
from stage_worker.model.triton_kernels.pooling import Pooling, pool
from stage_worker.validation import SliceLayout
from tests.kernels.interpreted.paged import BLOCK, random

pytestmark = pytest.mark.kernels

SLICES = ((127, 1), (3, 1), (6, 1), (255, 1), (0, 9), (120, 14))
"""(position of the first query, number of queries); one-token slices come first."""
PLANS = {
    "overlap": Compressor(ratio=4, has_overlap=True),
    "alone": Compressor(ratio=128),
    "odd": Compressor(ratio=3),
}


def sources_of(plan: Compressor) -> tuple[Tensor, list[int], int]:
    """Slots of the tokens of each entry that ends, its first position, and the number of blocks."""
    counts = [-(-(first + count) // BLOCK) for first, count in SLICES]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
    layouts = [
        SliceLayout(first_position=first, num_tokens=count, pages=[order.pop() for _ in range(number)])
        for (first, count), number in zip(SLICES, counts, strict=True)
    ]
    singles = [item for item in layouts if item.num_tokens == 1]
    found = source_slots(DecodeRows.of(singles), layouts[len(singles) :], plan, BLOCK)
    ends = [
        position
        for first, count in SLICES
        for position in range(first, first + count)
        if (position + 1) % plan.ratio == 0
    ]
    assert len(ends) == len(found)
    return torch.from_numpy(found), [end + 1 - plan.ratio for end in ends], sum(counts)


class Given:
    """Rows of tokens, not numbers where no entry has a token, and weights of two poolings of them."""

    def __init__(self, plan: Compressor, width: int, dtype: torch.dtype, *, is_interleaved: bool) -> None:
        self.plan, self.dtype = plan, dtype
        self.rope = RopeConfig(width=8, is_interleaved=is_interleaved)
        self.sources, firsts, num_blocks = sources_of(plan)
        columns = width * (2 if plan.has_overlap else 1)
        self.pending = random(num_blocks, BLOCK, 2 * columns + 6, dtype=dtype)
        unused = np.setdiff1d(np.arange(num_blocks * BLOCK), self.sources.numpy())
        self.pending.view(-1, self.pending.shape[2])[unused] = math.nan
        self.pending[..., :6] = math.nan
        self.bias, self.weight = random(plan.ratio, columns, seed=1), random(width, seed=2).to(dtype).float()
        angles = torch.tensor(firsts)[:, None, None] * random(4, seed=3)
        self.cos, self.sin = (torch.cat((x, x), -1).to(dtype) for x in (angles.cos(), angles.sin()))

    def expected(self) -> Tensor:
        """Entries [c, width] of torch's operators."""
        norm = row_norm(Norm(kind=NormKind.RMS_WIDE, eps=1e-6), NormWeights(self.weight, None))
        pooled = EntryPool(self.plan, PoolingWeights(width=len(self.weight), bias=self.bias), norm)
        rows = self.pending.view(-1, self.pending.shape[2])[self.sources.clamp(min=0)][..., 6:]
        values, gates = rows.tensor_split(2, -1)
        entries = pooled(values, gates, (self.sources < 0)[..., None])[:, None]
        rotate_last_(entries, RotaryTable(cos=self.cos, sin=self.sin), self.rope)
        return entries[:, 0]

    def found(self, kept: Tensor | None) -> Tensor:
        """Entries [c, width] of the kernel, in any order of slots; other slots stay as they are."""
        pooling = Pooling(
            plan=self.plan, first=6, bias=self.bias, weight=self.weight, eps=1e-6, rope=self.rope
        )
        cos, sin = (x if kept is None else x[kept] for x in (self.cos, self.sin))
        slots = torch.randperm(2 * len(cos), generator=torch.Generator().manual_seed(4))[: len(cos)]
        rows = torch.full((len(cos), 2, len(self.weight)), math.nan, dtype=self.dtype)
        pool(pooling, self.pending, self.sources, kept, cos, sin, slots, rows)
        flat = rows.view(-1, len(self.weight))
        assert int(flat.isnan().any(1).sum()) == len(cos)
        return flat[slots]


TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_entries_are_those_of_torch(dtype: torch.dtype, plan: str, is_interleaved: bool) -> None:
    """Absent tokens before the first one and rows of other tokens are not read."""
    given = Given(PLANS[plan], 24, dtype, is_interleaved=is_interleaved)
    expected, found = given.expected(), given.found(None)
    assert len(expected) > 2
    torch.testing.assert_close(found, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    if dtype is not torch.float32:
        assert float((found != expected).float().mean()) < 0.02, "other points of rounding"


def test_only_kept_entries_are_written() -> None:
    """Into any slots; `sources` have others, too."""
    given = Given(PLANS["overlap"], 24, torch.float32, is_interleaved=True)
    kept = torch.tensor([1, 4, 5, 7])
    torch.testing.assert_close(given.found(kept), given.expected()[kept], rtol=0, atol=1e-5)


def test_tokens_of_several_tiles_make_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the first have no tokens in a sequence's first entry."""
    monkeypatch.setattr("stage_worker.model.triton_kernels.pooling._TILE_BYTES", 256)
    given = Given(PLANS["overlap"], 24, torch.float32, is_interleaved=True)
    assert (given.sources < 0).any()
    torch.testing.assert_close(given.found(None), given.expected(), rtol=0, atol=1e-5)


def test_a_token_that_is_not_a_number_makes_its_entries_so() -> None:
    given = Given(PLANS["overlap"], 24, torch.bfloat16, is_interleaved=True)
    given.pending.view(-1, given.pending.shape[2])[given.sources[5, -1], 6:] = math.nan
    pooling = Pooling(
        plan=given.plan, first=6, bias=given.bias, weight=given.weight, eps=1e-6, rope=given.rope
    )
    rows = torch.zeros(len(given.sources), 1, 24, dtype=torch.bfloat16)
    slots = torch.arange(len(rows))
    pool(pooling, given.pending, given.sources, None, given.cos, given.sin, slots, rows)
    assert torch.equal(rows[:, 0].isnan().any(1), given.expected().isnan().any(1))
    assert rows[5].isnan().all()
