"""Memory of hops that a GPU copies from and to: segments that are page-locked, and slots of the way out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from stage_worker.backends.compute_thread import ComputeThread
from wire.shared_segment import MappedMemory, PageLocker

if TYPE_CHECKING:  # a mock stage works without numpy
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

Lend = Callable[[], memoryview | None]
"""Room for the next output in memory of the hop, None without any; see `MemorySender.lend`."""


class PageLocks(Protocol):
    """Page locks of the driver, used by one thread."""

    def begin(self) -> None:
        """Prepare the thread."""

    def lock(self, address: int, size_bytes: int) -> None:
        """Raises OSError with the reason."""

    def unlock(self, address: int) -> None:
        """Raises OSError with the reason."""


class HopMemory(PageLocker):
    """Page-locks segments on a thread of its own, where errors of the driver are nobody else's.

    Memory is unmapped on the same thread, after it is unlocked.
    """

    def __init__(self, locks: PageLocks) -> None:
        self._locks = locks
        self._thread = ComputeThread(on_start=locks.begin, name="hop-memory")
        # Replaced by the thread, and read by others.
        self._locked: tuple[range, ...] = ()
        self._kept: list[Callable[[], None]] = []
        self._lend: Lend | None = None

    @property
    def locked_bytes(self) -> int:
        """Size of all page-locked segments."""
        return sum(map(len, self._locked))

    def lock(self, memory: MappedMemory) -> asyncio.Future[None]:
        return self._thread.submit(self._lock, memory)

    def covers(self, content: NDArray[np.uint8]) -> bool:
        """A GPU copies this memory, contiguous, without a copy by the host."""
        begin, end = content.ctypes.data, content.ctypes.data + content.nbytes
        return any(locked.start <= begin and end <= locked.stop for locked in self._locked)

    def lend_by(self, lend: Lend) -> None:
        """Let outputs be written where `lend` says, from now on."""
        self._lend = lend

    def end_lending(self, lend: Lend) -> None:
        """Let outputs be written in no memory of a hop, unless another one lends by now. Idempotent."""
        if self._lend == lend:
            self._lend = None

    def lend(self) -> memoryview | None:
        """Room for the output of the next step, None without any; called by the compute thread."""
        lend = self._lend
        return None if lend is None else lend()

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
        try:
            self._locks.unlock(address)
        except OSError as error:
            # The driver still has the pages, so that they must stay where they are.
            log.error("memory of a hop stays mapped: %s", error)
            self._kept.append(unmap)
        else:
            unmap()
