"""Rounds matrices to the weight formats of memory.

A row of int8 is `codes * scale`; a group of columns of int4 is `(codes - 8) * scale + offset`, from its least
to its largest weight. Scales and offsets are rounded to the dtype of the weights before codes are chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from checkpoint import WeightFormat
from checkpoint.dtypes import INT4_GROUP

_MOST_INT8 = 127
_MOST_INT4 = 15
_MIDDLE_INT4 = 8


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [out, in] and scales [out] of `weight` [out, in], symmetric."""
    wide = weight.float()
    scales = _scales(wide.abs().amax(dim=1) / _MOST_INT8, weight.dtype)
    codes = (wide / scales.float()[:, None]).round_().clamp_(-_MOST_INT8, _MOST_INT8)
    return codes.to(torch.int8), scales


def int4_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [out, in] up to 15, scales and offsets [out, groups] of `weight` [out, in]."""
    groups = weight.float().view(len(weight), -1, INT4_GROUP)
    low, high = groups.aminmax(dim=2)
    scales = _scales((high - low) / _MOST_INT4, weight.dtype)
    offsets = (low + _MIDDLE_INT4 * scales.float()).to(weight.dtype)
    codes = (groups - offsets.float()[..., None]).div_(scales.float()[..., None]).round_()
    codes = codes.add_(_MIDDLE_INT4).clamp_(0, _MOST_INT4)
    return codes.to(torch.uint8).flatten(1), scales, offsets


def rounded_to(weights: WeightFormat, weight: Tensor) -> Tensor:
    """Weights float32 [out, in] after rounding to this format, as a stage computes with them."""
    if weights is WeightFormat.INT8:
        codes, scales = int8_rows(weight)
        return codes.float().mul_(scales.float()[:, None])
    codes, scales, offsets = int4_groups(weight)
    groups = codes.float().view(len(weight), -1, INT4_GROUP).sub_(_MIDDLE_INT4)
    return groups.mul_(scales.float()[..., None]).add_(offsets.float()[..., None]).flatten(1)


def _scales(steps: Tensor, dtype: torch.dtype) -> Tensor:
    """`steps` in `dtype`, with 1 instead of 0 (all weights equal)."""
    scales = steps.to(dtype)
    return torch.where(scales > 0, scales, 1.0)
