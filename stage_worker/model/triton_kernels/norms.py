"""Norms of rows, with the addition to the residual stream before them.

Mean squares and variances are float32. Values are rounded to the run dtype where torch's operators round,
see `checkpoint.blueprint.NormKind`.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from checkpoint.blueprint import NormKind
from stage_worker.model.triton_kernels.launch import Launch, padded

_CENTRED = (NormKind.LAYER, NormKind.LAYER_OFFSET)


@dataclass(frozen=True, slots=True, eq=False)
class KernelNorm:
    """A norm as kernels take it. `weight` [width] is in the run dtype for NormKind.RMS, else float32 with the
    offset; `bias` is float32 [width].
    """

    kind: NormKind
    eps: float
    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Norm of `x` [n, width]."""
        found = x.new_empty(x.shape)
        _launch(x, None, None, None, None, self, found)
        return found

    def arguments(self) -> tuple[Any, ...]:
        return self.weight, self.bias, self.eps

    @property
    def rounds_first(self) -> bool:
        return self.kind is NormKind.RMS

    @property
    def is_centred(self) -> bool:
        return self.kind in _CENTRED


@triton.jit
def normed(x, factor, is_column, eps, into, WIDTH: tl.constexpr, ROUNDS: tl.constexpr, CENTRES: tl.constexpr):
    """Rows `x` float32 [rows, columns], zeros outside of `is_column`, normed and times `factor`; `into` is
    the dtype that ROUNDS rounds to before.
    """
    if CENTRES:
        x = tl.where(is_column, x - (tl.sum(x, 1) / WIDTH)[:, None], 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
    if ROUNDS:
        x = x.to(into).to(tl.float32)
    return x * factor


# fmt: off
@triton.jit
def normed_row(
    x, weight, bias, eps, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROUNDS: tl.constexpr,
    CENTRES: tl.constexpr,
):
    """`normed` of one row, with the bias, in the dtype of `x`."""
    columns = tl.arange(0, COLUMNS)[None, :]
    factor = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    found = normed(x.to(tl.float32), factor, columns < WIDTH, eps, x.dtype, WIDTH, ROUNDS, CENTRES)
    if bias is not None:
        found = found + tl.load(bias + columns, mask=columns < WIDTH, other=0.0)
    return found.to(x.dtype)


@triton.jit
def add_norm_kernel(
    residual, residual_stride, added, added_stride, out_weight, out_bias, out_eps, scale, total,
    weight, bias, eps, found, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, OUT_ROUNDS: tl.constexpr,
    OUT_CENTRES: tl.constexpr, ROUNDS: tl.constexpr, CENTRES: tl.constexpr,
):
    """One row: total = residual + scale * norm(added), found = norm(total), without what is None."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)[None, :]
    x = tl.load(residual + row * residual_stride + columns, mask=columns < WIDTH, other=0.0)
    if added is not None:
        y = tl.load(added + row * added_stride + columns, mask=columns < WIDTH, other=0.0)
        if out_weight is not None:
            y = normed_row(y, out_weight, out_bias, out_eps, COLUMNS, WIDTH, OUT_ROUNDS, OUT_CENTRES)
        if scale is not None:
            y = (y.to(tl.float32) * scale).to(x.dtype)
        x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
        tl.store(total + row * WIDTH + columns, x, mask=columns < WIDTH)
    if weight is not None:
        x = normed_row(x, weight, bias, eps, COLUMNS, WIDTH, ROUNDS, CENTRES)
        tl.store(found + row * WIDTH + columns, x, mask=columns < WIDTH)


@triton.jit
def picked_norm_kernel(
    hidden, stride, rows, weight, bias, eps, found, flags, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    ROUNDS: tl.constexpr, CENTRES: tl.constexpr,
):
    """One of `rows`: its norm, and whether it has a NaN or an infinity."""
    place = tl.program_id(0).to(tl.int64)
    row = place
    if rows is not None:
        row = tl.load(rows + place)
    columns = tl.arange(0, COLUMNS)[None, :]
    x = tl.load(hidden + row * stride + columns, mask=columns < WIDTH, other=0.0)
    is_bad = ~(tl.abs(x.to(tl.float32)) < float("inf"))
    tl.store(flags + place, tl.max(tl.max(is_bad.to(tl.int32), 1), 0))
    x = normed_row(x, weight, bias, eps, COLUMNS, WIDTH, ROUNDS, CENTRES)
    tl.store(found + place * WIDTH + columns, x, mask=columns < WIDTH)
# fmt: on


def picked_norm(hidden: Tensor, rows: Tensor | None, norm: KernelNorm) -> tuple[Tensor, Tensor]:
    """Norm [m, width] of `rows` int64 [m] of `hidden` [n, width] (None: all), and flags int32 [m].

    A flag is 1 if its row of `hidden` has a NaN or an infinity.
    """
    num_rows, width = len(hidden) if rows is None else len(rows), hidden.shape[1]
    found = hidden.new_empty(num_rows, width)
    flags = hidden.new_empty(num_rows, dtype=torch.int32)
    constants = {
        "WIDTH": width,
        "COLUMNS": padded(width),
        "ROUNDS": norm.rounds_first,
        "CENTRES": norm.is_centred,
    }
    Launch(picked_norm_kernel, (num_rows,), constants, _num_warps(width))(
        *(hidden, hidden.stride(0), rows, *norm.arguments(), found, flags)
    )
    return found, flags


def _num_warps(width: int) -> int:
    return max(1, min(16, padded(width) // 512))


def add_and_norm(
    residual: Tensor, added: Tensor, out_norm: KernelNorm | None, scale: float, norm: KernelNorm | None
) -> tuple[Tensor, Tensor]:
    """`residual` [n, width] plus `scale` times the norm of `added`, and the sum's norm; both new.

    Without `norm`, the sum itself is the second.
    """
    total = residual.new_empty(residual.shape)
    found = total if norm is None else residual.new_empty(residual.shape)
    _launch(residual, added, out_norm, None if scale == 1.0 else scale, total, norm, found)
    return total, found


def _launch(
    residual: Tensor,
    added: Tensor | None,
    out_norm: KernelNorm | None,
    scale: float | None,
    total: Tensor | None,
    norm: KernelNorm | None,
    found: Tensor,
) -> None:
    num_rows, width = residual.shape
    nothing = (None, None, None)
    constants = {
        "WIDTH": width,
        "COLUMNS": padded(width),
        "OUT_ROUNDS": out_norm is not None and out_norm.rounds_first,
        "OUT_CENTRES": out_norm is not None and out_norm.is_centred,
        "ROUNDS": norm is not None and norm.rounds_first,
        "CENTRES": norm is not None and norm.is_centred,
    }
    Launch(add_norm_kernel, (num_rows,), constants, _num_warps(width))(
        *(residual, residual.stride(0), added, None if added is None else added.stride(0)),
        *(nothing if out_norm is None else out_norm.arguments()),
        *(scale, total),
        *(nothing if norm is None else norm.arguments()),
        found,
    )
