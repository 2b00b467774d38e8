"""Resources held by this process: tasks, calls, file descriptors, requests, memory."""

import asyncio
import contextlib
import ctypes
import gc
from collections import Counter
from dataclasses import astuple, dataclass

import psutil

from coordinator.engine.output_buffer import OutputBuffer
from coordinator.engine.output_stream import OutputStream
from coordinator.engine.request import Request
from coordinator.scheduler.sequence import Sequence

_CALLS = ("_ServicerContext", "_AioCall")
"""Types of grpc's C core, one per served and one per made call; known only by name."""

_REQUESTS = (Request, OutputStream, OutputBuffer, Sequence)


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Counts of one moment."""

    tasks: int
    calls: int
    descriptors: int
    requests: int

    @classmethod
    def now(cls) -> "Footprint":
        """Count after a garbage collection."""
        gc.collect()
        types = Counter(map(type, gc.get_objects()))
        names = Counter({kind.__name__: count for kind, count in types.items() if kind.__name__ in _CALLS})
        return cls(
            tasks=len(asyncio.all_tasks()),
            calls=names.total(),
            descriptors=psutil.Process().num_fds(),
            requests=sum(types[kind] for kind in _REQUESTS),
        )

    def is_within(self, other: "Footprint") -> bool:
        """Return whether no count exceeds the other's."""
        return all(mine <= theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True))


def resident_bytes() -> int:
    """Resident memory of this process, without what its allocator can return to the system."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)
