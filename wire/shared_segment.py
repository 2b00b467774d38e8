"""A segment of shared memory: slots for the payloads of one hop, which two processes have mapped."""

import asyncio
import ctypes
import fcntl
import mmap
import os
import struct
import weakref
from collections.abc import Callable
from typing import Protocol, TypeAlias

import xxhash

from wire.errors import StepFault, StepFaultKind
from wire.payloads import Bytes
from wire.staging import HOP_DATA_OFFSET, NUM_HOP_SLOTS

PIECE_BYTES = 1024 * 1024
"""A piece is in the processor's cache when it is hashed."""

_STAMP = struct.Struct("<QQQ")
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Slot: TypeAlias = ctypes.Array[ctypes.c_ubyte]


Release: TypeAlias = Callable[[Callable[[], None]], None]
"""Ends a use of memory, and then calls what it is given; called on any thread, also by a finalizer."""


class MappedMemory:
    """Memory that is unmapped when nothing refers to `content` any longer: a thread may still copy."""

    def __init__(self, memory: mmap.mmap) -> None:
        """Take over the mapping."""
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
        self.content: Slot = (ctypes.c_ubyte * len(memory)).from_address(self.address)
        self._releases: list[Release] = []
        weakref.finalize(self.content, _unmap, memory, self._releases).atexit = False

    @property
    def size_bytes(self) -> int:
        return len(self.content)

    def release_by(self, release: Release) -> None:
        """Let `release` unmap the memory; the caller holds `content` meanwhile. Called once."""
        assert not self._releases, "memory with two uses"
        self._releases.append(release)


def _unmap(memory: mmap.mmap, releases: list[Release]) -> None:
    if releases:
        releases[0](memory.close)
    else:
        memory.close()


class PageLocker(Protocol):
    """Page-locks mapped memory for the copies of a GPU."""

    def lock(self, memory: MappedMemory) -> "asyncio.Future[None]":
        """Lock the memory until it is unmapped. The future raises OSError with the reason."""


class SharedSegment:
    """Slots that two processes have mapped.

    Its size is sealed, so that no process can take away memory that the other one reads.
    """

    def __init__(self, descriptor: int, slot_bytes: int) -> None:
        """Map it; the descriptor is the caller's to close. Raises OSError, ValueError or OverflowError."""
        _check_sealed(descriptor, NUM_HOP_SLOTS * slot_bytes)
        self.memory = MappedMemory(mmap.mmap(descriptor, NUM_HOP_SLOTS * slot_bytes))
        self._slot_bytes = slot_bytes
        self._type = ctypes.c_ubyte * slot_bytes

    def write(self, slot: int, epoch: int, number: int, data: Bytes) -> int:
        """Write a payload into a slot; return its XXH3-64."""
        target, source = self.open(slot), memoryview(data).cast("B")
        checksum = copy_hashed(bytes_of(target, len(source)), source)
        _STAMP.pack_into(target, 0, epoch, number, len(source))
        return checksum

    def open(self, slot: int) -> Slot:
        """The slot, to be written, after which it is sealed: it holds no payload meanwhile."""
        target = self._slot(slot)
        _STAMP.pack_into(target, 0, 0, 0, 0)
        return target

    def seal(self, slot: int, epoch: int, number: int, size_bytes: int) -> int:
        """Let an open slot hold the payload that was written into it; return its XXH3-64."""
        target = self._slot(slot)
        checksum = hashed(bytes_of(target, size_bytes))
        _STAMP.pack_into(target, 0, epoch, number, size_bytes)
        return checksum

    def slot_of(self, data: memoryview) -> int | None:
        """The slot whose payload begins where `data` does; None for other memory."""
        if data.readonly or not data.nbytes:
            return None
        offset = ctypes.addressof(ctypes.c_ubyte.from_buffer(data)) - self.memory.address - HOP_DATA_OFFSET
        slot, rest = divmod(offset, self._slot_bytes)
        return slot if 0 <= slot < NUM_HOP_SLOTS and not rest else None

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
        return self._type.from_buffer(self.memory.content, index * self._slot_bytes)


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


def hashed(data: memoryview) -> int:
    """The XXH3-64."""
    return xxhash.xxh3_64_intdigest(data)
