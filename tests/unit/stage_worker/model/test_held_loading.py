"""Matrices that stay as a checkpoint stores them have its weights bit by bit, and the planned size."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from checkpoint import Attention, Checkpoint, DType, held_expert_bytes, layer_sizes
from checkpoint.held import HeldBytes, held_plans
from checkpoint.names import EXPERT_ROLES, TensorRole
from checkpoint.quantization import Quantization
from stage_worker.model.held_matrices import HeldMatrix, NibbleMatrix
from stage_worker.model.layer_weights import (
    AttentionWeights,
    DenseWeights,
    ExpertsWeights,
    LayerWeights,
    allocate_layer,
)
from stage_worker.model.row_orders import reorder_heads
from stage_worker.model.weights import load_tensors
from tests.kernels.held import unpacked
from tests.quantized import (
    CONFIG,
    EIGHT_EXPERTS,
    FORMATS,
    LATENT_CONFIG,
    MOE_CONFIG,
    QuantizedFormat,
    Written,
    gptq,
    write_quantized,
)

HELD = {
    "fp8-block-bf16",
    "fp8-block-e8m0",
    "fp8-tensor",
    "fp8-tensor-vllm",
    "float-channel",
    "float-tensor",
    "float-block",
    "int-channel",
    "pack4-group",
    "pack4-group-asymmetric",
    "pack4-actorder",
    "pack4-channel",
    "modelopt-fp8",
    "nvfp4",
    "modelopt-nvfp4",
    "mxfp4-compressed",
    "mxfp4",
    "gptq",
    "gptq-whole-rows",
    "gptq-v2",
    "gptq-without-index",
    "awq",
}
"""Of `FORMATS`; those of other groups, bits and values are unpacked."""


def loaded(
    directory: Path, form: QuantizedFormat, layer: int, config: Mapping[str, Any] = CONFIG
) -> tuple[Checkpoint, LayerWeights, dict[str, np.ndarray[Any, Any]]]:
    weights = write_quantized(directory, form, seed=5, config=config)
    checkpoint = Checkpoint.open(directory).with_stored(holds_stored=True)
    new = lambda *shape: torch.empty(shape, dtype=torch.float32)  # noqa: E731
    layer_weights, destinations = allocate_layer(checkpoint.config, layer, new)
    load_tensors(checkpoint, destinations, window_bytes=2 * 128 * 40)
    return checkpoint, layer_weights, weights


def stacked(weights: Mapping[str, np.ndarray[Any, Any]], layer: int, *modules: str) -> Tensor:
    parts = [weights[f"model.layers.{layer}.{module}_proj.weight"] for module in modules]
    return torch.from_numpy(np.concatenate(parts))


def matrices(weights: LayerWeights) -> dict[tuple[str, ...], Any]:
    """By modules of layers of `CONFIG`."""
    assert isinstance(weights.mixer, AttentionWeights)
    assert isinstance(weights.feed_forward, DenseWeights)
    return {
        ("self_attn.q", "self_attn.k", "self_attn.v"): weights.mixer.qkv,
        ("self_attn.o",): weights.o,
        ("mlp.gate", "mlp.up"): weights.feed_forward.up,
        ("mlp.down",): weights.feed_forward.down,
    }


@pytest.mark.matrix(24)
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_those_of_the_files(form: str, layer: int, tmp_path: Path) -> None:
    _, weights, expected = loaded(tmp_path, FORMATS[form], layer)
    for modules, matrix in matrices(weights).items():
        is_held = not isinstance(matrix, Tensor)
        plain = FORMATS[form].plain
        is_plain = modules[0].split(".")[0] in plain
        is_mixed = layer == 1 and "mlp.up" in modules and any("up_proj" in name for name in plain)
        assert is_held == (form in HELD and not is_mixed and not is_plain), modules
        found = unpacked(matrix) if is_held else matrix
        assert torch.equal(found, stacked(expected, layer, *modules)), modules


def size_of(matrix: HeldMatrix) -> int:
    parts: list[Tensor | None] = [matrix.codes, matrix.scales]
    if isinstance(matrix, NibbleMatrix):
        parts += [matrix.zeros, matrix.offsets, matrix.order]
    return sum(part.numel() * part.element_size() for part in parts if part is not None)


@pytest.mark.parametrize("form", sorted(HELD))
def test_plans_count_what_is_in_memory(form: str, tmp_path: Path) -> None:
    checkpoint, weights, _ = loaded(tmp_path, FORMATS[form], 0)
    plans = held_plans(checkpoint.config, 0)
    held = [matrix for matrix in matrices(weights).values() if not isinstance(matrix, Tensor)]
    attention = [] if FORMATS[form].plain == ("self_attn",) else [TensorRole.Q, TensorRole.O]
    assert list(plans) == [*attention, TensorRole.GATE, TensorRole.DOWN]
    for plan, matrix in zip(plans.values(), held, strict=True):
        missing = 0
        if isinstance(matrix, NibbleMatrix) and plan.has_order and matrix.order is None:
            missing = 4 * plan.columns
        assert plan.num_bytes == size_of(matrix) + missing
    plain = checkpoint.with_stored(holds_stored=False).config
    saved = sum(2 * plan.rows * plan.columns - plan.num_bytes for plan in plans.values())
    sizes = [layer_sizes(config, DType.BF16) for config in (plain, checkpoint.config)]
    assert sizes[0][0] - sizes[1][0] == saved > 0


def test_experts_and_shared_ones_are_held(tmp_path: Path) -> None:
    checkpoint, _, _ = loaded(tmp_path, FORMATS["fp8-block-bf16"], 1, LATENT_CONFIG)
    assert set(held_plans(checkpoint.config, 1)) == {
        *(TensorRole.Q_DOWN, TensorRole.Q_UP, TensorRole.KV_DOWN, TensorRole.O),
        *(TensorRole.SHARED_GATE, TensorRole.SHARED_DOWN, TensorRole.EXPERT_GATE, TensorRole.EXPERT_DOWN),
    }


def experts_of(weights: LayerWeights) -> dict[tuple[str, ...], Tensor | HeldMatrix]:
    assert isinstance(weights.feed_forward, ExpertsWeights)
    return {("gate", "up"): weights.feed_forward.up, ("down",): weights.feed_forward.down}


def ordered_by_expert(rng: np.random.Generator, name: str, rows: int, columns: int) -> Written:
    """Every expert has another order of groups, the same for its gate and up."""
    if (expert := re.search(r"experts\.(\d+)", name)) is None:
        return gptq(4, 32)(rng, name, rows, columns)
    return gptq(4, 32, shares_order=False)(np.random.default_rng(int(expert[1])), name, rows, columns)


def second_out_of_order(rng: np.random.Generator, name: str, rows: int, columns: int) -> Written:
    has_order = "experts.1." in name
    return gptq(4, 32, has_order=has_order)(rng, name, rows, columns)


EXPERT_FORMS = FORMATS | {
    "gptq-by-expert": replace(FORMATS["gptq"], write=ordered_by_expert),
    "gptq-one-expert": replace(FORMATS["gptq"], write=second_out_of_order),
}


@pytest.mark.matrix(12)
@pytest.mark.parametrize("form", EXPERT_FORMS)
def test_weights_of_experts_are_those_of_the_files(form: str, tmp_path: Path) -> None:
    checkpoint, weights, expected = loaded(tmp_path, EXPERT_FORMS[form], 1, EIGHT_EXPERTS)
    plans = held_plans(checkpoint.config, 1)
    for (modules, matrix), role in zip(
        experts_of(weights).items(), (TensorRole.EXPERT_GATE, TensorRole.EXPERT_DOWN), strict=True
    ):
        is_held = form.removesuffix("-by-expert").removesuffix("-one-expert") in HELD
        assert is_held == (role in plans) == (not isinstance(matrix, Tensor))
        found = matrix.flatten(0, 1) if isinstance(matrix, Tensor) else unpacked(matrix)
        parts = [
            stacked(expected, 1, *(f"mlp.experts.{expert}.{part}" for part in modules)) for expert in range(8)
        ]
        assert torch.equal(found, torch.cat(parts))
        if not isinstance(matrix, Tensor):
            missing = 0
            if isinstance(matrix, NibbleMatrix) and matrix.plan.has_order and matrix.order is None:
                missing = 4 * 8 * matrix.plan.columns
            assert plans[role].num_bytes == size_of(matrix) + missing


def test_a_format_that_one_expert_lacks_is_unpacked(tmp_path: Path) -> None:
    write_quantized(tmp_path, FORMATS["float-channel"], config=MOE_CONFIG)
    config = Checkpoint.open(tmp_path).with_stored(holds_stored=True).config
    assert isinstance(config.quantization, Quantization)
    plain = replace(config.quantization, ignore=(*config.quantization.ignore, "re:.*experts.2.up_proj"))
    roles = {role for role in held_plans(replace(config, quantization=plain), 1) if role in EXPERT_ROLES}
    assert roles == {TensorRole.EXPERT_DOWN}


def test_a_decode_step_reads_the_bytes_of_held_experts(tmp_path: Path) -> None:
    checkpoint, _, _ = loaded(tmp_path, FORMATS["pack4-group"], 1, MOE_CONFIG)
    plans = held_plans(checkpoint.config, 1)
    held = held_expert_bytes(checkpoint.config, 1, DType.BF16)
    assert held == sum(plan.num_bytes for role, plan in plans.items() if role in EXPERT_ROLES)
    plain = checkpoint.with_stored(holds_stored=False).config
    assert held_expert_bytes(plain, 1, DType.BF16) == 2 * 4 * 3 * 64 * 128


def test_nothing_is_held_unless_the_plan_says_so(tmp_path: Path) -> None:
    write_quantized(tmp_path, FORMATS["gptq"])
    assert held_plans(Checkpoint.open(tmp_path).config, 0) == {}


def test_blocks_keep_their_grid_where_rows_stay_in_order(tmp_path: Path) -> None:
    checkpoint, _, _ = loaded(tmp_path, FORMATS["fp8-block-e8m0"], 0)
    plans = held_plans(checkpoint.config, 0)
    heights = {role: plan.height for role, plan in plans.items() if isinstance(plan, HeldBytes)}
    assert heights == {TensorRole.Q: 1, TensorRole.O: 32, TensorRole.GATE: 32, TensorRole.DOWN: 32}


@pytest.mark.parametrize("form", ["gptq", "awq", "float-channel", "fp8-block-e8m0"])
def test_heads_are_reordered_as_those_of_unpacked_weights(form: str, tmp_path: Path) -> None:
    checkpoint, held, _ = loaded(tmp_path, FORMATS[form], 0)
    mixer = checkpoint.config.layers[0].mixer
    assert isinstance(mixer, Attention)
    assert mixer.rope is not None
    mixer = replace(mixer, rope=replace(mixer.rope, is_interleaved=True))
    plain = checkpoint.with_stored(holds_stored=False)
    expected, destinations = allocate_layer(plain.config, 0, torch.empty)
    load_tensors(plain, destinations)
    before = matrices(expected)["self_attn.q", "self_attn.k", "self_attn.v"].clone()
    for weights in (held, expected):
        reorder_heads(mixer, weights)
    found, needed = (matrices(one)["self_attn.q", "self_attn.k", "self_attn.v"] for one in (held, expected))
    assert torch.equal(unpacked(found), needed)
    assert not torch.equal(needed, before)


def test_columns_in_several_orders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"another order of groups than .*: start workers with --kernels plain"
    ):
        loaded(tmp_path, replace(FORMATS["gptq"], write=gptq(4, 32, shares_order=False)), 0)


@pytest.mark.parametrize(
    ("form", "part", "problem"),
    [
        ("float-channel", "weight", "weights that are not numbers"),
        ("nvfp4", "weight_scale", "scales that are not numbers"),
        ("mxfp4-compressed", "weight_scale", "scales that are not numbers"),
    ],
)
def test_weights_that_are_not_numbers_are_refused(form: str, part: str, problem: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, FORMATS[form], seed=5)
    file = tmp_path / "model.safetensors"
    checkpoint = Checkpoint.open(tmp_path)
    entry = checkpoint.tensors[f"model.layers.0.mlp.down_proj.{part}"]
    content = bytearray(file.read_bytes())
    content[entry.end - 3] = 0xFF
    file.write_bytes(content)
    holding = Checkpoint.open(tmp_path).with_stored(holds_stored=True)
    _, destinations = allocate_layer(holding.config, 0, torch.empty)
    with pytest.raises(ValueError, match=rf"mlp\.down_proj\.weight has {problem}"):
        load_tensors(holding, destinations)
