"""Rows that are hard to hold in 8 bits, and the largest error that is stated for them."""

from __future__ import annotations

import torch
from torch import Tensor

RUN_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
_SMALLEST_SCALE = 2.0**-126


def adversarial_rows(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """[num_rows, width]: normal rows of many sizes, zeros, huge and subnormal ones, outliers, ties."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(num_rows, width, generator=generator, dtype=torch.float64)
    rows *= 2.0 ** torch.randint(-10, 10, (num_rows, 1), generator=generator)
    info = torch.finfo(dtype)
    rows[0] = 0.0
    huge = 2.0**127 if dtype is torch.float32 else info.max  # times its scale, float32's overflows
    rows[1] = huge
    rows[2] = torch.linspace(-huge, huge, width, dtype=torch.float64)
    rows[3] *= info.tiny / rows[3].abs().max()
    rows[4] = 0.0
    rows[4, 3] = info.smallest_normal * info.eps  # the least subnormal number
    rows[5, 7] = 1e4  # one outlier
    rows[6] = torch.arange(width) + 0.5  # ties
    rows[7] = 2.0 ** -torch.arange(width, dtype=torch.float64)
    return rows.to(dtype)


def error_bound(rows: Tensor, element: torch.dtype) -> Tensor:
    """Largest error of each element of `rows` [..., width], see `kvcache.scaled_pages`."""
    wide = rows.double()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    if element is torch.int8:
        bound = (largest / 127).clamp(min=_SMALLEST_SCALE) / 2
    else:
        scale = (largest / 448).clamp(min=_SMALLEST_SCALE)
        bound = torch.maximum(wide.abs() / 16, scale / 1024)
    info = torch.finfo(rows.dtype)
    return bound * (1 + 2.0**-20) + largest * info.eps / 2 + info.smallest_normal * info.eps
