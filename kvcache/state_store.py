"""Tensors behind the recurrent states of one stage's layers, slot by slot."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvcache.states import SlotChange

_CPU_ALIGNMENT = 64
"""Bytes: a cache line, as torch aligns its own CPU tensors. numpy aligns to 16 only."""


class StateStore:
    """`num_states` slots for the states of `num_layers` recurrent layers, counted from 0.

    A state has several parts, which all layers share the shape of: part i of all layers is a tensor
    [num_layers, num_states, *shape].
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_states: int,
        parts: Sequence[tuple[tuple[int, ...], torch.dtype]],
        device: torch.device | str,
    ) -> None:
        """`parts` are shapes and dtypes. A CPU commits memory when a slot is first written."""
        if num_layers < 1 or num_states < 1:
            raise ValueError(f"states for {num_layers} layers in {num_states} slots, both must be at least 1")
        self.num_layers, self.num_states = num_layers, num_states
        self._parts = [
            zeros((num_layers, num_states, *shape), dtype, torch.device(device)) for shape, dtype in parts
        ]

    @property
    def size_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self._parts)

    def layer(self, layer: int) -> list[Tensor]:
        """The parts of one layer, [num_states, *shape] each, not copies."""
        return [part[layer] for part in self._parts]

    def change(self, changes: Sequence[SlotChange]) -> None:
        """Set whole slots to zero or to copies of others, in all layers, in order."""
        for target, source in changes:
            for part in self._parts:
                if source is None:
                    part[:, target].zero_()
                else:
                    part[:, target].copy_(part[:, source])


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros like torch.zeros, which writes all bytes on a CPU; numpy gets zeroed memory."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(size + _CPU_ALIGNMENT, np.uint8))
    start = -memory.data_ptr() % _CPU_ALIGNMENT
    return memory[start : start + size].view(dtype).view(shape)
