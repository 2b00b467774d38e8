"""Normalisation of rows, see `checkpoint.blueprint.NormKind`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm
from torch.nn.functional import rms_norm as scaled_to_unit

from checkpoint import Norm
from checkpoint.blueprint import NormKind

RowNorm = Callable[[Tensor], Tensor]
"""Returns the normed rows of `x` [..., width], in the dtype of `x`."""
RmsNorm = Callable[[Tensor, Tensor, float], Tensor]
"""See `rms_norm`; x is [n, width]."""


@dataclass(frozen=True, slots=True, eq=False)
class NormWeights:
    """Weight and bias [width], or weight [heads, width] of `NormSpan.EACH_HEAD`, in the run dtype."""

    weight: Tensor
    bias: Tensor | None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale `x` [..., width] to unit mean square over the last dimension, times `weight` [width].

    Mean square and scaling are computed in float32, rounded to x's dtype, and then multiplied by the
    weight in that dtype: the order of transformers' LlamaRMSNorm, which bit-equality in bf16 needs.
    (torch's own function multiplies before it rounds.) Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    return scaled_to_unit(x, weight.shape, None, eps).mul_(weight)


def row_norm(norm: Norm, weights: NormWeights, rms: RmsNorm = rms_norm) -> RowNorm:
    """Return the norm with `weights`; `rms` computes NormKind.RMS."""
    match norm.kind:
        case NormKind.RMS:
            return _Rms(weights.weight, norm.eps, rms)
        case NormKind.RMS_WIDE:
            return _WideRms(weights.weight.float(), norm.eps)
        case NormKind.RMS_OFFSET:
            return _WideRms(weights.weight.float() + 1.0, norm.eps)
        case NormKind.LAYER:
            return _Layer(weights.weight.float(), weights.bias, norm.eps)
        case NormKind.LAYER_OFFSET:
            return _Layer(weights.weight.float() + 1.0, weights.bias, norm.eps)


def unit_norm(eps: float) -> RowNorm:
    """Scale rows to unit mean square, without a weight."""
    return lambda x: scaled_to_unit(x, x.shape[-1:], None, eps)


class _Rms:
    __slots__ = ("_eps", "_rms", "_weight")

    def __init__(self, weight: Tensor, eps: float, rms: RmsNorm) -> None:
        self._weight, self._eps, self._rms = weight, eps, rms

    def __call__(self, x: Tensor) -> Tensor:
        return self._rms(x, self._weight, self._eps)


class _WideRms:
    """`weight` is float32: transformers' Gemma and OLMo multiply before they round."""

    __slots__ = ("_eps", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        return scaled_to_unit(x.to(torch.float32), self._weight.shape, self._weight, self._eps).to(x.dtype)


class _Layer:
    """Source: Ba et al. 2016, arXiv:1607.06450."""

    __slots__ = ("_bias", "_eps", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self._weight, self._bias, self._eps = weight, None if bias is None else bias.float(), eps

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        if self._weight.dim() > 1:
            assert self._bias is None, "weights of each head have no bias"
            return layer_norm(wide, x.shape[-1:], None, None, self._eps).mul_(self._weight).to(x.dtype)
        return layer_norm(wide, self._weight.shape, self._weight, self._bias, self._eps).to(x.dtype)
