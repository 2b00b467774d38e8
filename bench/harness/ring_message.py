"""Messages of the raw ring, with as many bytes per hop as in a ring of stages. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum

_HEAD = struct.Struct("<II")
_ZEROS = bytes(32 << 20)


class Place(StrEnum):
    """Position of a node in the ring."""

    FIRST = "first"
    MIDDLE = "middle"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Lap:
    """Bytes on each hop: the step alone to FIRST, step and hidden states between stages, the result from
    LAST.
    """

    step_bytes: int
    hidden_bytes: int
    result_bytes: int

    def message(self) -> bytes:
        """First message; has at least the two numbers that nodes need."""
        return _HEAD.pack(self.hidden_bytes, self.result_bytes) + _ZEROS[: self.step_bytes - _HEAD.size]


SLICE_BYTES, TOKEN_BYTES, RESULT_BYTES = 80, 3, 40
"""Approximate bytes of a slice with key and signals, of a prompt token, and of one slice's result."""
BF16_BYTES = 2


def lap_of_step(num_slices: int, num_tokens: int, *, hidden_size: int) -> Lap:
    """The lap of a step of decodes, or of prompt chunks if there are more tokens than slices."""
    prompt_bytes = TOKEN_BYTES * num_tokens if num_tokens > num_slices else 0
    return Lap(
        SLICE_BYTES * num_slices + prompt_bytes,
        num_tokens * hidden_size * BF16_BYTES,
        RESULT_BYTES * num_slices,
    )


def passed_on(message: bytes, place: Place) -> bytes:
    """The message that a node sends on."""
    if place is Place.MIDDLE:
        return message
    hidden_bytes, result_bytes = _HEAD.unpack_from(message)
    if place is Place.FIRST:
        return message + _ZEROS[:hidden_bytes]
    return message[: _HEAD.size] + _ZEROS[: result_bytes - _HEAD.size]
