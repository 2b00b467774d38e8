"""Checksum of a payload that stays on a device: computed where it is sent, and where it is taken.

Of words w(i), int32 little-endian, with i from 0 on in the whole payload, modulo 2**64:

    h(i) = (w(i) + (i + 1) * A) * B;  h ^= h >> 32;  h *= C;  h ^= h >> 29;  checksum = sum of h(i)

Shifts are arithmetic. The sum does not depend on how the words are split and ordered in its computation, but
words at other places give another checksum. It finds accidents, such as a slot that is overwritten, and is no
defence: who can write into the memory of a device can do anything. Multipliers: golden ratio, and those of
MurmurHash3's 64-bit finalizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stage_worker.model.kernels import load_triton
from wire.errors import StepFault, StepFaultKind
from wire.shared_segment import DevicePlace
from wire.staging import WORD_BYTES

Checksum = Callable[[Tensor, int], Tensor]
"""The sum int64 [1] over words int32 [n], of which the first has the given index."""

_BIG = 1 << 64
_PIECE_WORDS = 1 << 20


def _signed(value: int) -> int:
    return value - _BIG if value >= _BIG >> 1 else value


PLACE, FIRST, SECOND = (_signed(x) for x in (0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53))


def plain_checksum(words: Tensor, first: int) -> Tensor:
    """By torch's operators, on any device, in pieces: each takes eight times its memory."""
    sums = [
        _piece_sum(words[begin : begin + _PIECE_WORDS], first + begin)
        for begin in range(0, max(1, len(words)), _PIECE_WORDS)
    ]
    return torch.stack(sums).sum(dtype=torch.int64).view(1)


def _piece_sum(words: Tensor, first: int) -> Tensor:
    places = torch.arange(first + 1, first + 1 + len(words), dtype=torch.int64, device=words.device)
    mixed = (words.to(torch.int64) + places * PLACE) * FIRST
    mixed = (mixed ^ (mixed >> 32)) * SECOND
    return (mixed ^ (mixed >> 29)).sum(dtype=torch.int64)


def checksum_of(*, has_triton: bool) -> Checksum:
    """A kernel where Triton has those of a stage, else `plain_checksum`."""
    if not has_triton:
        return plain_checksum
    found: Checksum = load_triton("payload_sums").checksum
    return found


@dataclass(slots=True)
class DeviceSum:
    """The checksum of one payload on a device, `expected` unless this step leaves it there.

    `parts` int64 [1] add up to it; `downloaded` is the sum, once the download has ended.
    """

    place: DevicePlace
    expected: int | None
    parts: list[Tensor] = field(default_factory=list)
    downloaded: memoryview | bytes = b""

    def total(self) -> Tensor:
        return self.parts[0] if len(self.parts) == 1 else torch.stack(self.parts).sum(0)

    def settle(self) -> None:
        """Note the checksum of what was left, or compare that of what was taken. Raises StepFault."""
        actual = int.from_bytes(self.downloaded, "little")
        if self.expected is None:
            self.place.slots.checksums[self.place.slot] = actual
        elif self.expected != actual:
            raise StepFault(
                StepFaultKind.CHECKSUM,
                f"checksum of a payload on a device: expected {self.expected:016x}, got {actual:016x}",
            )


def words_or_bytes(tensor: Tensor) -> Tensor:
    """All bytes, contiguous: int32 [n] if they are whole words, else uint8 [n]."""
    content = tensor.contiguous().flatten().view(torch.uint8)
    if content.nbytes % WORD_BYTES:
        return content
    return (content.clone() if content.storage_offset() % WORD_BYTES else content).view(torch.int32)
