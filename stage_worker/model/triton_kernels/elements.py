"""Elements of 8 bits, see `kvcache.scaled_pages`: exact conversions by integers, for every GPU.

float8_e4m3fn has hardware conversions from compute capability 8.9 on only.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2 ** 23: adding and subtracting it rounds float32 below 2 ** 22 to whole numbers, half to even."""
_SMALLEST_SCALE = tl.constexpr(2.0**-126)


@triton.jit
def rounded(x):
    """Round float32 of magnitude below 2 ** 22 to whole numbers, half to even, as `torch.round`."""
    return (x + _ROUNDING) - _ROUNDING


@triton.jit
def from_e4m3(codes):
    """Values float32 of uint8 `codes` of finite float8_e4m3fn.

    Its exponent and mantissa, shifted into those of float16, are the value times 2 ** -8.
    """
    wide = codes.to(tl.uint16)
    halves = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def from_e2m1(codes):
    """Values float32 of integer `codes` of E2M1, up to 15.

    Its exponent and mantissa, shifted into those of float16, are the value times 2 ** -14.
    """
    wide = codes.to(tl.uint16)
    halves = ((wide & 0x8) << 12) | ((wide & 0x7) << 9)
    return halves.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def from_e8m0(codes):
    """Powers of two float32 of uint8 `codes` of float8_e8m0fnu up to 254; 0 is 2 ** -127, below normal."""
    wide = codes.to(tl.uint32)
    return tl.where(wide == 0, 0x00400000, wide << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x):
    """Codes uint8 of the nearest float8_e4m3fn of float32 of magnitude up to 448, half to even."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    shifted = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20).to(tl.int32) - (120 << 3)
    small = rounded(tl.abs(x) * 512.0).to(tl.int32)
    codes = tl.where(magnitude < 0x3C800000, small, shifted)  # below 2 ** -6: subnormal
    return (codes | ((bits >> 24) & 0x80).to(tl.int32)).to(tl.uint8)


@triton.jit
def row_scale(largest, LARGEST: tl.constexpr):  # noqa: N803
    """Scale of a row with elements of magnitude up to `largest`; not finite if `largest` is not."""
    scale = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
    return tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)


@triton.jit
def encoded(x, scale, LARGEST: tl.constexpr):  # noqa: N803
    """Elements of `x` float32 over `scale`, of the same shape: codes of fp8, or whole numbers in float32."""
    x = tl.div_rn(x, scale)
    return to_e4m3(x) if LARGEST == 448.0 else rounded(x)
