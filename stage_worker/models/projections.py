"""Matrix products with a stage's weights: as torch stores them, or in oneDNN's own order."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from stage_worker.models.kernels import Kernels

_EXPECTED_ROWS = 16
"""What oneDNN packs for; measured, it packs alike for 1 to 64."""


class Projection(Protocol):
    """One weight matrix [out, in] with or without a bias [out]."""

    def __call__(self, x: Tensor) -> Tensor:
        """[n, out] for `x` [n, in]."""

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual` [n, out] plus the projection of `x` [n, in], as a new tensor."""


def project(weight: Tensor, bias: Tensor | None, kernels: Kernels) -> Projection:
    """The projection by `weight`, which is copied where it is packed."""
    return PackedProjection(weight, bias) if kernels.packs_weights else PlainProjection(weight, bias)


class PlainProjection:
    """`torch.nn.functional.linear`; the sum with the residual is rounded after the product is."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias).add_(residual)


class PackedProjection:
    """oneDNN's inner product on a weight that was reordered once (what Inductor's freezing calls, too).

    Products are summed in float32; the residual is added to that sum, and the result is rounded once.
    """

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
