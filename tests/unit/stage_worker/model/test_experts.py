"""Products of experts: the grouped kernel of GPUs and one product per expert give the same rows."""

from __future__ import annotations

import pytest
import torch

from stage_worker.model.experts import grouped_products, separate_products

COUNTS = [[3, 0, 5, 1], [0, 0, 0, 9], [9, 0, 0, 0], [2, 2, 2, 3]]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["f32", "bf16"]
)
def test_grouped_products_equal_separate_ones(
    dtype: torch.dtype, tolerance: float, counts: list[int]
) -> None:
    """torch computes grouped products on the CPU, too; experts without rows are first, last and between."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(counts), 32, generator=generator).to(dtype)
    matrices = torch.randn(len(counts), 48, 32, generator=generator).to(dtype)
    numbers = torch.tensor(counts)
    experts = torch.repeat_interleave(torch.arange(len(counts)), numbers)
    exact = torch.einsum("ni,noi->no", x.double(), matrices.double()[experts])
    for products in (grouped_products, separate_products):
        found = products(x, matrices, numbers)
        assert found.dtype is dtype
        error = (found.double() - exact).abs().max() / exact.std()
        assert error < tolerance
