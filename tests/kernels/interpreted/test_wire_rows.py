"""Rows of 8 bits on the wire have the bits of torch's operators, in one launch each way."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from checkpoint import ScaledDType
from stage_worker.backends.tensor_views import BY_TORCH, RowScaling, sum_of_scales
from stage_worker.model.kernels import BY_TRITON, PLAIN
from stage_worker.model.triton_kernels import launch
from tests.kernels.interpreted.paged import random

pytestmark = pytest.mark.kernels

BY_KERNELS = RowScaling.of(BY_TRITON)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CASES = list(itertools.product(ScaledDType, DTYPES))


def rows(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes, with zeros and subnormal numbers."""
    hidden = random(num_rows, 2 * width)[:, :width]
    hidden = hidden * torch.logspace(-30, 4, max(num_rows, 1))[:num_rows, None]
    hidden[::3, 0] = 0.0
    hidden[1::5] = 0.0
    return hidden.to(dtype)


def test_kernels_are_chosen_with_those_of_a_stage() -> None:
    assert BY_KERNELS is not BY_TORCH
    assert RowScaling.of(PLAIN) is BY_TORCH
    assert RowScaling.of(replace(BY_TRITON, holds_stored=True)) == BY_KERNELS


@pytest.mark.parametrize(("scaled", "dtype"), CASES)
@pytest.mark.parametrize("size", [(1, 1), (1, 4096), (3, 5), (5, 1023), (17, 1025), (257, 40)])
def test_bits_are_those_of_torch(size: tuple[int, int], scaled: ScaledDType, dtype: torch.dtype) -> None:
    hidden = rows(*size, dtype)
    payload, expected = (one.scale(hidden, scaled) for one in (BY_KERNELS, BY_TORCH))
    assert torch.equal(payload, expected)
    found = BY_KERNELS.unscale(payload, scaled, size, dtype)
    assert found.dtype is dtype
    assert torch.equal(found, BY_TORCH.unscale(payload, scaled, size, dtype))


@pytest.mark.parametrize("scaled", ScaledDType)
def test_no_rows_are_no_bytes(scaled: ScaledDType) -> None:
    payload = BY_KERNELS.scale(random(0, 64), scaled)
    assert (payload.shape, payload.dtype) == ((0,), torch.uint8)
    assert BY_KERNELS.unscale(payload, scaled, (0, 64), torch.float32).shape == (0, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaled", ScaledDType)
def test_every_code_is_read_as_by_torch(scaled: ScaledDType, dtype: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8)
    payload = torch.cat((codes, torch.tensor([0.37]).view(torch.uint8)))
    found, expected = (one.unscale(payload, scaled, (1, 256), dtype) for one in (BY_KERNELS, BY_TORCH))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("scaled", "dtype"), CASES)
def test_scales_say_that_a_row_is_not_finite(scaled: ScaledDType, dtype: torch.dtype, bad: float) -> None:
    hidden = rows(4, 33, dtype)
    hidden[2, 7] = bad
    for scaling in (BY_KERNELS, BY_TORCH):
        payload = scaling.scale(hidden, scaled)
        back = scaling.unscale(payload, scaled, (4, 33), torch.float32)
        assert back.isfinite().all(dim=1).tolist() == [True, True, False, True]
        assert not bool(back[2].isfinite().any())
        assert not sum_of_scales(payload, 4 * 33).isfinite()


@pytest.mark.parametrize("scaled", ScaledDType)
def test_one_launch_each_way(scaled: ScaledDType, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    monkeypatch.setattr(launch.Launch, "__call__", lambda one, *_: launched.append(one.kernel.fn.__name__))
    payload = BY_KERNELS.scale(rows(3, 64, torch.float32), scaled)
    BY_KERNELS.unscale(payload, scaled, (3, 64), torch.float32)
    assert launched == ["scale_kernel", "unscale_kernel"]
