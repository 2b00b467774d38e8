"""The weight tensors of a layer, with fused projections, and where each checkpoint tensor goes in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoint import ModelConfig
from checkpoint.tensors import layer_tensor_name

Destinations = dict[str, Tensor]
"""For each checkpoint tensor the contiguous view that it is loaded into."""

NewTensor = Callable[..., Tensor]
"""Makes an uninitialised tensor of the given sizes, in the run dtype on the stage's device."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in]; `qkv` and `gate_up` stack their parts by rows."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_attention_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


def allocate_layer(config: ModelConfig, layer: int, new: NewTensor) -> tuple[LayerWeights, Destinations]:
    """Uninitialised weights of the model's layer number `layer`, and their destinations."""
    places: Destinations = {}

    def one(suffix: str, *shape: int) -> Tensor:
        return places.setdefault(layer_tensor_name(layer, suffix), new(*shape))

    def stacked(suffixes: dict[str, int], *width: int) -> Tensor:
        fused = new(sum(suffixes.values()), *width)
        for suffix, part in zip(suffixes, torch.split(fused, list(suffixes.values())), strict=True):
            places[layer_tensor_name(layer, suffix)] = part
        return fused

    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    qkv = {f"self_attn.{x}_proj": size for x, size in zip("qkv", _qkv_sizes(config), strict=True)}
    gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    weights = LayerWeights(
        input_norm=one("input_layernorm.weight", hidden),
        qkv=stacked(_suffixed(qkv, "weight"), hidden),
        qkv_bias=stacked(_suffixed(qkv, "bias")) if config.qkv_bias else None,
        q_norm=one("self_attn.q_norm.weight", head_dim) if config.qk_norm else None,
        k_norm=one("self_attn.k_norm.weight", head_dim) if config.qk_norm else None,
        o=one("self_attn.o_proj.weight", hidden, config.q_size),
        o_bias=one("self_attn.o_proj.bias", hidden) if config.o_bias else None,
        post_attention_norm=one("post_attention_layernorm.weight", hidden),
        gate_up=stacked(_suffixed(gate_up, "weight"), hidden),
        gate_up_bias=stacked(_suffixed(gate_up, "bias")) if config.mlp_bias else None,
        down=one("mlp.down_proj.weight", hidden, inner),
        down_bias=one("mlp.down_proj.bias", hidden) if config.mlp_bias else None,
    )
    return weights, places


def _qkv_sizes(config: ModelConfig) -> tuple[int, int, int]:
    return config.q_size, config.kv_size, config.kv_size


def _suffixed(sizes: dict[str, int], kind: str) -> dict[str, int]:
    return {f"{name}.{kind}": size for name, size in sizes.items()}
