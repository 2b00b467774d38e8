"""Values of the blocks of GGUF's quantised types: computed in float32, in the order of operations of ggml.

Source: ggml-quants.c of llama.cpp, and the `gguf` package's dequantisers, whose bits these are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from checkpoint.dtypes import BlockDType

_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)
_E2M1_DOUBLED = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32)
_E8M0_HALVED = torch.tensor([2.0 ** (code - 128) for code in range(256)], dtype=torch.float32)
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ4_VALUES = torch.tensor(_IQ4, dtype=torch.float32)


def block_values(dtype: BlockDType, octets: Tensor) -> Tensor:
    """Values, float32 [blocks, elements], of blocks, uint8 [blocks, bytes]."""
    return _FORMATS[dtype](octets)


def _half(octets: Tensor) -> Tensor:
    """A float16 number of each block [blocks, 2], as float32 [blocks, 1]."""
    return octets.contiguous().view(torch.float16).float()


def _planes(octets: Tensor, width: int, bits: int) -> Tensor:
    """Numbers of `bits` bits, uint8 [blocks, n]: of each `width` bytes the lowest bits, then the next."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(1, 1, -1, 1)
    groups = octets.reshape(len(octets), -1, 1, width)
    return ((groups >> shifts) & ((1 << bits) - 1)).flatten(1)


def _scaled(scales: Tensor, numbers: Tensor) -> Tensor:
    """Products of `scales` [blocks, groups] with the groups of `numbers` [blocks, n]."""
    grouped = numbers.float().view(*scales.shape, -1)
    return grouped.mul_(scales.unsqueeze(-1)).flatten(1)


def _shifted(scales: Tensor, numbers: Tensor, minima: Tensor) -> Tensor:
    """Like `_scaled`, minus the minimum of each group."""
    products = _scaled(scales, numbers).view(*scales.shape, -1)
    return products.sub_(minima.unsqueeze(-1)).flatten(1)


def _q4_0(octets: Tensor) -> Tensor:
    return _scaled(_half(octets[:, :2]), _planes(octets[:, 2:], 16, 4).to(torch.int8) - 8)


def _q4_1(octets: Tensor) -> Tensor:
    return _scaled(_half(octets[:, :2]), _planes(octets[:, 4:], 16, 4)).add_(_half(octets[:, 2:4]))


def _fifth_bits(high: Tensor, low: Tensor) -> Tensor:
    return _planes(low, 16, 4) | (_planes(high, 1, 1) << 4)


def _q5_0(octets: Tensor) -> Tensor:
    numbers = _fifth_bits(octets[:, 2:6], octets[:, 6:]).to(torch.int8) - 16
    return _scaled(_half(octets[:, :2]), numbers)


def _q5_1(octets: Tensor) -> Tensor:
    numbers = _fifth_bits(octets[:, 4:8], octets[:, 8:])
    return _scaled(_half(octets[:, :2]), numbers).add_(_half(octets[:, 2:4]))


def _q8_0(octets: Tensor) -> Tensor:
    return _scaled(_half(octets[:, :2]), octets[:, 2:].contiguous().view(torch.int8))


def _q2_k(octets: Tensor) -> Tensor:
    packed = octets[:, :16]
    scales = _half(octets[:, 80:82]) * (packed & 15).float()
    minima = _half(octets[:, 82:]) * (packed >> 4).float()
    return _shifted(scales, _planes(octets[:, 16:80], 32, 2), minima)


def _q3_k(octets: Tensor) -> Tensor:
    six_bits = _planes(octets[:, 96:104], 8, 4) | (_planes(octets[:, 104:108], 4, 2) << 4)
    scales = _half(octets[:, 108:]) * (six_bits.to(torch.int8) - 32).float()
    is_negative = _planes(octets[:, :32], 32, 1) ^ 1
    numbers = _planes(octets[:, 32:96], 32, 2).to(torch.int8) - (is_negative << 2).to(torch.int8)
    return _scaled(scales, numbers)


def _scales_and_minima(octets: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and minima of 6 bits, float32 [blocks, 8] each, of the first 16 bytes of a block."""
    low, middle, high = octets[:, 4:8], octets[:, 8:12], octets[:, 12:16]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), dim=-1).float()
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), dim=-1).float()
    return scales.mul_(_half(octets[:, :2])), minima.mul_(_half(octets[:, 2:4]))


def _q4_k(octets: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(octets)
    return _shifted(scales, _planes(octets[:, 16:], 32, 4), minima)


def _q5_k(octets: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(octets)
    numbers = _planes(octets[:, 48:], 32, 4) | (_planes(octets[:, 16:48], 32, 1) << 4)
    return _shifted(scales, numbers, minima)


def _q6_k(octets: Tensor) -> Tensor:
    numbers = _planes(octets[:, :128], 64, 4) | (_planes(octets[:, 128:192], 32, 2) << 4)
    scales = octets[:, 192:208].contiguous().view(torch.int8).float() * _half(octets[:, 208:])
    return _scaled(scales, numbers.to(torch.int8) - 32)


def _iq4_nl(octets: Tensor) -> Tensor:
    return _scaled(_half(octets[:, :2]), _IQ4_VALUES[_planes(octets[:, 2:], 16, 4).int()])


def _iq4_xs(octets: Tensor) -> Tensor:
    six_bits = _planes(octets[:, 4:8], 1, 4) | (_planes(octets[:, 2:4], 1, 2) << 4)
    scales = _half(octets[:, :2]) * (six_bits.to(torch.int8) - 32).float()
    return _scaled(scales, _IQ4_VALUES[_planes(octets[:, 8:], 16, 4).int()])


def _mxfp4(octets: Tensor) -> Tensor:
    return _scaled(_E8M0_HALVED[octets[:, :1].int()], _E2M1_DOUBLED[_planes(octets[:, 1:], 16, 4).int()])


_FORMATS: dict[BlockDType, Callable[[Tensor], Tensor]] = {
    BlockDType.Q4_0: _q4_0,
    BlockDType.Q4_1: _q4_1,
    BlockDType.Q5_0: _q5_0,
    BlockDType.Q5_1: _q5_1,
    BlockDType.Q8_0: _q8_0,
    BlockDType.Q2_K: _q2_k,
    BlockDType.Q3_K: _q3_k,
    BlockDType.Q4_K: _q4_k,
    BlockDType.Q5_K: _q5_k,
    BlockDType.Q6_K: _q6_k,
    BlockDType.IQ4_NL: _iq4_nl,
    BlockDType.IQ4_XS: _iq4_xs,
    BlockDType.MXFP4: _mxfp4,
}
