"""Copies of a step between the host and its device: one in each direction.

On a GPU they go through a ring of pinned memory. Upload, computation and download of a step follow each
other; those of successive steps overlap. A slot of the ring is free again when nothing holds the step's
output: neither the step itself, nor a connection that sends it.
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stage_worker.backends.contract import DeviceHung
from stage_worker.model.attention_views import HostArray, Place
from wire.errors import StepFault, StepFaultKind
from wire.staging import NUM_SLOTS, StagingSizes, aligned

_POLL_S = 0.001
_DTYPES = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def torch_dtype(array: HostArray) -> torch.dtype:
    """The dtype of an array of a step on its device."""
    return _DTYPES[array.dtype]


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """`num_bytes` of a step: `parts` at their offsets, in order, and zeros elsewhere."""

    num_bytes: int
    parts: Sequence[tuple[int, HostArray]]

    @classmethod
    def of(cls, array: HostArray) -> Field:
        return cls(array.nbytes, ((0, array),))

    def write(self, target: HostArray) -> None:
        """Write all bytes of `target` uint8 [num_bytes]."""
        end = 0
        for begin, array in self.parts:
            target[end:begin] = 0
            end = begin + array.nbytes
            target[begin:end] = array.reshape(-1).view(np.uint8)
        target[end:] = 0


def field_places(fields: Iterable[Field]) -> list[tuple[int, int]]:
    """Begin and end of each field, one after the other, aligned."""
    places, end = [], 0
    for field in fields:
        begin = aligned(end)
        end = begin + field.num_bytes
        places.append((begin, end))
    return places


class StepTransfer(ABC):
    """The copies of one step."""

    def upload(self, arrays: Iterable[HostArray]) -> Place:
        """Copy `arrays` to the device, once per step; what is computed afterwards may use them."""
        return self.upload_fields((), arrays)[1]

    @abstractmethod
    def upload_fields(self, fields: Sequence[Field], arrays: Iterable[HostArray]) -> tuple[Tensor, Place]:
        """Like `upload`, with `fields` in the same copy: their bytes, uint8, at their `field_places`."""

    @abstractmethod
    def fetch(self, tensor: Tensor) -> memoryview:
        """Include a tensor in the download; its bytes, to be read after `wait` only."""

    @abstractmethod
    def download(self) -> None:
        """Copy what was fetched to the host, once per step, after all earlier computation."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for the download. Raises an error of the device."""


class StepTransfers(ABC):
    """The transfers of a stage's steps. `depth` steps may be begun before the first of them has ended.

    `is_host` if `upload` does nothing: a step's layout can be made before its slot is free.
    """

    depth: int
    is_host: bool

    @abstractmethod
    def begin(self) -> StepTransfer:
        """The transfer of the next step; waits while all memory is in use.

        Raises DeviceHung or StepFault if the wait is too long.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has nothing to do. Raises its error."""


def host_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy on a CPU; they keep it alive."""
    found: memoryview = tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data
    return found


class HostTransfer(StepTransfer):
    """A CPU computes in the memory of the host: nothing is copied, and all is done when it returns."""

    def upload_fields(self, fields: Sequence[Field], arrays: Iterable[HostArray]) -> tuple[Tensor, Place]:
        places = field_places(fields)
        packed = np.zeros(places[-1][1] if places else 0, np.uint8)
        for field, (begin, end) in zip(fields, places, strict=True):
            field.write(packed[begin:end])
        return torch.from_numpy(packed), torch.from_numpy

    def fetch(self, tensor: Tensor) -> memoryview:
        return host_bytes(tensor)

    def download(self) -> None:
        pass

    def wait(self) -> None:
        pass


class HostTransfers(StepTransfers):
    """Transfers of a CPU."""

    depth = 1
    is_host = True

    def begin(self) -> StepTransfer:
        return HostTransfer()

    def synchronize(self) -> None:
        pass


class Event(Protocol):
    """The end of a copy."""

    def query(self) -> bool:
        """Whether it has come. Raises an error of the device."""

    def synchronize(self) -> None:
        """Wait for it, without the interpreter's lock. Raises an error of the device."""


class DeviceQueue(ABC):
    """Memory of a device, and its copies in each direction beside its computation; each keeps its order."""

    @abstractmethod
    def host_memory(self, num_bytes: int) -> HostArray:
        """Pinned memory uint8 [num_bytes]."""

    @abstractmethod
    def device_memory(self, num_bytes: int) -> Tensor:
        """Memory of the device, uint8 [num_bytes]."""

    @abstractmethod
    def fence_uploads(self) -> None:
        """Start later uploads after the computation so far, for targets whose memory it may still use."""

    @abstractmethod
    def upload(self, target: Tensor, source: HostArray) -> Event:
        """Copy `source` to the device beside earlier computation, and before later one."""

    @abstractmethod
    def download(self, target: HostArray, source: Tensor) -> Event:
        """Copy `source` to the host after earlier computation, and beside later one."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all is done. Raises an error of the device."""


class CudaQueue(DeviceQueue):
    """Streams of CUDA or ROCm: one for each direction of copies; computation is on the default stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up, self._down = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def host_memory(self, num_bytes: int) -> HostArray:
        memory: HostArray = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return memory

    def device_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def fence_uploads(self) -> None:
        self._up.wait_stream(torch.cuda.current_stream(self._device))

    def upload(self, target: Tensor, source: HostArray) -> Event:
        ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._up):
            target.copy_(torch.from_numpy(source), non_blocking=True)
            ended.record()
        torch.cuda.current_stream(self._device).wait_event(ended)
        return ended

    def download(self, target: HostArray, source: Tensor) -> Event:
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._down):
            torch.from_numpy(target).copy_(source, non_blocking=True)
            ended.record()
        return ended

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


@dataclass(slots=True)
class _Slot:
    """Memory for one step: arrays on host and device, and output on device and host.

    `last` is the last copy from or to it.
    """

    host_arrays: HostArray
    arrays: Tensor
    output: Tensor
    host_output: HostArray
    last: Event | None = None


class StagingRing(StepTransfers):
    """Transfers through slots of pinned memory, all of it allocated at once."""

    depth = NUM_SLOTS - 1
    is_host = False

    def __init__(self, queue: DeviceQueue, sizes: StagingSizes, *, timeout_s: float) -> None:
        """A step waits up to `timeout_s` for a slot."""
        self._queue, self._timeout_s = queue, timeout_s
        # The only queue whose `put` may be called by a finalizer at any moment.
        self._free: SimpleQueue[_Slot] = SimpleQueue()
        self._slots = [
            _Slot(
                queue.host_memory(sizes.input_bytes),
                queue.device_memory(sizes.input_bytes),
                queue.device_memory(sizes.output_bytes),
                queue.host_memory(sizes.output_bytes),
            )
            for _ in range(NUM_SLOTS)
        ]
        queue.fence_uploads()
        for slot in self._slots:
            self._free.put(slot)

    def begin(self) -> StepTransfer:
        end_s = time.monotonic() + self._timeout_s
        try:
            slot = self._free.get(timeout=self._timeout_s)
        except Empty:
            raise self._overdue() from None
        # Nobody waited for a step that was refused.
        while slot.last is not None and not slot.last.query():
            if time.monotonic() > end_s:
                self._free.put(slot)
                raise self._overdue()
            time.sleep(_POLL_S)
        return _StagedTransfer(self._queue, slot, lambda: self._free.put(slot))

    def synchronize(self) -> None:
        self._queue.synchronize()

    def _overdue(self) -> Exception:
        """Why no slot is free: the device, or the next stage, which has not taken what was computed."""
        num_running = sum(slot.last is not None and not slot.last.query() for slot in self._slots)
        if num_running:
            return DeviceHung(f"the device has not ended {num_running} steps after {self._timeout_s:g} s")
        return StepFault(
            StepFaultKind.NEIGHBOUR,
            f"the next hop has not taken the output of {NUM_SLOTS} steps after {self._timeout_s:g} s",
        )


class _StagedTransfer(StepTransfer):
    """One step in a slot."""

    def __init__(self, queue: DeviceQueue, slot: _Slot, release: Callable[[], None]) -> None:
        """`release` is called when neither this object nor a part of the output is referenced."""
        self._queue = queue
        self._slot = slot
        output = slot.host_output[:]
        weakref.finalize(output, release)
        self._output = output.data
        self._end = 0

    def upload_fields(self, fields: Sequence[Field], arrays: Iterable[HostArray]) -> tuple[Tensor, Place]:
        slot, end, places = self._slot, 0, field_places(fields)
        for field, (begin, end) in zip(fields, places, strict=True):
            _check_room(end, len(slot.host_arrays))
            field.write(slot.host_arrays[begin:end])
        packed = slot.arrays.narrow(0, 0, end)
        placed: dict[int, tuple[HostArray, Tensor]] = {}
        for array in arrays:
            begin, end = aligned(end), aligned(end) + array.nbytes
            _check_room(end, len(slot.host_arrays))
            slot.host_arrays[begin:end] = array.reshape(-1).view(np.uint8)
            twin = slot.arrays.narrow(0, begin, array.nbytes).view(torch_dtype(array)).view(array.shape)
            placed[id(array)] = array, twin
        slot.last = self._queue.upload(slot.arrays.narrow(0, 0, end), slot.host_arrays[:end])
        return packed, lambda array: placed[id(array)][1]

    def fetch(self, tensor: Tensor) -> memoryview:
        begin, num_bytes = aligned(self._end), tensor.numel() * tensor.element_size()
        self._end = begin + num_bytes
        _check_room(self._end, len(self._output))
        output = self._slot.output
        output.narrow(0, begin, num_bytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return self._output[begin : self._end]

    def download(self) -> None:
        slot, end = self._slot, self._end
        slot.last = self._queue.download(slot.host_output[:end], slot.output.narrow(0, 0, end))

    def wait(self) -> None:
        downloaded = self._slot.last
        assert downloaded is not None, "wait before download"
        downloaded.synchronize()


def _check_room(needed: int, available: int) -> None:
    assert needed <= available, f"a step needs {needed} bytes of staging memory, {available} are allocated"
