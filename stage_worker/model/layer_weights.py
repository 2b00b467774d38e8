"""Weight tensors of a layer with fused projections, and their matrix products."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from checkpoint import (
    Attention,
    Blueprint,
    Dense,
    DType,
    Experts,
    GatedDelta,
    Latent,
    Mixer,
    WeightFormat,
)
from checkpoint.dtypes import INT4_GROUP
from checkpoint.held import held_plans, stacked_roles
from checkpoint.names import TensorRole
from checkpoint.tensors import (
    BRANCH_NORMS,
    CHOICE_BIAS_KIND,
    DECAY_KIND,
    DT_KIND,
    EXPERT_SCALE_KIND,
    LAYER_SCALE_KIND,
    ROUTER_NORM_KIND,
    SINKS_KIND,
    LayerTensor,
    layer_tensors,
    role_shapes,
    row_axis,
)
from stage_worker.model.held_matrices import (
    ByteMatrix,
    HeldMatrix,
    HeldRows,
    NibbleMatrix,
    empty_matrix,
)
from stage_worker.model.kernels import ProductMethod, load, load_triton
from stage_worker.model.norms import NormWeights
from stage_worker.model.quantize import int4_groups, int8_rows

TORCH_DTYPES = {DType.BF16: torch.bfloat16, DType.F16: torch.float16, DType.F32: torch.float32}


_EXPECTED_ROWS = 16
"""Number of rows that oneDNN packs for; measured, it packs alike for 1 to 64."""


class Projection(Protocol):
    """One weight matrix [out, in] with an optional bias [out]."""

    def __call__(self, x: Tensor) -> Tensor:
        """[n, out] for `x` [n, in]."""

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return `residual` [n, out] plus the projection of `x` [n, in].

        A new tensor, except by `InPlaceProjection`.
        """


Weight = Tensor | HeldMatrix
"""A matrix [out, in]."""


def project(weight: Weight, bias: Tensor | None, products: ProductMethod) -> Projection:
    """The projection by `weight`; packing copies a tensor. `products` are those of tensors."""
    if not isinstance(weight, Tensor):
        return HeldProjection(weight, bias)
    return _PROJECTIONS[products](weight, bias)


class PlainProjection:
    """`torch.nn.functional.linear`; rounds the product before adding the residual."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias).add_(residual)


class InPlaceProjection(PlainProjection):
    """Adds the residual within the product, in float32, and rounds once; it is modified, unless a bias needs
    an operation of its own.
    """

    __slots__ = ()

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self.bias is not None:
            return super().added_to(residual, x)
        return residual.addmm_(x, self.weight.t())


class RowProjection(InPlaceProjection):
    """Multiplies a single row by a Triton kernel, which reads 16-bit weights faster than cuBLAS does: in 3 to
    17 % less time on an H200, see bench/STUDIES.md.
    """

    __slots__ = ("_has_kernel",)

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self._has_kernel = weight.element_size() == 2 and weight.is_contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) != 1 or not self._has_kernel:
            return super().__call__(x)
        found: Tensor = load_triton("row_products").row_product(x, self.weight, self.bias)
        return found

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if len(x) != 1 or not self._has_kernel:
            return super().added_to(residual, x)
        found: Tensor = load_triton("row_products").row_product(x, self.weight, self.bias, residual)
        return found


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


_QUANTIZED_ROWS = 1024
"""Rows that are quantised at a time, whole panels of torch's int4 layout."""
_PANEL = 64
"""Rows of a weight that are packed together, see `_cpu_kernels.c`."""


class CompiledProjection:
    """Compiled product with a packed bfloat16 or int4 weight; adds up in float32, rounds like oneDNN's.

    A row's result does not depend on the other rows and on the number of threads. A gated projection by
    [gate, up] returns silu(gate) * up, rounded like `Operations.gate`. int4 weights are never rounded to
    bfloat16: the sum over a group of `INT4_GROUP` columns is scaled in float32.
    """

    __slots__ = ("_addresses", "_bias", "_multiply", "_packed", "_sizes", "_width")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        *,
        is_gated: bool = False,
        products: ProductMethod = ProductMethod.COMPILED,
    ) -> None:
        """Raises ValueError for columns that are no whole pairs or groups, and for odd rows if gated.

        `weight` and `bias` are contiguous bfloat16: the kernel reads their memory as it lies.
        """
        for given in (weight, bias):
            is_plain = given is None or (given.is_contiguous() and given.dtype is torch.bfloat16)
            assert is_plain, "not contiguous bfloat16"
        out, self._width = weight.shape
        is_int4 = products is ProductMethod.COMPILED_INT4
        multiple = INT4_GROUP if is_int4 else 2
        if self._width % multiple or (is_gated and out % 2):
            raise ValueError(f"a weight of {out} x {self._width} elements for groups of {multiple}")
        module = load()
        self._multiply, self._bias = module.multiply_int4 if is_int4 else module.multiply, bias
        self._sizes = (out, self._width, is_gated)
        self._packed = (_packed_int4 if is_int4 else _packed_bf16)(weight, is_gated=is_gated)
        # Found once: each costs a tenth of a microsecond.
        self._addresses = (self._packed.data_ptr(), 0 if bias is None else bias.data_ptr())

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
            x.data_ptr(),
            x.stride(0),
            *self._addresses,
            0 if residual is None else residual.data_ptr(),
            result.data_ptr(),
            rows,
            *self._sizes,
        )
        return result


def _packed_bf16(weight: Tensor, *, is_gated: bool) -> Tensor:
    out, width = weight.shape
    packed = weight.new_empty(-(-out // _PANEL) * _PANEL * width)
    load().pack(weight.data_ptr(), packed.data_ptr(), out, width, is_gated)
    return packed


def _packed_int4(weight: Tensor, *, is_gated: bool) -> Tensor:
    """Bytes of `WeightFormat.matrix_bytes`, with whole panels of rows."""
    out, width = weight.shape
    chunks = [int4_groups(rows) for rows in torch.split(weight, _QUANTIZED_ROWS)]
    codes, scales, offsets = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    panels = -(-out // _PANEL)
    size = WeightFormat.INT4.matrix_bytes(panels * _PANEL, width, DType.BF16)
    packed = torch.empty(size, dtype=torch.uint8)
    sources = (codes.data_ptr(), scales.data_ptr(), offsets.data_ptr())
    load().pack_int4(*sources, packed.data_ptr(), out, width, is_gated)
    return packed


class Int8Projection:
    """torch's product with int8 weights, each row with a scale; sums in float32, rounds once.

    Source: `_weight_int8pack_mm` of torch 2.13, which takes rows of any dtype.
    """

    __slots__ = ("_bias", "_codes", "_scales")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = bias
        chunks = [int8_rows(rows) for rows in torch.split(weight, _QUANTIZED_ROWS)]
        self._codes, self._scales = (torch.cat(parts) for parts in zip(*chunks, strict=True))

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch._weight_int8pack_mm(x.contiguous(), self._codes, self._scales)
        return product if self._bias is None else product.add_(self._bias)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self(x).add_(residual)


class Int4Projection:
    """torch's product with int4 weights in groups of `INT4_GROUP` columns; sums in float32, rounds once.

    For other dtypes than bfloat16, and CPUs without compiled products.
    Source: `_weight_int4pack_mm_for_cpu` of torch 2.13.
    """

    __slots__ = ("_bias", "_packed", "_scales")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = bias
        packed, scales = [], []
        for rows in torch.split(weight, _QUANTIZED_ROWS):
            codes, scale, offset = int4_groups(rows)
            packed.append(torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1))
            scales.append(torch.stack((scale, offset), dim=2))
        self._packed = torch.cat(packed)
        self._scales = torch.cat(scales).transpose(0, 1).contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch._weight_int4pack_mm_for_cpu(
            x.contiguous(), self._packed, INT4_GROUP, self._scales
        )
        return product if self._bias is None else product.add_(self._bias)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self(x).add_(residual)


class HeldProjection:
    """Product on a GPU with weights of 4 or 8 bits, see `triton_kernels.held_products`.

    Sums, bias and residual are float32, and rounded once.
    """

    __slots__ = ("_bias", "_matrix", "_multiply")

    def __init__(self, matrix: HeldMatrix, bias: Tensor | None) -> None:
        self._matrix, self._bias = matrix, bias
        self._multiply = _held_product(matrix)

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, self._matrix, self._bias, None)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._multiply(x, self._matrix, self._bias, residual)


def _held_product(matrix: HeldMatrix) -> Callable[..., Tensor]:
    if isinstance(matrix, NibbleMatrix):
        return load_triton("nibble_products").nibble_product  # type: ignore[no-any-return]
    return load_triton("byte_products").byte_product  # type: ignore[no-any-return]


ROUNDED: dict[ProductMethod, Callable[[Tensor], HeldMatrix]] = {
    ProductMethod.TRITON_INT8: ByteMatrix.quantized,
    ProductMethod.TRITON_INT4: NibbleMatrix.quantized,
}
"""Matrices that products of a GPU read instead of plain ones."""


def _rounded_projection(products: ProductMethod) -> Callable[[Tensor, Tensor | None], Projection]:
    return lambda weight, bias: HeldProjection(ROUNDED[products](weight), bias)


_PROJECTIONS: dict[ProductMethod, Callable[[Tensor, Tensor | None], Projection]] = {
    ProductMethod.LINEAR: PlainProjection,
    ProductMethod.TRITON_ROWS: RowProjection,
    ProductMethod.ONEDNN: PackedProjection,
    ProductMethod.COMPILED: CompiledProjection,
    ProductMethod.INT8: Int8Projection,
    ProductMethod.INT4: Int4Projection,
    ProductMethod.COMPILED_INT4: functools.partial(CompiledProjection, products=ProductMethod.COMPILED_INT4),
    **{products: _rounded_projection(products) for products in ROUNDED},
}

Destinations = dict[str, Tensor | HeldRows]
"""Checkpoint tensor name -> contiguous view, or rows of a held matrix, that it is loaded into."""

NewTensor = Callable[..., Tensor]
"""Allocates an uninitialised tensor of the given sizes, in the run dtype on the stage's device."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DenseWeights:
    """An MLP. Matrices are [out, in]; `up` of a gated one has the gate's rows first."""

    up: Weight
    up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExpertsWeights:
    """A mixture of experts: router [experts, hidden_size], `up` [experts, 2 * width, hidden_size] with the
    gate's rows first, `down` [experts, hidden_size, width]; biases lack the last dimension.

    `choice_bias` [experts] is float32, and so is the router if its plan `is_wide`. `shared_weight` is
    [1, hidden_size], `router_norm` [hidden_size], `expert_scale` [experts].
    """

    router: Tensor
    router_bias: Tensor | None
    choice_bias: Tensor | None
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    shared: DenseWeights | None
    shared_weight: Tensor | None
    router_norm: Tensor | None = None
    expert_scale: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionWeights:
    """Queries, keys and values, stacked by rows in `qkv`; `sinks` is [heads].

    Layers whose values are their keys have no rows of values. Gates of the output are the last rows.
    """

    qkv: Weight
    qkv_bias: Tensor | None
    sinks: Tensor | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class IndexerWeights:
    """An indexer. `query` is [heads * head_dim, query_rank], `key` [head_dim, hidden_size] and `weight`
    [heads, hidden_size].
    """

    query: Tensor
    key: Tensor
    weight: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LatentWeights:
    """Latent attention. `query` is [q_size, query_rank] after `query_down` [query_rank, hidden_size], or
    [q_size, hidden_size] without; `latent` [kv_rank + rope_dim, hidden_size] has the shared key's rows last;
    `keys` [heads, nope_dim, kv_rank] and `values` [heads, value_dim, kv_rank] are views of what is loaded.
    """

    query_down: Weight | None
    query_down_bias: Tensor | None
    query: Weight
    latent: Weight
    latent_bias: Tensor | None
    keys: Tensor
    values: Tensor
    indexer: IndexerWeights | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeltaWeights:
    """Gated DeltaNet. `input` has the rows of queries, keys, values, gates, strengths and decays; `conv` is
    [channels, 1, kernel_size], `norm` [value_dim]; `decay` (A_log, or rates, see `DeltaLayout`) and
    `dt_bias` [heads] are float32.
    """

    input: Weight
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in]; `scale` is [1]."""

    norms: Mapping[TensorRole, NormWeights]
    mixer: AttentionWeights | LatentWeights | DeltaWeights
    o: Weight
    o_bias: Tensor | None
    feed_forward: DenseWeights | ExpertsWeights
    scale: Tensor | None = None


_NORMS = (
    *(TensorRole.MIXER_NORM, TensorRole.MIXER_OUT_NORM, TensorRole.FFN_NORM, TensorRole.FFN_OUT_NORM),
    *(TensorRole.Q_NORM, TensorRole.K_NORM, TensorRole.Q_LATENT_NORM, TensorRole.KV_LATENT_NORM),
    TensorRole.INDEX_K_NORM,
    *BRANCH_NORMS,
)


def allocate_layer(config: Blueprint, layer: int, new: NewTensor) -> tuple[LayerWeights, Destinations]:
    """Allocate uninitialised weights of layer number `layer`, and their destinations."""
    tensors = _Allocation(config, layer, new)
    is_delta = isinstance(config.layers[layer].mixer, GatedDelta)
    out_role = TensorRole.STATE_OUT if is_delta else TensorRole.O
    weights = LayerWeights(
        norms={
            role: NormWeights(tensors.found(role, "weight"), tensors.get(role, "bias"))
            for role in _NORMS
            if tensors.get(role, "weight") is not None
        },
        mixer=_mixer(config.layers[layer].mixer, tensors),
        o=tensors.matrix(out_role),
        o_bias=tensors.get(out_role, "bias"),
        feed_forward=_feed_forward(config.layers[layer].known_feed_forward, tensors),
        scale=tensors.get(TensorRole.LAYER_SCALE, LAYER_SCALE_KIND),
    )
    return weights, tensors.destinations()


def _mixer(mixer: Mixer, tensors: _Allocation) -> AttentionWeights | LatentWeights | DeltaWeights:
    if isinstance(mixer, GatedDelta):
        return DeltaWeights(
            input=tensors.matrix(TensorRole.DELTA_QKV),
            conv=tensors.found(TensorRole.STATE_CONV, "weight"),
            decay=tensors.found(TensorRole.STATE_DECAY, DECAY_KIND),
            dt_bias=tensors.found(TensorRole.STATE_DT, DT_KIND),
            norm=tensors.found(TensorRole.STATE_NORM, "weight"),
        )
    if isinstance(mixer, Attention):
        return AttentionWeights(
            qkv=tensors.matrix(TensorRole.Q),
            qkv_bias=tensors.get(TensorRole.Q, "bias"),
            sinks=tensors.get(TensorRole.SINKS, SINKS_KIND),
        )
    keys, values = _expansion(mixer, tensors)
    return LatentWeights(
        query_down=None if mixer.query_rank is None else tensors.matrix(TensorRole.Q_DOWN),
        query_down_bias=tensors.get(TensorRole.Q_DOWN, "bias"),
        query=tensors.matrix(TensorRole.Q if mixer.query_rank is None else TensorRole.Q_UP),
        latent=tensors.matrix(TensorRole.KV_DOWN),
        latent_bias=tensors.get(TensorRole.KV_DOWN, "bias"),
        keys=keys,
        values=values,
        indexer=None if mixer.indexer is None else _indexer(tensors),
    )


def _expansion(mixer: Latent, tensors: _Allocation) -> tuple[Tensor, Tensor]:
    """Keys and values of `LatentWeights`."""
    if mixer.is_split:
        keys = tensors.found(TensorRole.HEAD_KEYS, "weight").transpose(1, 2)
        return keys, tensors.found(TensorRole.HEAD_VALUES, "weight")
    by_head = tensors.found(TensorRole.KV_UP, "weight").view(mixer.num_heads, -1, mixer.kv_rank)
    return by_head[:, : mixer.nope_dim], by_head[:, mixer.nope_dim :]


def _indexer(tensors: _Allocation) -> IndexerWeights:
    return IndexerWeights(
        query=tensors.found(TensorRole.INDEX_Q, "weight"),
        key=tensors.found(TensorRole.INDEX_K, "weight"),
        weight=tensors.found(TensorRole.INDEX_WEIGHT, "weight"),
    )


def _feed_forward(plan: Dense | Experts, tensors: _Allocation) -> DenseWeights | ExpertsWeights:
    if isinstance(plan, Dense):
        return _dense(tensors, TensorRole.UP, TensorRole.DOWN)
    has_shared = plan.shared is not None
    return ExpertsWeights(
        router=tensors.found(TensorRole.ROUTER, "weight"),
        router_bias=tensors.get(TensorRole.ROUTER, "bias"),
        choice_bias=tensors.get(TensorRole.CHOICE_BIAS, CHOICE_BIAS_KIND),
        up=tensors.found(TensorRole.EXPERT_UP, "weight"),
        up_bias=tensors.get(TensorRole.EXPERT_UP, "bias"),
        down=tensors.found(TensorRole.EXPERT_DOWN, "weight"),
        down_bias=tensors.get(TensorRole.EXPERT_DOWN, "bias"),
        shared=_dense(tensors, TensorRole.SHARED_UP, TensorRole.SHARED_DOWN) if has_shared else None,
        shared_weight=tensors.get(TensorRole.SHARED_WEIGHT, "weight"),
        router_norm=tensors.get(TensorRole.ROUTER_NORM, ROUTER_NORM_KIND),
        expert_scale=tensors.get(TensorRole.EXPERT_SCALE, EXPERT_SCALE_KIND),
    )


def _dense(tensors: _Allocation, up: TensorRole, down: TensorRole) -> DenseWeights:
    return DenseWeights(
        up=tensors.matrix(up),
        up_bias=tensors.get(up, "bias"),
        down=tensors.matrix(down),
        down_bias=tensors.get(down, "bias"),
    )


class _Allocation:
    """Tensors and held matrices of a layer; the parts of a stacked one are views of it."""

    def __init__(self, config: Blueprint, layer: int, new: NewTensor) -> None:
        self._tensors = layer_tensors(config, layer)
        self._new, self._shapes = new, role_shapes(config.hidden_size, config.layers[layer])
        self._wide = _wide_roles(config.layers[layer].known_feed_forward)
        self._places: dict[tuple[TensorRole, str], tuple[Weight, int, int]] = {}
        """Each part's tensor or matrix, and range of rows."""
        held = held_plans(config, layer)
        device = new(0).device
        for role, kind in self._shapes:
            if (role, kind) in self._places:
                continue
            if kind == "weight" and role in held:
                self._place(role, kind, empty_matrix(held[role], device))
            else:
                self._place(role, kind, None)

    def _place(self, role: TensorRole, kind: str, matrix: HeldMatrix | None) -> None:
        """Place the stack that begins with `role` in `matrix`, or in a new tensor."""
        shapes, parts = self._shapes, stacked_roles(role, kind, self._shapes)
        axis = row_axis(role)
        sizes = [shapes[part, kind][axis] for part in parts]
        into: Weight
        if matrix is not None:
            into = matrix
        else:
            into = self._new(*shapes[role, kind][:axis], sum(sizes), *shapes[role, kind][axis + 1 :])
            into = into.float() if role in self._wide else into
        for index, part in enumerate(parts):
            begin = sum(sizes[:index])
            self._places[part, kind] = (into, begin, begin + sizes[index])

    def get(self, role: TensorRole, kind: str) -> Tensor | None:
        """The tensor that holds a part, with all parts stacked in it."""
        place = self._places.get((role, kind))
        if place is None:
            return None
        assert isinstance(place[0], Tensor), f"{role.value} is held as it is stored"
        return place[0]

    def matrix(self, role: TensorRole) -> Weight:
        """What holds a matrix, with all matrices stacked in it."""
        return self._places[role, "weight"][0]

    def found(self, role: TensorRole, kind: str) -> Tensor:
        tensor = self.get(role, kind)
        assert tensor is not None, f"a layer without {role.value}"
        return tensor

    def destinations(self) -> Destinations:
        return {tensor.name: self._destination(tensor) for tensor in self._tensors}

    def _destination(self, tensor: LayerTensor) -> Tensor | HeldRows:
        found = [self._places[role, tensor.kind] for role in tensor.roles]
        (into, begin, _), (last, _, end) = found[0], found[-1]
        if not isinstance(into, Tensor):
            return HeldRows(into, begin, end)
        is_one = into is last
        if tensor.expert is not None:
            place = into[tensor.expert][begin:end]
        else:
            place = into.narrow(row_axis(tensor.roles[0]), begin, end - begin)
        if tensor.is_transposed:
            place = place.view(tensor.shape)
        if len(tensor.shape) > place.dim():
            place = place[None]
        is_whole = is_one and place.shape == tensor.shape and place.is_contiguous()
        assert is_whole, f"{tensor.name} is scattered"
        return place


def _wide_roles(plan: Dense | Experts) -> tuple[TensorRole, ...]:
    """Roles whose tensors are float32 in memory."""
    is_wide = isinstance(plan, Experts) and plan.router.is_wide
    always = (TensorRole.CHOICE_BIAS, TensorRole.STATE_DECAY, TensorRole.STATE_DT)
    return (*always, TensorRole.ROUTER) if is_wide else always
