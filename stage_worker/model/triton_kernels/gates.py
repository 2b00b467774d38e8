"""Activations and gates: float32 inside. Gates are rounded to the run dtype after the activation and after
the product.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from checkpoint.blueprint import Activation, ClampedSwiGlu
from stage_worker.model.triton_kernels.launch import Launch

_COLUMNS = 1024
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_SQRT_TWO_OVER_PI = tl.constexpr(0.7978845608028654)

_CODES = {Activation.SILU: 0, Activation.GELU: 1, Activation.GELU_TANH: 2}
_CLAMPED, _CLAMPED_SILU = 3, 4


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == 0:
        return x * tl.sigmoid(x)
    if ACTIVATION == 1:
        return 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    inner = _SQRT_TWO_OVER_PI * (x + 0.044715 * x * x * x)
    return x * tl.sigmoid(2.0 * inner)  # 0.5 * (1 + tanh(inner)) = sigmoid(2 * inner)


@triton.jit
def softplus(x):
    """log(1 + exp(x)) of float32, as exact as torch's: a sum with 1 loses a small exponential's bits, and the
    logarithm of the rounded sum times their ratio restores them.
    """
    power = tl.exp(x)
    total = power + 1.0
    added = total - 1.0
    found = tl.where(added == 0.0, power, tl.log(total) * (power / tl.where(added == 0.0, 1.0, added)))
    return tl.where(x > 20.0, x, found)


@triton.jit
def _clamped(gate, up, alpha, offset, into):
    """See `ClampedSwiGlu`, of what is within the limits; rounded after each operation."""
    share = tl.sigmoid((gate * alpha).to(into).to(tl.float32)).to(into).to(tl.float32)
    return (share * gate).to(into).to(tl.float32) * (up + offset).to(into).to(tl.float32)


# fmt: off
@triton.jit
def gate_kernel(
    gate_up, stride, found, width, alpha, limit, offset, COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr
):
    """`COLUMNS` columns of one row: grid [rows, blocks of columns]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    into = found.dtype.element_ty
    gate = tl.load(gate_up + row * stride + columns, mask=columns < width, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + columns, mask=columns < width, other=0.0).to(tl.float32)
    if ACTIVATION >= 3:
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    if ACTIVATION == 3:
        product = _clamped(gate, up, alpha, offset, into)
    elif ACTIVATION == 4:
        product = _activated(gate, 0).to(into).to(tl.float32) * up
    else:
        product = _activated(gate, ACTIVATION).to(into).to(tl.float32) * up
    tl.store(found + row * width + columns, product.to(into), mask=columns < width)
# fmt: on


def is_supported(activation: Activation | ClampedSwiGlu) -> bool:
    """Whether `gate` computes it."""
    return isinstance(activation, ClampedSwiGlu) or activation in _CODES


def gate(gate_up: Tensor, activation: Activation | ClampedSwiGlu) -> Tensor:
    """The product of the activated gate and up, [n, width], of both concatenated [n, 2 * width]."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    found = gate_up.new_empty(num_rows, width)
    alpha = limit = offset = None
    if isinstance(activation, ClampedSwiGlu):
        alpha, limit, offset = activation.alpha, activation.limit, activation.offset
        code = _CLAMPED_SILU if (alpha, offset) == (1.0, 0.0) else _CLAMPED
    else:
        code = _CODES[activation]
    constants = {"COLUMNS": _COLUMNS, "ACTIVATION": code}
    Launch(gate_kernel, (num_rows, triton.cdiv(width, _COLUMNS)), constants)(
        gate_up, gate_up.stride(0), found, width, alpha, limit, offset
    )
    return found
