"""Weight tensors of a layer with fused projections, and their matrix products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from checkpoint import DType, ModelConfig
from checkpoint.tensors import layer_tensor_name
from stage_worker.model.kernels import Kernels, ProductMethod, load

TORCH_DTYPES = {DType.BF16: torch.bfloat16, DType.F16: torch.float16, DType.F32: torch.float32}


_EXPECTED_ROWS = 16
"""Number of rows that oneDNN packs for; measured, it packs alike for 1 to 64."""


class Projection(Protocol):
    """One weight matrix [out, in] with an optional bias [out]."""

    def __call__(self, x: Tensor) -> Tensor:
        """[n, out] for `x` [n, in]."""

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return `residual` [n, out] plus the projection of `x` [n, in], as a new tensor."""


def project(weight: Tensor, bias: Tensor | None, kernels: Kernels) -> Projection:
    """The projection by `weight`; packing copies the weight."""
    return _PROJECTIONS[kernels.products](weight, bias)


class PlainProjection:
    """`torch.nn.functional.linear`; rounds the product before adding the residual."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias).add_(residual)


class PackedProjection:
    """oneDNN's product with a reordered weight; sums products and residual in float32, rounds once."""

    __slots__ = ("_bias", "_linear", "_linear_add", "_packed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        operators = torch.ops.mkldnn
        self._packed = operators._reorder_linear_weight(weight, _EXPECTED_ROWS)
        self._bias = bias
        self._linear = operators._linear_pointwise.default
        self._linear_add = operators._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = self._linear(x, self._packed, self._bias, "none", [], "")
        return product

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        total: Tensor = self._linear_add(x, residual, self._packed, self._bias, "add")
        return total


_PANEL = 64
"""Rows of a weight that are packed together, see `_cpu_kernels.c`."""


class CompiledProjection:
    """Compiled product with a reordered bfloat16 weight; rounds like oneDNN's.

    A row's result does not depend on the other rows and on the number of threads. A gated projection by
    [gate, up] returns silu(gate) * up, rounded like `Operations.gate`.
    """

    __slots__ = ("_bias", "_multiply", "_packed", "_sizes", "_width")

    def __init__(self, weight: Tensor, bias: Tensor | None, *, is_gated: bool = False) -> None:
        """Raises ValueError for an odd number of columns, or of rows of a gated projection.

        `weight` and `bias` are contiguous bfloat16: the kernel reads their memory as it lies.
        """
        module = load()
        for given in (weight, bias):
            is_plain = given is None or (given.is_contiguous() and given.dtype is torch.bfloat16)
            assert is_plain, "not contiguous bfloat16"
        out, self._width = weight.shape
        if self._width % 2 or (is_gated and out % 2):
            raise ValueError(f"a weight of {out} x {self._width} elements for pairs of elements")
        self._multiply, self._bias = module.multiply, bias
        self._sizes = (out, self._width, is_gated)
        self._packed = weight.new_empty(-(-out // _PANEL) * _PANEL * self._width)
        module.pack(weight.data_ptr(), self._packed.data_ptr(), *self._sizes)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, None)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._product(x, residual.contiguous())

    def _product(self, x: Tensor, residual: Tensor | None) -> Tensor:
        rows, width = x.shape
        assert width == self._width and x.stride(1) == 1, "rows of another width"
        out, _, is_gated = self._sizes
        result = x.new_empty(rows, out // 2 if is_gated else out)
        assert residual is None or residual.shape == result.shape, "a residual of another shape"
        self._multiply(
            *(x.data_ptr(), x.stride(0), self._packed.data_ptr()),
            *(0 if extra is None else extra.data_ptr() for extra in (self._bias, residual)),
            *(result.data_ptr(), rows, *self._sizes),
        )
        return result


_PROJECTIONS: dict[ProductMethod, Callable[[Tensor, Tensor | None], Projection]] = {
    ProductMethod.LINEAR: PlainProjection,
    ProductMethod.ONEDNN: PackedProjection,
    ProductMethod.COMPILED: CompiledProjection,
}

Destinations = dict[str, Tensor]
"""Checkpoint tensor name -> contiguous view that it is loaded into."""

NewTensor = Callable[..., Tensor]
"""Allocates an uninitialised tensor of the given sizes, in the run dtype on the stage's device."""


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
    """Allocate uninitialised weights of the model's layer number `layer`, and their destinations."""
    places: Destinations = {}

    def one(suffix: str, *shape: int) -> Tensor:
        return places.setdefault(layer_tensor_name(layer, suffix), new(*shape))

    def stacked(suffixes: dict[str, int], *width: int) -> Tensor:
        fused = new(sum(suffixes.values()), *width)
        for suffix, view in zip(suffixes, torch.split(fused, list(suffixes.values())), strict=True):
            places[layer_tensor_name(layer, suffix)] = view
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
