"""Copies of a step between the host and its device: one in each direction.

On a GPU they go through a ring of pinned memory, but for hidden states in page-locked memory of a hop: these
are copied from there, and into it. Hidden states in memory of a device that both stages have mapped do not
pass the host: only their checksum is downloaded with the step, at both ends. Upload, computation and download
of a step follow each other; those of successive steps overlap. A slot of the ring is free again when nothing
holds the step's output: neither the step itself, nor a connection that sends it.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stage_worker.backends.contract import DeviceHung
from stage_worker.backends.cuda_runtime import device_runtime, locked_memory
from stage_worker.backends.hop_memory import HopMemory, PageLocks
from stage_worker.backends.torch_device import prepare_thread
from stage_worker.model.attention_views import HostArray, Place
from stage_worker.model.checksums import Checksum, DeviceSum, plain_checksum, words_or_bytes
from wire.errors import StepFault, StepFaultKind
from wire.shared_segment import DevicePlace
from wire.staging import NUM_SLOTS, WORD_BYTES, StagingSizes, aligned

MIN_DIRECT_BYTES = 64 * 1024
"""Smaller arrays are packed with the others of a step, although a GPU could copy them from where they are."""
_POLL_S = 0.001
_FOR_ALL_CONTEXTS = 1
"""cudaHostRegisterPortable."""
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


Put = Callable[[int, HostArray], None]
"""Writes an array at an offset."""


def _put_into(target: HostArray) -> Put:
    """Writes into `target` uint8 [n]."""

    def put(begin: int, array: HostArray) -> None:
        target[begin : begin + array.nbytes] = _bytes_of(array)

    return put


def _bytes_of(array: HostArray) -> HostArray:
    """All bytes, uint8 [n], without a copy of a contiguous array."""
    found: HostArray = array.reshape(-1).view(np.uint8)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """`num_bytes` of a step: `parts` at their offsets, in order, and zeros elsewhere."""

    num_bytes: int
    parts: Sequence[tuple[int, HostArray]]

    @classmethod
    def of(cls, array: HostArray) -> Field:
        return cls(array.nbytes, ((0, array),))

    def write(self, target: HostArray, put: Put | None = None) -> None:
        """Write all bytes of `target` uint8 [num_bytes]; `put` writes a part, by default there."""
        end, put = 0, put or _put_into(target)
        for begin, array in self.parts:
            target[end:begin] = 0
            end = begin + array.nbytes
            put(begin, array)
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

    def hand_on(self, tensors: Sequence[Tensor]) -> list[memoryview]:
        """Like `fetch` of each, for the next stage: they may stay on the device, see `StepTransfers.on_host`.

        Called once, before `fetch`.
        """
        return [self.fetch(tensor) for tensor in tensors]

    @abstractmethod
    def download(self) -> None:
        """Copy what was fetched to the host, once per step, after all earlier computation."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for the download.

        Raises an error of the device, or StepFault CHECKSUM if hidden states that were uploaded from a device
        are not those that were sent.
        """


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

    def on_host(self, content: HostArray) -> HostArray:
        """The bytes uint8 [n] of hidden states that came in or were handed on, also if they are on a device.

        For rare looks: it waits for the device.
        """
        return content


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
    def locked_memory(self, num_bytes: int) -> HostArray:
        """Page-locked memory uint8 [num_bytes], which kernels read from, too. Raises OSError."""

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
    def copy_out(self, address: int, source: Tensor) -> None:
        """Copy `source`, contiguous, to an address of a device, after earlier computation."""

    @abstractmethod
    def copy_in(self, target: Tensor, address: int) -> Event:
        """Like `upload`, from an address of a device."""

    @abstractmethod
    def read(self, address: int, num_bytes: int) -> HostArray:
        """The bytes uint8 [num_bytes] at an address of a device, after all earlier computation."""

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

    def locked_memory(self, num_bytes: int) -> HostArray:
        return locked_memory(num_bytes)

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

    def copy_out(self, address: int, source: Tensor) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        device_runtime().copy(address, source.data_ptr(), source.nbytes, stream)

    def copy_in(self, target: Tensor, address: int) -> Event:
        ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        device_runtime().copy(target.data_ptr(), address, target.nbytes, self._up.cuda_stream)
        ended.record(self._up)
        torch.cuda.current_stream(self._device).wait_event(ended)
        return ended

    def read(self, address: int, num_bytes: int) -> HostArray:
        found = self.device_memory(num_bytes)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        device_runtime().copy(found.data_ptr(), address, num_bytes, stream)
        content: HostArray = found.cpu().numpy()
        return content

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


class CudaPageLocks(PageLocks):
    """Page locks of CUDA or ROCm, for all copies of this process.

    A call that fails leaves its error to the next one of its thread that asks for errors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        prepare_thread(self._device)

    def lock(self, address: int, size_bytes: int) -> None:
        self._check("cudaHostRegister", address, size_bytes, _FOR_ALL_CONTEXTS)

    def unlock(self, address: int) -> None:
        self._check("cudaHostUnregister", address)

    def _check(self, function: str, *arguments: int) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = getattr(runtime, function)(*arguments)
        if error != runtime.cudaError.success:
            raise OSError(f"{function}: {runtime.cudaGetErrorString(error)}")


@dataclass(slots=True)
class _Slot:
    """Memory for one step: arrays on host and device, and output on device and host.

    `last` is the last copy from or to it; `held` is memory of hops that copies use until then.
    """

    host_arrays: HostArray
    arrays: Tensor
    output: Tensor
    host_output: HostArray
    last: Event | None = None
    held: list[object] = dataclasses.field(default_factory=list)

    @property
    def is_idle(self) -> bool:
        """All copies have ended. Raises an error of the device."""
        return self.last is None or self.last.query()


class StagingRing(StepTransfers):
    """Transfers through slots of pinned memory, all of it allocated at once."""

    depth = NUM_SLOTS - 1
    is_host = False

    def __init__(
        self,
        queue: DeviceQueue,
        sizes: StagingSizes,
        *,
        timeout_s: float,
        hops: HopMemory | None = None,
        checksum: Checksum = plain_checksum,
    ) -> None:
        """A step waits up to `timeout_s` for a slot. Hidden states may be in memory of `hops`; `checksum` is
        of those that stay on the device.
        """
        self._queue, self._timeout_s = queue, timeout_s
        self._hops, self._checksum = hops, checksum
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
        while not slot.is_idle:
            if time.monotonic() > end_s:
                self._free.put(slot)
                raise self._overdue()
            time.sleep(_POLL_S)
        slot.held.clear()
        return _StagedTransfer(self._queue, slot, lambda: self._free.put(slot), self._hops, self._checksum)

    def on_host(self, content: HostArray) -> HostArray:
        place = None if self._hops is None else self._hops.place_of(content)
        return content if place is None else self._queue.read(place.address, content.nbytes)

    def synchronize(self) -> None:
        self._queue.synchronize()
        for slot in self._slots:
            slot.held.clear()

    def _overdue(self) -> Exception:
        """Why no slot is free: the device, or the next stage, which has not taken what was computed."""
        num_running = sum(not slot.is_idle for slot in self._slots)
        if num_running:
            return DeviceHung(f"the device has not ended {num_running} steps after {self._timeout_s:g} s")
        return StepFault(
            StepFaultKind.NEIGHBOUR,
            f"the next hop has not taken the output of {NUM_SLOTS} steps after {self._timeout_s:g} s",
        )


class _StagedTransfer(StepTransfer):
    """One step in a slot."""

    def __init__(
        self,
        queue: DeviceQueue,
        slot: _Slot,
        release: Callable[[], None],
        hops: HopMemory | None,
        checksum: Checksum,
    ) -> None:
        """`release` is called when neither this object nor a part of the output in the slot is referenced."""
        self._queue, self._slot, self._hops = queue, slot, hops
        output = slot.host_output[:]
        weakref.finalize(output, release)
        self._output = output.data
        self._lent: memoryview | None = None
        self._end = self._lent_end = 0
        self._direct: list[tuple[int, HostArray]] = []
        self._checksum = checksum
        self._sums: list[DeviceSum] = []

    def upload_fields(self, fields: Sequence[Field], arrays: Iterable[HostArray]) -> tuple[Tensor, Place]:
        slot, end, places = self._slot, 0, field_places(fields)
        for field, (begin, end) in zip(fields, places, strict=True):
            _check_room(end, len(slot.host_arrays))
            field.write(slot.host_arrays[begin:end], partial(self._put_behind, begin))
        packed = slot.arrays.narrow(0, 0, end)
        placed: dict[int, tuple[HostArray, Tensor]] = {}
        for array in arrays:
            begin, end = aligned(end), aligned(end) + array.nbytes
            _check_room(end, len(slot.host_arrays))
            self._put_behind(begin, 0, array)
            twin = slot.arrays.narrow(0, begin, array.nbytes).view(torch_dtype(array)).view(array.shape)
            placed[id(array)] = array, twin
        self._upload(end)
        return packed, lambda array: placed[id(array)][1]

    def hand_on(self, tensors: Sequence[Tensor]) -> list[memoryview]:
        assert not self._end, "outputs are handed on first"
        if self._hops is not None:
            self._lent = self._hops.lend(sum(tensor.nbytes for tensor in tensors))
        lent, place = self._lent, None
        if self._hops is not None and lent is not None:
            place = self._hops.place_of(np.frombuffer(lent, np.uint8))
        if lent is not None and place is not None:
            self._lent = None
            contents = [words_or_bytes(tensor) for tensor in tensors]
            if all(content.dtype is torch.int32 for content in contents):
                return self._leave_on_device(contents, lent, place)
        # One after the other, so that they are one payload where they are.
        return [self._fetch_at(_tight(self._end), tensor) for tensor in tensors]

    def fetch(self, tensor: Tensor) -> memoryview:
        return self._fetch_at(aligned(self._end), tensor)

    def download(self) -> None:
        for found in self._sums:
            found.downloaded = self.fetch(found.total())
        slot, end = self._slot, self._end
        num_lent = min(self._lent_end, end)
        if self._lent is not None and num_lent:
            slot.held.append(self._lent)
            target = np.frombuffer(self._lent, np.uint8)[:num_lent]
            slot.last = self._queue.download(target, slot.output.narrow(0, 0, num_lent))
        if num_lent < end or not end:
            rest = slot.output.narrow(0, num_lent, end - num_lent)
            slot.last = self._queue.download(slot.host_output[num_lent:end], rest)
        self._lent = None

    def wait(self) -> None:
        slot = self._slot
        assert slot.last is not None, "wait before download"
        slot.last.synchronize()
        slot.held.clear()
        for found in self._sums:
            found.settle()
        self._sums.clear()

    def _fetch_at(self, begin: int, tensor: Tensor) -> memoryview:
        """Include a tensor in the download, behind what is before `begin`."""
        num_bytes, is_behind_lent = tensor.nbytes, self._lent_end == self._end
        self._end = begin + num_bytes
        _check_room(self._end, len(self._output))
        output = self._slot.output
        output.narrow(0, begin, num_bytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)
        # The next stage takes the first ones; what has no room behind them is for this stage only.
        if self._lent is not None and self._end <= len(self._lent) and is_behind_lent:
            self._lent_end = self._end
            return self._lent[begin : self._end]
        return self._output[begin : self._end]

    def _leave_on_device(
        self, contents: Sequence[Tensor], lent: memoryview, place: DevicePlace
    ) -> list[memoryview]:
        """Copy to where the next stage's device copies from; only a checksum goes to the host."""
        slot = self._slot
        slot.held.append(lent)
        left, handed, end = DeviceSum(place, expected=None), [], 0
        for content in contents:
            self._queue.copy_out(place.address + end, content)
            left.parts.append(self._checksum(content, end // WORD_BYTES))
            handed.append(lent[end : end + content.nbytes])
            end += content.nbytes
        self._sums.append(left)
        return handed

    def _take_from_device(self, place: DevicePlace, target: Tensor) -> None:
        """Copy a part of a payload from a device, and count it in its checksum. Raises StepFault."""
        self._slot.last = self._queue.copy_in(target, place.address)
        if place.offset % WORD_BYTES or target.nbytes % WORD_BYTES:
            raise StepFault(
                StepFaultKind.SHAPE,
                f"{target.nbytes} bytes from byte {place.offset} on of a payload on a device: no whole words",
            )
        taken = next((found for found in self._sums if found.place.is_with(place)), None)
        if taken is None:
            taken = DeviceSum(place, expected=place.slots.checksums[place.slot])
            self._sums.append(taken)
        taken.parts.append(self._checksum(target.view(torch.int32), place.offset // WORD_BYTES))

    def _put_behind(self, offset: int, begin: int, array: HostArray) -> None:
        """Pack an array, or let the device copy it from where it is."""
        place, content = offset + begin, _bytes_of(array)
        if self._hops is not None and self._lies_elsewhere(self._hops, content):
            self._direct.append((place, content))
        else:
            self._slot.host_arrays[place : place + content.nbytes] = content

    def _lies_elsewhere(self, hops: HopMemory, content: HostArray) -> bool:
        is_large = content.nbytes >= MIN_DIRECT_BYTES
        return bool(content.nbytes) and (
            (is_large and hops.covers(content)) or hops.place_of(content) is not None
        )

    def _upload(self, end: int) -> None:
        """Upload what is packed, up to `end`, and between it what is elsewhere."""
        slot, done = self._slot, 0
        for begin, content in self._direct:
            self._upload_packed(done, begin)
            done = begin + content.nbytes
            slot.held.append(content)
            target = slot.arrays.narrow(0, begin, content.nbytes)
            place = None if self._hops is None else self._hops.place_of(content)
            if place is None:
                slot.last = self._queue.upload(target, content)
            else:
                self._take_from_device(place, target)
        self._upload_packed(done, end)
        self._direct.clear()

    def _upload_packed(self, begin: int, end: int) -> None:
        if begin < end:
            slot = self._slot
            slot.last = self._queue.upload(
                slot.arrays.narrow(0, begin, end - begin), slot.host_arrays[begin:end]
            )


def _tight(end: int) -> int:
    """The next place for whole words or bytes, without a gap behind whole words."""
    return aligned(end) if end % WORD_BYTES else end


def _check_room(needed: int, available: int) -> None:
    assert needed <= available, f"a step needs {needed} bytes of staging memory, {available} are allocated"
