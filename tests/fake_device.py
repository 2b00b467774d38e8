"""A device whose copies and computation end when a test says so, on memory of the host.

What was not waited for has other bytes: a download arrives when its event ends. A device can fail, and then
does so at every later call.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stage_worker.backends.contract import DeviceError
from stage_worker.backends.hop_memory import DeviceMappings, PageLocks
from stage_worker.backends.transfers import DeviceQueue, Event
from stage_worker.model.attention_views import HostArray
from tests.host_checksum import host_checksum

GARBAGE = 0xA5
PROOF_BYTES = 256


@dataclass(eq=False)
class _Download(Event):
    queue: FakeQueue
    target: HostArray
    content: HostArray
    ended: threading.Event = field(default_factory=threading.Event)

    def query(self) -> bool:
        self.queue.check()
        return self.ended.is_set()

    def synchronize(self) -> None:
        self.ended.wait()
        self.queue.check()


class _Ended(Event):
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class FakeQueue(DeviceQueue):
    """Downloads end in their order: at once, or by `end_oldest`. `refusal` refuses to page-lock memory.

    `computation` is queued by a test, and runs late: when uploads wait for it.
    """

    def __init__(self, *, is_manual: bool = False) -> None:
        self.is_manual = is_manual
        self.failure: str | None = None
        self.running: deque[_Download] = deque()
        self.num_uploads = self.locked_bytes = 0
        self.refusal = ""
        self.computation: list[Callable[[], None]] = []
        self._started = threading.Semaphore(0)

    def host_memory(self, num_bytes: int) -> HostArray:
        return np.full(num_bytes, GARBAGE, np.uint8)

    def locked_memory(self, num_bytes: int) -> HostArray:
        if self.refusal:
            raise OSError(self.refusal)
        self.locked_bytes += num_bytes
        return np.full(num_bytes, GARBAGE, np.uint8)

    def device_memory(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), GARBAGE, dtype=torch.uint8)

    def fence_uploads(self) -> None:
        while self.computation:
            self.computation.pop(0)()

    def upload(self, target: Tensor, source: HostArray) -> Event:
        self.check()
        self.num_uploads += 1
        target.copy_(torch.from_numpy(source))
        return _Ended()

    def download(self, target: HostArray, source: Tensor) -> Event:
        self.check()
        target[:] = GARBAGE
        download = _Download(self, target, source.clone().numpy())
        self.running.append(download)
        self._started.release()
        if not self.is_manual:
            self.end_oldest()
        return download

    def end_oldest(self) -> None:
        """End the oldest download; waits for one."""
        assert self._started.acquire(timeout=30), "no step was begun"
        download = self.running.popleft()
        download.target[:] = download.content
        download.target = download.content  # an event that has ended holds no memory
        download.ended.set()

    def fail(self, failure: str) -> None:
        """The device fails with all that it has not ended, and never recovers."""
        self.failure = failure
        while self.running:
            self._started.acquire()
            self.running.popleft().ended.set()

    def check(self) -> None:
        if self.failure is not None:
            raise DeviceError(self.failure)

    def copy_out(self, address: int, source: Tensor) -> None:
        self.check()
        assert source.is_contiguous()
        ctypes.memmove(address, source.data_ptr(), source.nbytes)

    def copy_in(self, target: Tensor, address: int) -> Event:
        self.check()
        assert target.is_contiguous()
        ctypes.memmove(target.data_ptr(), address, target.nbytes)
        return _Ended()

    def read(self, address: int, num_bytes: int) -> HostArray:
        self.check()
        return np.frombuffer(ctypes.string_at(address, num_bytes), np.uint8)

    def synchronize(self) -> None:
        for download in list(self.running):
            download.ended.wait()
        self.check()


class FakeGpu:
    """Memory of a device, for the mappings of several processes; to free what is open is an error."""

    def __init__(self) -> None:
        self.memory: dict[int, ctypes.Array[ctypes.c_ubyte]] = {}
        self.handles: dict[bytes, int] = {}
        self.num_open: dict[int, int] = {}
        self.errors: list[str] = []


class FakeMappings(DeviceMappings):
    """A process's mappings of memory of `gpu`; `refusal` refuses to open it, `full` to allocate."""

    def __init__(self, gpu: FakeGpu, *, refusal: str = "", full: str = "") -> None:
        self.gpu, self.refusal, self.full = gpu, refusal, full

    def allocate(self, size_bytes: int) -> int:
        if self.full:
            raise OSError(self.full)
        memory = (ctypes.c_ubyte * size_bytes)()
        ctypes.memset(memory, GARBAGE, size_bytes)
        address = ctypes.addressof(memory)
        self.gpu.memory[address], self.gpu.num_open[address] = memory, 0
        return address

    def free(self, address: int) -> None:
        if self.gpu.num_open.pop(address):
            self.gpu.errors.append("memory was freed that another process has open")
        del self.gpu.memory[address]

    def export(self, address: int) -> bytes:
        handle = secrets.token_bytes(64)
        self.gpu.handles[handle] = address
        return handle

    def open(self, handle: bytes) -> int:
        if self.refusal:
            raise OSError(self.refusal)
        address = self.gpu.handles[handle]
        self.gpu.num_open[address] += 1
        return address

    def close(self, address: int) -> None:
        self.gpu.num_open[address] -= 1

    def write_proof(self, address: int) -> int:
        content = secrets.token_bytes(PROOF_BYTES)
        ctypes.memmove(address, content, len(content))
        return host_checksum(content)

    def read_proof(self, address: int) -> int:
        return host_checksum(ctypes.string_at(address, PROOF_BYTES))


class FakeLocks(PageLocks):
    """Page locks of memory that must be mapped as long as it is locked; `refusal` refuses it."""

    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.locked: dict[int, int] = {}
        self.threads: set[str] = set()
        self.errors: list[str] = []

    def begin(self) -> None:
        self.threads.add(threading.current_thread().name)

    def lock(self, address: int, size_bytes: int) -> None:
        self._check(address)
        if self.refusal:
            raise OSError(self.refusal)
        self.locked[address] = size_bytes

    def unlock(self, address: int) -> None:
        self._check(address)
        del self.locked[address]

    def holds(self, address: int) -> bool:
        return any(begin <= address < begin + size for begin, size in self.locked.items())

    def _check(self, address: int) -> None:
        if threading.current_thread().name not in self.threads:
            self.errors.append("a call on another thread")
        maps = Path("/proc/self/maps").read_text().splitlines()
        if not any(line.startswith(f"{address:x}-") and "stageline-payloads" in line for line in maps):
            self.errors.append(f"no segment is mapped at {address:x}")
