"""Residual streams equal transformers' modules, whose numbers of streams, scales and epsilons are unusual."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
)
from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection, HYV4HyperHead

from checkpoint.streams import HyperConnection, WeightedCollapse
from stage_worker.model.hyper_connections import (
    WriteWeights,
    collapse_of,
    connection_of,
    doubly_stochastic,
    spread,
    written,
)

HIDDEN_SIZE, NUM_STREAMS, NUM_TOKENS = 24, 3, 7
CONFIG = SimpleNamespace(
    hc_mult=NUM_STREAMS,
    hidden_size=HIDDEN_SIZE,
    hc_sinkhorn_iters=4,
    hc_eps=0.03,
    hc_magnitude=1.7,
    rms_norm_eps=0.2,
)
HY_V4 = HyperConnection(num_streams=NUM_STREAMS, norm_eps=0.2, gate_eps=0.03, magnitude=1.7, write_eps=0.03)
DEEPSEEK_V4 = HyperConnection(num_streams=NUM_STREAMS, norm_eps=0.2, gate_eps=0.03, mixing_rounds=4)
COLLAPSE = WeightedCollapse(num_streams=NUM_STREAMS, norm_eps=0.2, gate_eps=0.03)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(3)
    with torch.inference_mode():
        yield


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    """`module` with weights that tell streams and groups apart."""
    for name, parameter in module.named_parameters():
        spread_of = 0.3 if name.endswith("fn") else 1.0
        parameter.data = torch.randn(parameter.shape) * spread_of
    return module


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("hc_"): value.data for name, value in module.named_parameters()}


def streams() -> torch.Tensor:
    """[1, n, streams, hidden_size], of unequal sizes."""
    return torch.randn(1, NUM_TOKENS, NUM_STREAMS, HIDDEN_SIZE) * torch.tensor([0.2, 1.0, 3.0])[:, None]


def of_hy_v4(module: torch.nn.Module, x: torch.Tensor, result: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The input of a sub-layer, and the new streams, of transformers' decoder layer."""
    post, row = module(x)
    return row, post.float().unsqueeze(-1) * result.float().unsqueeze(-2) + x.float()


def of_deepseek_v4(
    module: torch.nn.Module, x: torch.Tensor, result: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    post, comb, row = module(x)
    return row, post.unsqueeze(-1) * result.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), x)


FAMILIES = {
    "hy_v4": (HYV4HyperConnection, HYV4HyperHead, HY_V4, of_hy_v4),
    "deepseek_v4": (DeepseekV4HyperConnection, DeepseekV4HyperHead, DEEPSEEK_V4, of_deepseek_v4),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sub_layer_reads_and_writes_streams_like_transformers(family: str) -> None:
    module_type, _, plan, layer = FAMILIES[family]
    module, x = randomised(module_type(CONFIG)), streams()
    result = torch.randn(1, NUM_TOKENS, HIDDEN_SIZE)
    expected_row, expected = layer(module, x, result)
    flat = x[0].flatten(1)
    row, weights = connection_of(plan, tensors_of(module))(flat)
    torch.testing.assert_close(row, expected_row[0], rtol=1e-5, atol=1e-6)
    found = written(flat, result[0], weights)
    torch.testing.assert_close(found, expected[0].flatten(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_streams_collapse_like_in_transformers(family: str) -> None:
    _, head_type, _, _ = FAMILIES[family]
    head, x = randomised(head_type(CONFIG)), streams()
    found = collapse_of(COLLAPSE, tensors_of(head))(x[0].flatten(1))
    torch.testing.assert_close(found, head(x)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"norm_eps": 0.4},
        {"gate_eps": 0.06},
        {"magnitude": 2.0},
        {"write_eps": 0.0},
        {"mixing_rounds": 3},
    ],
)
def test_every_field_of_a_connection_changes_its_streams(change: dict[str, float]) -> None:
    base = replace(HY_V4, mixing_rounds=2)
    tensors = tensors_of(randomised(DeepseekV4HyperConnection(CONFIG)))
    flat, result = streams()[0].flatten(1), torch.randn(NUM_TOKENS, HIDDEN_SIZE)
    before, after = (
        written(flat, result, connection_of(plan, tensors)(flat)[1])
        for plan in (base, replace(base, **change))
    )
    assert (before - after).abs().max() > 1e-3 * before.std()


def test_tensors_have_the_shapes_of_transformers() -> None:
    for module_type, head_type, plan, _ in FAMILIES.values():
        for module, described in ((module_type(CONFIG), plan), (head_type(CONFIG), COLLAPSE)):
            found = {kind: tuple(tensor.shape) for kind, tensor in tensors_of(module).items()}
            assert found == described.shapes(HIDDEN_SIZE)


def test_mixing_weights_sum_to_one_by_rows_and_columns() -> None:
    found = doubly_stochastic(torch.randn(5, 4, 4), 1e-6, 20)
    ones = torch.ones(5, 4)
    torch.testing.assert_close(found.sum(1), ones, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.sum(2), ones, rtol=0, atol=1e-4)


def test_bfloat16_streams_are_summed_in_float32() -> None:
    """Weights in bfloat16 would be wrong by 2^-9 of a stream; the sum is rounded once."""
    flat = torch.randn(NUM_TOKENS, NUM_STREAMS * HIDDEN_SIZE).to(torch.bfloat16)
    result = torch.randn(NUM_TOKENS, HIDDEN_SIZE).to(torch.bfloat16)
    weights = WriteWeights(torch.rand(NUM_TOKENS, NUM_STREAMS), torch.rand(NUM_TOKENS, 3, 3))
    found, exact = written(flat, result, weights), written(flat.double().float(), result.float(), weights)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found, exact.to(torch.bfloat16), rtol=0, atol=0)


def test_all_streams_begin_as_the_embedding() -> None:
    hidden = torch.randn(2, 5)
    assert torch.equal(spread(hidden, 3).view(2, 3, 5), hidden[:, None].expand(-1, 3, -1))
