"""Memory of hops that a GPU copies from and to.

Segments are page-locked, two processes map slots on the device (CUDA IPC), and outputs are lent room.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from stage_worker.backends.compute_thread import ComputeThread
from wire.shared_segment import (
    DeviceCard,
    DevicePlace,
    DeviceSegment,
    DeviceSharer,
    DeviceSlots,
    ExportedSegment,
    MappedMemory,
    PageLocker,
)
from wire.staging import NUM_HOP_SLOTS

if TYPE_CHECKING:  # a mock stage works without numpy
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

Lend = Callable[[int], memoryview | None]
"""Room for the next output in memory of the hop, None without any; see `MemorySender.lend`."""
GRANULE_BYTES = 2 << 20
"""Smaller allocations may share memory with others of this process, which a handle would export, too."""
LEASE_WARNING_S = 10.0
"""Until memory is logged that the next stage, which has no use for it, has not closed."""


class PageLocks(Protocol):
    """Page locks of the driver, used by one thread."""

    def begin(self) -> None:
        """Prepare the thread."""

    def lock(self, address: int, size_bytes: int) -> None:
        """Raises OSError with the reason."""

    def unlock(self, address: int) -> None:
        """Raises OSError with the reason."""


class DeviceMappings(Protocol):
    """Memory of a device that processes share by the driver's handles, used by one thread.

    All calls raise OSError with the reason.
    """

    def allocate(self, size_bytes: int) -> int:
        """Address of new memory on the device."""

    def free(self, address: int) -> None: ...

    def export(self, address: int) -> bytes:
        """The handle of allocated memory, of 64 bytes."""

    def open(self, handle: bytes) -> int:
        """Address of another process's memory."""

    def close(self, address: int) -> None: ...

    def write_proof(self, address: int) -> int:
        """Write arbitrary bytes there; return their checksum."""

    def read_proof(self, address: int) -> int:
        """The checksum of the bytes that `write_proof` wrote."""


class HopMemory(PageLocker, DeviceSharer):
    """Page-locks segments, and shares memory of the device, on a thread of its own, where errors of the
    driver are nobody else's.

    Memory is unmapped on the same thread, after it is unlocked, or freed or closed on the device.
    """

    def __init__(self, locks: PageLocks, mappings: DeviceMappings | None = None) -> None:
        """Without `mappings`, no memory of the device is shared."""
        self._locks, self._mappings = locks, mappings
        self._thread = ComputeThread(on_start=locks.begin, name="hop-memory")
        # Replaced by the thread, and read by others.
        self._locked: tuple[range, ...] = ()
        self._on_device: tuple[DeviceSlots, ...] = ()
        self._device_bytes = 0
        self._kept: list[Callable[[], None]] = []
        self._lend: Lend | None = None

    @property
    def locked_bytes(self) -> int:
        """Size of all page-locked segments."""
        return sum(map(len, self._locked))

    @property
    def device_bytes(self) -> int:
        """Memory of the device that is allocated for other processes."""
        return self._device_bytes

    @property
    def shares_device(self) -> bool:
        """Memory of the device can be shared, unless the driver refuses."""
        return self._mappings is not None

    def lock(self, memory: MappedMemory) -> asyncio.Future[None]:
        return self._thread.submit(self._lock, memory)

    def export(self, slot_bytes: int) -> asyncio.Future[ExportedSegment]:
        return self._thread.submit(self._export, slot_bytes)

    def import_(self, slot_bytes: int, card: DeviceCard, lease: int) -> asyncio.Future[DeviceSegment]:
        return self._thread.submit(self._import, slot_bytes, card, lease)

    def covers(self, content: NDArray[np.uint8]) -> bool:
        """A GPU copies this memory, contiguous, without a copy by the host."""
        begin, end = content.ctypes.data, content.ctypes.data + content.nbytes
        return any(locked.start <= begin and end <= locked.stop for locked in self._locked)

    def place_of(self, content: NDArray[np.uint8]) -> DevicePlace | None:
        """Where on the device the bytes are that `content`, contiguous, stands for; None for other memory."""
        for slots in self._on_device:
            if (place := slots.find(content.ctypes.data, content.nbytes)) is not None:
                return place
        return None

    def lend_by(self, lend: Lend) -> None:
        """Let outputs be written where `lend` says, from now on."""
        self._lend = lend

    def end_lending(self, lend: Lend) -> None:
        """Let outputs be written in no memory of a hop, unless another one lends by now. Idempotent."""
        if self._lend == lend:
            self._lend = None

    def lend(self, num_bytes: int) -> memoryview | None:
        """Room for the next step's output of `num_bytes`, None without any; called by the compute thread."""
        lend = self._lend
        return None if lend is None else lend(num_bytes)

    def stop(self, *, timeout_s: float) -> bool:
        """Returns False if the driver is still busy."""
        return self._thread.stop(timeout_s=timeout_s)

    def _lock(self, memory: MappedMemory) -> None:
        self._locks.lock(memory.address, memory.size_bytes)
        memory.release_by(partial(self._release_later, memory.address))
        self._locked = (*self._locked, range(memory.address, memory.address + memory.size_bytes))

    def _release_later(self, address: int, unmap: Callable[[], None]) -> None:
        self._thread.post(self._release, address, unmap)

    def _release(self, address: int, unmap: Callable[[], None]) -> None:
        self._locked = tuple(locked for locked in self._locked if locked.start != address)
        self._unmap_after(partial(self._locks.unlock, address), unmap)

    def _unmap_after(self, end: Callable[[], None], unmap: Callable[[], None]) -> None:
        try:
            end()
        except OSError as error:
            # The driver still has the pages, so that they must stay where they are.
            log.error("memory of a hop stays mapped: %s", error)
            self._kept.append(unmap)
        else:
            unmap()

    def _export(self, slot_bytes: int) -> ExportedSegment:
        mappings = self._usable()
        size_bytes = -(-NUM_HOP_SLOTS * slot_bytes // GRANULE_BYTES) * GRANULE_BYTES
        address = mappings.allocate(size_bytes)
        try:
            card = DeviceCard(mappings.export(address), mappings.write_proof(address))
            segment = DeviceSegment(slot_bytes, address)
        except BaseException:
            mappings.free(address)
            raise
        self._device_bytes += size_bytes
        watched, lease = os.pipe2(os.O_CLOEXEC)
        self._note(segment.slots, segment.memory, partial(self._free_after, watched, address, size_bytes))
        return ExportedSegment(segment, card, lease)

    def _import(self, slot_bytes: int, card: DeviceCard, lease: int) -> DeviceSegment:
        try:
            mappings = self._usable()
            address = mappings.open(card.handle)
        except OSError:
            os.close(lease)
            raise
        try:
            if (found := mappings.read_proof(address)) != card.proof:
                raise OSError(f"other memory was opened: checksum {found:016x}, expected {card.proof:016x}")
            segment = DeviceSegment(slot_bytes, address)
        except BaseException:
            self._close(address, lease)
            raise
        self._note(segment.slots, segment.memory, partial(self._close_on_thread, address, lease))
        return segment

    def _usable(self) -> DeviceMappings:
        if self._mappings is None:
            raise OSError("memory of this device is not shared")
        return self._mappings

    def _note(self, slots: DeviceSlots, memory: MappedMemory, release: Callable[..., None]) -> None:
        """Find places in `slots` until the memory is released."""

        def begin_release(unmap: Callable[[], None]) -> None:
            self._thread.post(self._drop, slots)
            release(unmap)

        memory.release_by(begin_release)
        self._on_device = (*self._on_device, slots)

    def _drop(self, slots: DeviceSlots) -> None:
        self._on_device = tuple(known for known in self._on_device if known is not slots)

    def _close_on_thread(self, address: int, lease: int, unmap: Callable[[], None]) -> None:
        self._thread.post(self._unmap_after, partial(self._close, address, lease), unmap)

    def _close(self, address: int, lease: int) -> None:
        """Close another process's memory; with its lease, that process may free it."""
        self._usable().close(address)
        os.close(lease)

    def _free_after(self, watched: int, address: int, size_bytes: int, unmap: Callable[[], None]) -> None:
        # A finalizer may run this amid any other code, and must start no thread.
        self._thread.post(self._await_lease, watched, address, size_bytes, unmap)

    def _await_lease(self, watched: int, address: int, size_bytes: int, unmap: Callable[[], None]) -> None:
        """Free exported memory once no other process has it open, or none of them exists."""
        free = partial(self._free, address, size_bytes)

        def wait() -> None:
            _wait_for_end(watched, size_bytes)
            self._thread.post(self._unmap_after, free, unmap)

        threading.Thread(target=wait, name="hop-lease", daemon=True).start()

    def _free(self, address: int, size_bytes: int) -> None:
        self._usable().free(address)
        self._device_bytes -= size_bytes


def _wait_for_end(watched: int, size_bytes: int) -> None:
    """Wait until no process has the other end of the pipe."""
    waiting = select.poll()
    waiting.register(watched, 0)  # its end is always reported
    if not waiting.poll(LEASE_WARNING_S * 1e3):
        log.warning("the next stage has not closed %d bytes of this device: they stay allocated", size_bytes)
        waiting.poll()
    os.close(watched)
