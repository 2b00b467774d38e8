"""Norms and biases of several dimensions are vectors: quantised checkpoints have them plain."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint.config import parse_config
from checkpoint.dtypes import DType, WeightFormat
from checkpoint.held import layer_weight_bytes
from checkpoint.tensors import packed_tensors, role_shapes, stage_tensor_shapes
from tests.unit.checkpoint.test_config import GPT_OSS, SMALL

COHERE: dict[str, Any] = {
    "model_type": "cohere",
    "architectures": ["CohereForCausalLM"],
    "use_qk_norm": True,
    "layer_norm_eps": 1e-5,
    "num_hidden_layers": 1,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


@pytest.mark.parametrize(
    ("raw", "modules"),
    [
        (SMALL | COHERE | {"quantization_config": AWQ}, {"self_attn": 4, "mlp": 3}),
        (GPT_OSS | {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}, {"mlp": 2}),
    ],
)
def test_only_matrices_are_packed(raw: dict[str, Any], modules: dict[str, int]) -> None:
    config = parse_config(raw)
    shapes = stage_tensor_shapes(config, 0, 1, has_embeddings=True, has_head=True)
    packed = packed_tensors(config, shapes)
    assert {name.split(".")[3] for name in packed} == set(modules)
    assert len(packed) == sum(modules.values())
    assert not any("norm" in name or name.endswith("bias") for name in packed)


def test_norms_of_each_head_stay_in_the_run_dtype() -> None:
    plan = parse_config(SMALL | COHERE).with_weights(WeightFormat.INT8).layers[0]
    hidden_size = SMALL["hidden_size"]
    shapes = role_shapes(hidden_size, plan)
    norms = [shape for (role, _), shape in shapes.items() if "norm" in role.value]
    assert sorted(map(len, norms)) == [1, 2, 2]
    matrices = [shape for shape in shapes.values() if shape not in norms]
    expected = sum(rows * (columns + 2) for rows, columns in matrices)
    expected += sum(2 * shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in norms)
    assert layer_weight_bytes(hidden_size, plan, DType.BF16) == expected
