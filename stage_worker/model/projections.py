"""Matrix products of a layer, each with a weight [out, in] that it packs, rounds or takes as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from checkpoint import DType, WeightFormat
from checkpoint.dtypes import INT4_GROUP
from stage_worker.model.held_matrices import ByteMatrix, HeldMatrix, NibbleMatrix
from stage_worker.model.kernels import ProductMethod, load, load_triton
from stage_worker.model.quantize import int4_groups, int8_rows

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
    """The projection by `weight`; packing copies a tensor. `products` say how a tensor is multiplied."""
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


def with_rows(x: Tensor, num_rows: int) -> Tensor:
    """`x` [n, width] and rows of zeros, up to `num_rows`: products may take more rows than a step has."""
    missing = num_rows - len(x)
    return torch.cat((x, x.new_zeros(missing, x.shape[1]))) if missing > 0 else x


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
