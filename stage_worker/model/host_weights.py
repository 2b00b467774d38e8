"""Weights of a device in memory of the host, in the form in which the device has them, and their way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from stage_worker.model.weight_reads import (
    WINDOW_BYTES,
    CopyEvent,
    DeviceCopies,
    HostBytes,
    HostTable,
    WeightPiece,
    WeightReads,
)

T = TypeVar("T")

_META = torch.device("meta")


class HostCopies(DeviceCopies, Protocol):
    """Copies in both directions; see `DeviceQueue`."""

    def download(self, target: HostBytes, source: Tensor) -> CopyEvent:
        """Copy `source` to `target`, both uint8, after earlier computation."""


@dataclass(frozen=True, slots=True, eq=False)
class HostWeights(Generic[T]):
    """Copies of all tensors of one part, their bytes one after the other in blocks of `WINDOW_BYTES`.

    A device reads tables of n-grams on the host: they are kept as they are.

    Attributes:
        form: The weights, with tensors without content, and the tables.
        blocks: uint8 [`WINDOW_BYTES`] each, the last one shorter; the first `num_pinned` are pinned.
    """

    form: T
    blocks: tuple[HostBytes, ...]
    num_pinned: int

    @classmethod
    def copied(cls, weights: T, copies: HostCopies, *, pinned_limit_bytes: int) -> HostWeights[T]:
        """Copy `weights` from their device; blocks are pinned up to `pinned_limit_bytes`, less the tables.

        Raises errors of the device.
        """
        sources: list[Tensor] = []
        form = with_tensors(weights, partial(_emptied, sources))
        sizes = _block_sizes(sum(source.nbytes for source in sources))
        left_bytes = max(pinned_limit_bytes - _table_bytes(form), 0)
        num_pinned = min(len(sizes), left_bytes // WINDOW_BYTES)
        blocks = [
            copies.host_memory(size) if index < num_pinned else np.empty(size, np.uint8)
            for index, size in enumerate(sizes)
        ]
        started = [
            copies.download(block[place], source)
            for _, block, place, source in _cuts(
                [source.view(-1).view(torch.uint8) for source in sources], blocks
            )
        ]
        for copy in started:
            copy.synchronize()
        return cls(form, tuple(blocks), num_pinned)

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    @property
    def pinned_bytes(self) -> int:
        """Of pinned blocks and of tables."""
        return sum(block.nbytes for block in self.blocks[: self.num_pinned]) + _table_bytes(self.form)

    def restored(self, device: torch.device, reads: WeightReads, on_piece: Callable[[], None]) -> T:
        """New weights on `device`, filled through `reads`, whose copies are to it.

        Pinned blocks are copied as they are, others by the readers into windows. `on_piece` is called after
        each piece; its exceptions end it, as do errors of the device.
        """
        targets: list[Tensor] = []
        weights = with_tensors(self.form, partial(_allocated, targets, device))
        for _ in reads.copy(self._pieces([target.view(-1).view(torch.uint8) for target in targets])):
            on_piece()
        return weights

    def _pieces(self, targets: Sequence[Tensor]) -> Iterator[WeightPiece]:
        for index, block, place, target in _cuts(targets, self.blocks):
            source = block[place]
            if index < self.num_pinned:
                yield WeightPiece(target, _nothing_to_fill, 0, pinned=source)
            else:
                yield WeightPiece(target, partial(_fill_from, source), 0)


def with_tensors(weights: T, replaced: Callable[[Tensor], Tensor]) -> T:
    """`weights` with each tensor of its dataclasses and mappings replaced, in the order of their fields."""
    found: Any = weights
    if isinstance(weights, Tensor):
        found = replaced(weights)
    elif isinstance(weights, Mapping):
        found = {key: with_tensors(value, replaced) for key, value in weights.items()}
    elif is_dataclass(weights) and not isinstance(weights, type):
        changes = {
            field.name: with_tensors(getattr(weights, field.name), replaced) for field in fields(weights)
        }
        found = replace(weights, **changes)
    return found  # type: ignore[no-any-return]


def _table_bytes(weights: object) -> int:
    """Page-locked memory of the tables in `weights`, see `with_tensors`."""
    if isinstance(weights, HostTable):
        return weights.rows.nbytes
    if isinstance(weights, Mapping):
        return sum(map(_table_bytes, weights.values()))
    if is_dataclass(weights) and not isinstance(weights, type):
        return sum(_table_bytes(getattr(weights, field.name)) for field in fields(weights))
    return 0


def _emptied(found: list[Tensor], tensor: Tensor) -> Tensor:
    found.append(tensor.contiguous())  # a copy of keys and values of latents, which are views of one tensor
    return torch.empty_like(found[-1], device=_META)


def _allocated(found: list[Tensor], device: torch.device, form: Tensor) -> Tensor:
    found.append(torch.empty_like(form, device=device))
    return found[-1]


def _block_sizes(num_bytes: int) -> list[int]:
    whole, rest = divmod(num_bytes, WINDOW_BYTES)
    return [WINDOW_BYTES] * whole + [rest] * (rest > 0)


def _cuts(
    tensors: Sequence[Tensor], blocks: Sequence[HostBytes]
) -> Iterator[tuple[int, HostBytes, slice, Tensor]]:
    """Yield number, block, range of its bytes and bytes of a tensor, for uint8 [n] `tensors` one by one."""
    position = 0
    for tensor in tensors:
        done = 0
        while done < len(tensor):
            index, begin = divmod(position, WINDOW_BYTES)
            size = min(len(tensor) - done, WINDOW_BYTES - begin)
            yield index, blocks[index], slice(begin, begin + size), tensor[done : done + size]
            position, done = position + size, done + size


def _nothing_to_fill(memory: Tensor) -> None:
    """A pinned source is copied as it is."""


def _fill_from(source: HostBytes, memory: Tensor) -> None:
    memory.copy_(torch.from_numpy(source))
