"""Hidden states in one byte per element: each row is divided by a scale of its own, which makes its largest
magnitude that of the element type, and rounded to the nearest elements.

A row with the largest magnitude m has the scale s = max(m / 448, 2 ** -126) in fp8, and in int8
s = max(m / 127, 2 ** -126). Its element x comes back as y with

    fp8    |x - y| <= max(|x| / 16, s / 1024)
    int8   |x - y| <= s / 2

and both up to the rounding of float32 and then of the run dtype. Zeros stay zeros. A row with anything
that is not finite has a scale that is not finite either, and comes back without one finite element.
"""

import torch
from torch import Tensor

from wire.wire_dtypes import ScaledDType

_ELEMENTS = {ScaledDType.F8_E4M3: torch.float8_e4m3fn, ScaledDType.I8: torch.int8}
_LARGEST = {ScaledDType.F8_E4M3: 448.0, ScaledDType.I8: 127.0}
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny

# Of every byte, as converting float8 takes a CPU five times as long as looking it up.
_F8_VALUES = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()


def scale_rows(hidden: Tensor, dtype: ScaledDType) -> Tensor:
    """The payload uint8 of `hidden` [n, width]: the elements of all rows, then their n scales."""
    wide = hidden.float()
    # A smaller scale would be subnormal, a row divided by it could overflow, and zeros need some scale.
    scales = (wide.abs().amax(dim=1, keepdim=True) / _LARGEST[dtype]).clamp_(min=_SMALLEST_SCALE)
    scaled = wide / scales
    if dtype is ScaledDType.I8:
        scaled = scaled.round_()
    elements = scaled.to(_ELEMENTS[dtype])
    return torch.cat((elements.view(torch.uint8).flatten(), scales.view(torch.uint8).flatten()))


def unscale_rows(payload: Tensor, dtype: ScaledDType, shape: tuple[int, int], into: torch.dtype) -> Tensor:
    """The hidden states [n, width] in `into` behind a payload uint8; does not modify it."""
    num_elements = shape[0] * shape[1]
    # Behind an odd number of elements the scales lie where no float32 may; a copy does not.
    scales = payload[num_elements:].clone().view(torch.float32)
    return _wide(payload[:num_elements], dtype).view(shape).mul_(scales[:, None]).to(into)


def _wide(elements: Tensor, dtype: ScaledDType) -> Tensor:
    """float32, in memory of its own."""
    if dtype is ScaledDType.F8_E4M3 and not elements.is_cuda:
        return _F8_VALUES.index_select(0, elements.int())
    return elements.view(_ELEMENTS[dtype]).float()
