"""Queries and keys of compressed attention are those of torch's operators: rotations bit by bit, norms to
1e-6 in float32; in 16 bits, less than 2 % of the elements are rounded otherwise.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from checkpoint import Norm, RopeConfig
from checkpoint.blueprint import NormKind
from stage_worker.model.norms import NormWeights, row_norm, unit_norm
from stage_worker.model.rope import RotaryTable, rotate_last_
from stage_worker.model.triton_kernels.last_rotation import norm_and_write, rotate_last
from tests.kernels.interpreted.paged import BLOCK, random

pytestmark = pytest.mark.kernels

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
EPS, HEADS, WIDTH = 1e-6, 11, 24
SLOTS = torch.tensor([5, 40, -1, 0, 16, 15, 31])


def rope_of(width: int, *, is_interleaved: bool) -> RopeConfig | None:
    return RopeConfig(width=width, is_interleaved=is_interleaved) if width else None


def table_of(width: int, dtype: torch.dtype) -> RotaryTable:
    angles = random(len(SLOTS), 1, max(width, 2) // 2, seed=3)
    cos, sin = (
        torch.cat((x, y), -1).to(dtype) for x, y in ((angles.cos(),) * 2, (-angles.sin(), angles.sin()))
    )
    return RotaryTable(cos=cos, sin=sin)


@pytest.mark.parametrize("is_back", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("width", "is_interleaved"), [(8, True), (8, False), (24, True), (0, False)])
def test_last_elements_are_rotated(
    width: int, is_interleaved: bool, dtype: torch.dtype, is_back: bool
) -> None:
    rope, table = rope_of(width, is_interleaved=is_interleaved), table_of(width, dtype)
    heads = random(len(SLOTS), HEADS, WIDTH, dtype=dtype)
    expected = heads.clone()
    if rope is not None:
        rotate_last_(expected, table, rope, is_back=is_back)
    rotate_last(heads, table.cos, table.sin, rope=rope, is_back=is_back)
    assert torch.equal(heads, expected)


def written(width: int, dtype: torch.dtype, pages: Tensor, scales: Tensor | None) -> Tensor:
    """Keys [n, head_dim] of torch's operators, whose queries are the kernel's, too; `pages` get the kernel's
    keys in SLOTS. Keys of other tokens follow the given ones.
    """
    rope, table = rope_of(width, is_interleaved=True), table_of(width, dtype)
    queries, keys = random(len(SLOTS), HEADS, WIDTH, dtype=dtype), random(9, WIDTH, dtype=dtype, seed=1)
    weight = random(WIDTH, seed=2).to(dtype).float()
    norm = row_norm(Norm(kind=NormKind.RMS_WIDE, eps=EPS), NormWeights(weight, None))
    expected, normed = unit_norm(EPS)(queries), norm(keys)[: len(SLOTS), None]
    for heads in (expected, normed):
        if rope is not None:
            rotate_last_(heads, table, rope)
    norm_and_write(
        *(queries, keys, table.cos, table.sin, SLOTS, pages),
        rope=rope,
        weight=weight,
        eps=EPS,
        page_scales=scales,
    )
    assert_few_differ(queries, expected)
    return normed[:, 0]


def assert_few_differ(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[found.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    if found.dtype is not torch.float32:
        assert float((found != expected).float().mean()) < 0.02, "other points of rounding"


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("width", [8, 24, 0])
def test_queries_and_keys_are_normed_and_rotated(width: int, dtype: torch.dtype) -> None:
    """A row without a slot is not written."""
    pages = torch.full((3, 1, 1, BLOCK, WIDTH), math.nan, dtype=dtype)
    keys = written(width, dtype, pages, None)
    flat, is_written = pages.view(-1, WIDTH), SLOTS >= 0
    assert_few_differ(flat[SLOTS[is_written]], keys[is_written])
    assert int(flat.isnan().any(1).sum()) == len(flat) - 6


@pytest.mark.parametrize("element", [torch.float8_e4m3fn, torch.int8])
def test_keys_of_8_bits_have_a_scale_for_each(element: torch.dtype) -> None:
    """To a quarter of the distance of two elements of the largest magnitude."""
    pages = torch.zeros((3, 1, 1, BLOCK, WIDTH), dtype=element)
    scales = torch.zeros(3, 1, 1, BLOCK)
    keys = written(8, torch.float32, pages, scales)
    found = pages.view(-1, WIDTH).float() * scales.view(-1, 1)
    is_written = SLOTS >= 0
    largest = 448.0 if element is torch.float8_e4m3fn else 127.0
    amax = keys.abs().amax(1)
    torch.testing.assert_close(scales.view(-1)[SLOTS[is_written]], amax[is_written] / largest)
    difference = (found[SLOTS[is_written]] - keys[is_written]).abs() / amax[is_written, None]
    assert float(difference.max()) < (0.036 if element is torch.float8_e4m3fn else 0.004)


@pytest.mark.parametrize("copied", [16, 1024])
def test_what_entries_are_pooled_of_is_copied(copied: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage_worker.model.triton_kernels.last_rotation._COPIED", copied)
    dtype, table, rope = torch.bfloat16, table_of(8, torch.bfloat16), rope_of(8, is_interleaved=True)
    pages = torch.zeros((3, 1, 1, BLOCK, WIDTH), dtype=dtype)
    pending, rows = random(9, 40, dtype=dtype), torch.full((3, BLOCK, 40), math.nan, dtype=dtype)
    queries, keys = random(len(SLOTS), HEADS, WIDTH, dtype=dtype), random(9, WIDTH, dtype=dtype, seed=1)
    norm_and_write(
        *(queries, keys, table.cos, table.sin, SLOTS, pages),
        rope=rope,
        weight=torch.ones(WIDTH),
        eps=EPS,
        pending=pending,
        pending_rows=rows,
    )
    flat, is_written = rows.view(-1, 40), SLOTS >= 0
    assert torch.equal(flat[SLOTS[is_written]], pending[: len(SLOTS)][is_written])
    assert int(flat.isnan().any(1).sum()) == len(flat) - 6
