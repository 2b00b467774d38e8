"""Few numbers that stand for a hidden state, such that two states are as far apart as these are, about."""

from __future__ import annotations

from array import array
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from wire.reference import NUM_PROJECTIONS


@torch.inference_mode()
def project(hidden: Tensor) -> Tensor:
    """float32 [n, STATE_WIDTH] of `hidden` [n, width]: sums of its elements with fixed signs, and its norm.

    The expected square of a projection is the square of the norm, whatever the state.
    Source: Achlioptas 2003, "Database-friendly random projections".
    """
    wide = hidden.float().cpu()
    return torch.cat((wide @ _signs(wide.shape[1]), wide.norm(dim=1, keepdim=True)), dim=1)


def as_array(states: Tensor) -> array[float]:
    """`states` [n, STATE_WIDTH], row after row."""
    return array("f", states.contiguous().numpy().tobytes())


@lru_cache(maxsize=2)
def _signs(width: int) -> Tensor:
    """float32 [width, NUM_PROJECTIONS] of 1 and -1, the same everywhere: murmur's finalizer of the index."""
    bits = np.arange(width * NUM_PROJECTIONS, dtype=np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    return torch.from_numpy(1.0 - 2.0 * (bits >> np.uint32(31)).astype(np.float32)).view(width, -1)
