"""A segment of shared memory: slots for the payloads of one hop, which two processes have mapped."""

import ctypes
import fcntl
import mmap
import os
import struct
from typing import TypeAlias

import xxhash

from wire.errors import StepFault, StepFaultKind
from wire.payloads import Bytes
from wire.staging import HOP_DATA_OFFSET, NUM_HOP_SLOTS

PIECE_BYTES = 1024 * 1024
"""A piece is in the processor's cache when it is hashed."""

_STAMP = struct.Struct("<QQQ")
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Slot: TypeAlias = ctypes.Array[ctypes.c_ubyte]


class SharedSegment:
    """Slots that two processes have mapped.

    Its size is sealed, so that no process can take away memory that the other one reads.
    """

    def __init__(self, descriptor: int, slot_bytes: int) -> None:
        """Map it; the descriptor is the caller's to close. Raises OSError, ValueError or OverflowError."""
        _check_sealed(descriptor, NUM_HOP_SLOTS * slot_bytes)
        # Unmapped when nothing refers to it: a thread may still copy.
        self._memory = mmap.mmap(descriptor, NUM_HOP_SLOTS * slot_bytes)
        self._slot_bytes = slot_bytes
        self._type = ctypes.c_ubyte * slot_bytes

    def write(self, slot: int, epoch: int, number: int, data: Bytes) -> int:
        """Write a payload into a slot; return its XXH3-64."""
        target, source = self._slot(slot), memoryview(data).cast("B")
        _STAMP.pack_into(target, 0, 0, 0, 0)
        checksum = copy_hashed(bytes_of(target, len(source)), source)
        _STAMP.pack_into(target, 0, epoch, number, len(source))
        return checksum

    def find(self, epoch: int, number: int, size_bytes: int) -> Slot:
        """The slot of a payload.

        Raises StepFault: UNDECODABLE if no slot holds it, SHAPE for another size.
        """
        slots = [self._slot(index) for index in range(NUM_HOP_SLOTS)]
        stamps = [_STAMP.unpack_from(slot) for slot in slots]
        for slot, (found_epoch, found_number, found_bytes) in zip(slots, stamps, strict=True):
            if (found_epoch, found_number) == (epoch, number):
                if found_bytes == size_bytes:
                    return slot
                raise StepFault(
                    StepFaultKind.SHAPE,
                    f"payload {number} has {found_bytes} bytes in its slot, the frame says {size_bytes}",
                )
        held = ", ".join(f"{found_number} of epoch {found_epoch}" for found_epoch, found_number, _ in stamps)
        raise StepFault(
            StepFaultKind.UNDECODABLE, f"no slot holds payload {number} of epoch {epoch}, but payloads {held}"
        )

    def _slot(self, index: int) -> Slot:
        return self._type.from_buffer(self._memory, index * self._slot_bytes)


def bytes_of(slot: Slot, size_bytes: int) -> memoryview:
    """The bytes of a payload in its slot, which stays while they are referenced."""
    return memoryview(slot).cast("B")[HOP_DATA_OFFSET : HOP_DATA_OFFSET + size_bytes]


def new_segment(slot_bytes: int) -> int:
    """Descriptor of a segment whose size is fixed. Raises OSError or OverflowError."""
    descriptor = os.memfd_create("stageline-payloads", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, NUM_HOP_SLOTS * slot_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_sealed(descriptor: int, size_bytes: int) -> None:
    """Raises ValueError for a segment of another size, or with a size that may change; OSError for a file."""
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _FIXED_SIZE != _FIXED_SIZE:
        raise ValueError("the size of the segment is not sealed")
    if (actual := os.fstat(descriptor).st_size) != size_bytes:
        raise ValueError(f"the segment has {actual} bytes, expected {size_bytes}")


def copy_hashed(target: memoryview, source: memoryview) -> int:
    """Copy; return the XXH3-64 of the copy."""
    digest = xxhash.xxh3_64()
    for begin in range(0, len(source), PIECE_BYTES):
        piece = target[begin : begin + PIECE_BYTES]
        piece[:] = source[begin : begin + PIECE_BYTES]
        digest.update(piece)
    return digest.intdigest()
