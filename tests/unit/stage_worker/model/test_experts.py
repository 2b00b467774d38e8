"""Choice of experts; products by the grouped kernel of GPUs and by one product per expert are the same."""

from __future__ import annotations

import pytest
import torch

from checkpoint.blueprint import GroupScore, Router, RouterScore
from stage_worker.model.experts import choose, grouped_products, rows_of_each, separate_products
from tests.fake_cuda import DEVICE, fake_cuda

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


@pytest.mark.parametrize(("group_score", "kept"), [(GroupScore.BEST_TWO, [2, 3]), (GroupScore.BEST, [0, 1])])
def test_groups_are_kept_by_their_score(group_score: GroupScore, kept: list[int]) -> None:
    """Group 0 has one good expert, group 1 has two fair ones, group 2 has none."""
    logits = torch.tensor([[2.0, -3.0, 1.5, 1.4, -1.0, -1.0]])
    router = Router(
        score=RouterScore.SIGMOID, num_groups=3, num_kept_groups=1, group_score=group_score, scaling=2.0
    )
    two = choose(logits, router, 2, None)
    assert two.experts.tolist() == [kept]
    assert float(two.weights.sum()) == pytest.approx(2.0)
    wide = Router(score=RouterScore.SIGMOID, num_groups=3, num_kept_groups=2, group_score=group_score)
    assert choose(logits, wide, 2, None).experts.tolist() == [[0, 2]]


def test_a_choice_bias_chooses_but_does_not_weigh() -> None:
    logits = torch.tensor([[1.0, 0.5, 0.0, -0.5]])
    router = Router(score=RouterScore.SIGMOID, num_groups=2, num_kept_groups=1, is_normalised=False)
    choice = choose(logits, router, 1, torch.tensor([0.0, 0.0, 0.0, 3.0]))
    assert choice.experts.tolist() == [[3]]
    torch.testing.assert_close(choice.weights, torch.tensor([[-0.5]]).sigmoid())


@pytest.mark.parametrize("num_rows", [0, 1, 500])
def test_rows_of_each_expert_are_counted(num_rows: int) -> None:
    chosen = torch.randint(0, 7, (num_rows,), generator=torch.Generator().manual_seed(num_rows))
    assert torch.equal(rows_of_each(chosen, 9), torch.bincount(chosen, minlength=9))


def test_counting_rows_does_not_wait_for_a_gpu() -> None:
    with fake_cuda():
        counts = rows_of_each(torch.empty(40, dtype=torch.int64, device=DEVICE), 9)
        assert (counts.shape, counts.device) == ((9,), DEVICE)
