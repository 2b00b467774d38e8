"""The phase of experts: bounds have the bytes of chosen experts, and matrices have numbers in every form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.gpu.phases.experts import LAYERS, chosen_rows, random_matrix
from bench.gpu.rates import Rates
from checkpoint.held import HeldPlan
from tests.kernels.held import unpacked


@pytest.mark.parametrize(
    ("name", "megabytes"),
    [("gpt-oss-120b, mxfp4", 13.2), ("DeepSeek V3, fp8", 44.1), ("Qwen3-30B-A3B, int4", 2.55)],
)
def test_an_expert_has_the_bytes_of_its_model(name: str, megabytes: float) -> None:
    layer = LAYERS[name]
    assert layer.read_bytes(1) == pytest.approx(megabytes * 1e6, rel=0.02)
    assert layer.read_bytes(3) == 3 * layer.read_bytes(1)


@pytest.mark.parametrize(
    ("num_tokens", "num_chosen", "limit"), [(8, 60, "bytes"), (512, 256, "bytes"), (8192, 256, "products")]
)
def test_bytes_bound_few_tokens_and_products_bound_many(num_tokens: int, num_chosen: int, limit: str) -> None:
    layer, rates = LAYERS["DeepSeek V3, fp8"], Rates(memory=3e12, products=7e14)
    of_products = 1e3 * num_tokens * 8 * 2 * 3 * 2048 * 7168 / rates.products
    expected = 1e3 * layer.read_bytes(num_chosen) / rates.memory if limit == "bytes" else of_products
    assert layer.bound_ms(rates, num_tokens, num_chosen) == pytest.approx(expected)


@pytest.mark.parametrize("name", LAYERS)
def test_tokens_choose_different_experts(name: str) -> None:
    layer = LAYERS[name]
    counts = chosen_rows(9, layer, torch.Generator().manual_seed(1))
    assert int(counts.sum()) == 9 * layer.per_token
    assert int(counts.max()) <= 9
    assert len(counts) == layer.up.experts


@pytest.mark.parametrize("name", LAYERS)
def test_random_weights_are_numbers(name: str) -> None:
    plan: HeldPlan = LAYERS[name].up
    small = replace(plan, rows=plan.experts * 128, columns=256)
    assert unpacked(random_matrix(small, torch.Generator().manual_seed(1))).isfinite().all()
