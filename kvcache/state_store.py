"""Tensors behind the recurrent states of one stage's layers, slot by slot."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvcache.states import SlotChange

_CPU_ALIGNMENT = 64
"""Bytes: a cache line, as torch aligns its own CPU tensors. numpy aligns to 16 only."""


Part = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a part of a state."""


class StateStore:
    """`num_states` slots for the states of recurrent layers, counted from 0.

    A state has several parts. Part i of all layers that have one of its shape is a tensor
    [layers, num_states, *shape].
    """

    def __init__(
        self, *, layers: Sequence[Sequence[Part]], num_states: int, device: torch.device | str
    ) -> None:
        """`layers` have the parts of each layer. A CPU commits memory when a slot is first written."""
        self.num_layers, self.num_states = len(layers), num_states
        if self.num_layers < 1 or num_states < 1:
            raise ValueError(
                f"states for {self.num_layers} layers in {num_states} slots, both must be at least 1"
            )
        owners: dict[tuple[int, Part], list[int]] = {}
        for layer, parts in enumerate(layers):
            for place, part in enumerate(parts):
                owners.setdefault((place, part), []).append(layer)
        self._parts: list[Tensor] = []
        self._layers: list[list[Tensor]] = [[] for _ in layers]
        for (_, (shape, dtype)), of_part in sorted(owners.items(), key=lambda item: item[0][0]):
            stored = zeros((len(of_part), num_states, *shape), dtype, torch.device(device))
            self._parts.append(stored)
            for layer, own in zip(of_part, stored, strict=True):
                self._layers[layer].append(own)

    @property
    def size_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self._parts)

    def layer(self, layer: int) -> list[Tensor]:
        """The parts of one layer, [num_states, *shape] each, not copies."""
        return self._layers[layer]

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
