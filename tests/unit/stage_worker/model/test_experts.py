"""Choice of experts; products by the grouped kernel of GPUs and by one product per expert are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint import Checkpoint
from checkpoint.blueprint import GroupScore, Router, RouterScore
from stage_worker.model.experts import choose, grouped_products, rows_of_each, separate_products
from tests.fake_cuda import DEVICE, fake_cuda
from tests.families import make_family
from tests.unit.stage_worker.model.pipeline import Pipeline
from tests.unit.stage_worker.model.test_parity import compute_in_chunks, random_sequences

COUNTS = [[3, 0, 5, 1], [0, 0, 0, 9], [9, 0, 0, 0], [2, 2, 2, 3]]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["f32", "bf16"]
)
def test_grouped_products_equal_separate_ones(
    dtype: torch.dtype, tolerance: float, counts: list[int], has_bias: bool
) -> None:
    """torch computes grouped products on the CPU, too; experts without rows are first, last and between."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(counts), 32, generator=generator).to(dtype)
    matrices = torch.randn(len(counts), 48, 32, generator=generator).to(dtype)
    biases = torch.randn(len(counts), 48, generator=generator).to(dtype) if has_bias else None
    numbers = torch.tensor(counts)
    experts = torch.repeat_interleave(torch.arange(len(counts)), numbers)
    exact = torch.einsum("ni,noi->no", x.double(), matrices.double()[experts])
    exact = exact if biases is None else exact + biases.double()[experts]
    for products in (grouped_products, separate_products):
        found = products(x, numbers, matrices, biases)
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


def test_experts_of_one_tensor_equal_those_of_a_tensor_each(tmp_path: Path) -> None:
    """Published checkpoints have them in one, transformers writes a tensor each."""
    found = []
    for name in ("separate", "stacked"):
        directory = make_family(tmp_path / name, "qwen3_5_moe_text")
        if name == "stacked":
            stack_experts(directory)
        pipeline = Pipeline(Checkpoint.open(directory), cuts=(3,))
        found += compute_in_chunks(pipeline, random_sequences([33]), [16])
    separate, stacked = found
    assert torch.equal(separate, stacked)


def stack_experts(directory: Path) -> None:
    """Rewrite all experts of a layer as two tensors: gates above ups, and downs."""
    tensors = load_file(directory / "model.safetensors")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    for prefix in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        of_layer = f"{prefix}.experts"
        count = len([name for name in tensors if name.startswith(of_layer)]) // 3
        for module, names in parts.items():
            rows = [
                torch.cat([tensors.pop(f"{of_layer}.{expert}.{name}.weight") for name in names])
                for expert in range(count)
            ]
            tensors[f"{of_layer}.{module}"] = torch.stack(rows)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
