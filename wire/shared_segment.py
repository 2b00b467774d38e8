"""Slots for the payloads of one hop, which two processes have mapped: memory of the host, and of a GPU."""

import asyncio
import ctypes
import fcntl
import mmap
import os
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import xxhash

from wire.errors import StepFault, StepFaultKind
from wire.payloads import Bytes
from wire.staging import HOP_DATA_OFFSET, NUM_HOP_SLOTS

PIECE_BYTES = 1024 * 1024
"""A piece is in the processor's cache when it is hashed."""

_STAMP = struct.Struct("<QQQQ")
_IN_SLOT, _ON_DEVICE = range(2)
"""Where the payload of a stamp is: behind it, or in the slot of the same index on a device."""
_NO_ACCESS, _NO_RESERVE = 0, 0x4000
"""PROT_NONE and, which mmap has from Python 3.13 on, MAP_NORESERVE."""
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


class _Slots:
    """Slots of `slot_bytes` in mapped memory."""

    def __init__(self, memory: mmap.mmap, slot_bytes: int) -> None:
        """Take over the mapping."""
        self.memory = MappedMemory(memory)
        self._slot_bytes = slot_bytes
        self._type = ctypes.c_ubyte * slot_bytes

    def slot(self, index: int) -> Slot:
        """The memory of a slot, which stays mapped while this is referenced."""
        return self._type.from_buffer(self.memory.content, index * self._slot_bytes)

    def slot_of(self, data: memoryview) -> int | None:
        """The slot whose payload begins where `data` does; None for other memory."""
        if data.readonly or not data.nbytes:
            return None
        offset = ctypes.addressof(ctypes.c_ubyte.from_buffer(data)) - self.memory.address - HOP_DATA_OFFSET
        slot, rest = divmod(offset, self._slot_bytes)
        return slot if 0 <= slot < NUM_HOP_SLOTS and not rest else None


class SharedSegment(_Slots):
    """Slots that two processes have mapped.

    Its size is sealed, so that no process can take away memory that the other one reads.
    """

    def __init__(self, descriptor: int, slot_bytes: int) -> None:
        """Map it; the descriptor is the caller's to close. Raises OSError, ValueError or OverflowError."""
        _check_sealed(descriptor, NUM_HOP_SLOTS * slot_bytes)
        super().__init__(mmap.mmap(descriptor, NUM_HOP_SLOTS * slot_bytes), slot_bytes)

    def write(self, slot: int, epoch: int, number: int, data: Bytes) -> int:
        """Write a payload into a slot; return its XXH3-64."""
        target, source = self.open(slot), memoryview(data).cast("B")
        checksum = copy_hashed(bytes_of(target, len(source)), source)
        _STAMP.pack_into(target, 0, epoch, number, len(source), _IN_SLOT)
        return checksum

    def open(self, slot: int) -> Slot:
        """The slot, to be written, after which it is sealed: it holds no payload meanwhile."""
        target = self.slot(slot)
        _STAMP.pack_into(target, 0, 0, 0, 0, _IN_SLOT)
        return target

    def seal(self, slot: int, epoch: int, number: int, size_bytes: int) -> int:
        """Let an open slot hold the payload that was written into it; return its XXH3-64."""
        target = self.slot(slot)
        checksum = hashed(bytes_of(target, size_bytes))
        _STAMP.pack_into(target, 0, epoch, number, size_bytes, _IN_SLOT)
        return checksum

    def seal_on_device(self, slot: int, epoch: int, number: int, size_bytes: int) -> None:
        """Let an open slot stand for the payload in the slot of the same index of a `DeviceSegment`."""
        _STAMP.pack_into(self.slot(slot), 0, epoch, number, size_bytes, _ON_DEVICE)

    def is_on_device(self, slot: int) -> bool:
        """The payload that the slot holds is on a device."""
        return int(_STAMP.unpack_from(self.slot(slot))[3]) == _ON_DEVICE

    def find(self, epoch: int, number: int, size_bytes: int) -> int:
        """The slot of a payload.

        Raises StepFault: UNDECODABLE if no slot holds it, SHAPE for another size.
        """
        stamps = [_STAMP.unpack_from(self.slot(index)) for index in range(NUM_HOP_SLOTS)]
        for index, (found_epoch, found_number, found_bytes, _) in enumerate(stamps):
            if (found_epoch, found_number) == (epoch, number):
                if found_bytes == size_bytes:
                    return index
                raise StepFault(
                    StepFaultKind.SHAPE,
                    f"payload {number} has {found_bytes} bytes in its slot, the frame says {size_bytes}",
                )
        held = ", ".join(f"{found[1]} of epoch {found[0]}" for found in stamps)
        raise StepFault(
            StepFaultKind.UNDECODABLE, f"no slot holds payload {number} of epoch {epoch}, but payloads {held}"
        )


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """Bytes of a payload on a device: at `address` there, from byte `offset` of the payload in `slot` on."""

    slots: "DeviceSlots"
    slot: int
    address: int
    offset: int

    def is_with(self, other: "DevicePlace") -> bool:
        """Both are of one payload."""
        return self.slots is other.slots and self.slot == other.slot


class DeviceSlots:
    """Where the slots of a `DeviceSegment` are, without a reference to it.

    `checksums` are those of payloads by slot: of the sender's, as computed, and of the receiver's, as its
    frames say.
    """

    def __init__(self, stand_in: int, slot_bytes: int, address: int) -> None:
        """`stand_in` is the host's address of the first slot, `address` the device's."""
        self.stand_in, self.address = stand_in, address
        self.checksums: dict[int, int] = {}
        self._slot_bytes = slot_bytes

    def find(self, stand_in: int, num_bytes: int) -> DevicePlace | None:
        """The place of `num_bytes` of one slot by their address on the host; None for other memory."""
        slot, rest = divmod(stand_in - self.stand_in, self._slot_bytes)
        if not 0 <= slot < NUM_HOP_SLOTS or rest + num_bytes > self._slot_bytes:
            return None
        return DevicePlace(self, slot, self.address + stand_in - self.stand_in, rest - HOP_DATA_OFFSET)


class DeviceSegment(_Slots):
    """Slots on a device, at addresses of the host that stand for them, and at which nothing can be read.

    So payloads on a device are named and kept like others, and a read of one by mistake ends the process
    instead of finding other bytes. The release of `memory` frees or closes the memory of the device.
    """

    def __init__(self, slot_bytes: int, address: int) -> None:
        """`address` of the first slot on the device. Raises OSError without room for the addresses."""
        super().__init__(_unreadable(NUM_HOP_SLOTS * slot_bytes), slot_bytes)
        self.slots = DeviceSlots(self.memory.address, slot_bytes, address)


@dataclass(frozen=True, slots=True)
class DeviceCard:
    """What a process opens a segment with: the driver's handle, and a checksum of what it finds there."""

    handle: bytes
    proof: int


@dataclass(frozen=True, slots=True)
class ExportedSegment:
    """A `DeviceSegment` that another process may open with `card`.

    Its memory is freed when `lease`, the end of a pipe that goes with the card, is closed everywhere: then
    that process has closed the segment, or has ended.
    """

    segment: DeviceSegment
    card: DeviceCard
    lease: int


class DeviceSharer(Protocol):
    """Shares memory of a device with processes of the same host."""

    def export(self, slot_bytes: int) -> "asyncio.Future[ExportedSegment]":
        """A new segment. The future raises OSError with the reason."""

    def import_(self, slot_bytes: int, card: DeviceCard, lease: int) -> "asyncio.Future[DeviceSegment]":
        """The segment of another process; takes over `lease`. The future raises OSError with the reason."""


def bytes_of(slot: Slot, size_bytes: int) -> memoryview:
    """The bytes of a payload in its slot, which stays while they are referenced."""
    return memoryview(slot).cast("B")[HOP_DATA_OFFSET : HOP_DATA_OFFSET + size_bytes]


def _unreadable(size_bytes: int) -> mmap.mmap:
    """Addresses without memory. Raises OSError."""
    made = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(made))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), _NO_ACCESS):
        raise OSError(ctypes.get_errno(), f"mprotect: {os.strerror(ctypes.get_errno())}")
    return made


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
