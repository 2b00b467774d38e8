"""Reader threads of a load, and the pinned windows through which weights reach a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import ParamSpec, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wire.sizes import format_size

P = ParamSpec("P")
HostBytes = npt.NDArray[np.uint8]

WINDOW_BYTES, DEVICE_WINDOW_BYTES = 4 * 1024 * 1024, 16 * 1024 * 1024
"""Copies to a device cost the thread of the load some 0.25 ms each, of whatever size."""
NUM_READERS, NUM_DEVICE_READERS = 4, 8
"""Enough to keep a disk busy; one reader takes some 2.5 GB/s from the page cache to a GPU."""
NUM_WINDOWS = NUM_DEVICE_READERS + 2
"""One for each reader, one that is copied to the device, and one that waits for its turn."""


class CopyEvent(Protocol):
    """The end of a copy."""

    def synchronize(self) -> None:
        """Wait for it, without the interpreter's lock. Raises an error of the device."""


class DeviceCopies(Protocol):
    """Copies to a device beside its computation, in their order; see `DeviceQueue`."""

    def host_memory(self, num_bytes: int) -> HostBytes:
        """Pinned memory uint8 [num_bytes]."""

    def locked_memory(self, num_bytes: int) -> HostBytes:
        """Page-locked memory uint8 [num_bytes] that kernels of the device read from, too: not a byte more,
        where allocators of pinned memory take up to twice as much. Raises OSError with the reason.
        """

    def fence_uploads(self) -> None:
        """Start later uploads after the computation so far, which may still use the memory of their targets:
        allocators reuse memory in the order of computation, and copies have another.
        """

    def upload(self, target: Tensor, source: HostBytes) -> CopyEvent:
        """Copy `source` to `target`, both uint8, before later computation."""


class HostTable:
    """A table [rows, width] in page-locked memory of the host; a GPU reads some of its rows in each step."""

    __slots__ = ("rows",)

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """A part of a tensor in memory, and `num_bytes` of the checkpoint that it is read from.

    `fill` writes the values into host memory of the shape and dtype of `target`: on a reader, or on the
    thread of the load if `is_unpacked`, since what a thread allocates stays with its arena. It is not called
    for a piece whose bytes are `pinned` memory already. A target `is_on_host` is filled where it is, also
    among those of a device.
    """

    target: Tensor
    fill: Callable[[Tensor], None]
    num_bytes: int
    is_unpacked: bool = False
    pinned: HostBytes | None = None
    is_on_host: bool = False


@dataclass(slots=True)
class _Window:
    memory: HostBytes
    copied: CopyEvent | None = None

    def bytes_for(self, target: Tensor, copies: DeviceCopies) -> HostBytes:
        """Memory for the bytes of `target`, once the last copy from it has ended.

        It grows for the narrowest columns of a matrix with very many rows.
        """
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None
        *sizes, last = target.shape
        num_bytes = target.numel() * target.element_size()
        if num_bytes > len(self.memory):
            self.memory = copies.host_memory(num_bytes)
        return self.memory[:num_bytes].reshape(*sizes, last * target.element_size())


@dataclass(frozen=True, slots=True)
class _Read:
    """A piece that a reader fills: in its place, or in `source`, the memory of `window` or of the piece."""

    piece: WeightPiece
    filled: Future[None]
    window: _Window | None = None
    source: HostBytes | None = None


class WeightReads:
    """The readers of one load, and the windows to a device; a context manager, for one thread.

    Weights of a CPU are read into their place. Those of a device are read into pinned windows, whose copies
    overlap with reads. At most NUM_WINDOWS windows, of `window_bytes` each, are allocated, when pieces need
    them; weights that are converted or unpacked take as much again per reader.
    """

    def __init__(
        self,
        copies: DeviceCopies | None = None,
        *,
        window_bytes: int | None = None,
    ) -> None:
        """`copies` is None for a CPU; `window_bytes` has a default for either."""
        num_readers = NUM_READERS if copies is None else NUM_DEVICE_READERS
        default_bytes = WINDOW_BYTES if copies is None else DEVICE_WINDOW_BYTES
        self.window_bytes = window_bytes or default_bytes
        self._copies = copies
        self._most = NUM_WINDOWS if copies is not None else 2 * num_readers
        """Pieces that are read or copied at a time."""
        self._free: deque[_Window] = deque()
        self._direct: deque[CopyEvent] = deque()
        """Copies from pinned memory of pieces that may not have ended, the oldest first."""
        self._num_windows = 0
        self._readers = ThreadPoolExecutor(num_readers, thread_name_prefix="weight-reader")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._readers.shutdown(cancel_futures=True)
        self._free.clear()

    def new_table(self, dtype: torch.dtype, num_rows: int, width: int) -> HostTable | None:
        """An uninitialised table; None for a CPU, whose weights are all on the host.

        Raises OSError with its size and the reason.
        """
        if self._copies is None:
            return None
        num_bytes = num_rows * width * dtype.itemsize
        try:
            memory = self._copies.locked_memory(num_bytes)
        except OSError as error:
            raise OSError(
                f"cannot page-lock {format_size(num_bytes)} of host memory for a table of {num_rows} rows,"
                f" which the GPU reads there: {error}: free memory of the host, or raise the memory limit of"
                " the worker's container or service"
            ) from error
        return HostTable(torch.from_numpy(memory).view(dtype).view(num_rows, width))

    def copy(self, pieces: Iterable[WeightPiece]) -> Generator[int, None, None]:
        """Fill the targets, in their order on a device; yield the bytes of each piece that was read.

        All copies have ended after the last one. An error of a reader or of the device ends it, as closing
        the iterator does; no reader has a piece any longer then.

        Targets on a device must be allocated before.
        """
        if self._copies is not None:
            self._copies.fence_uploads()
        reads: deque[_Read] = deque()
        try:
            for piece in pieces:
                while len(reads) >= self._most:
                    yield self._finish(reads)
                reads.append(self._begin(piece))
            while reads:
                yield self._finish(reads)
        finally:
            self._abandon(reads)
        for window in self._free:
            if window.copied is not None:
                window.copied.synchronize()
        while self._direct:
            self._direct.popleft().synchronize()

    def _begin(self, piece: WeightPiece) -> _Read:
        if self._copies is None or piece.is_on_host:
            assert piece.target.device.type == "cpu", "weights reach a device by copies"
            return _Read(piece, self._run(piece, _fill, piece))
        if piece.pinned is not None:
            return _Read(piece, _ended(), source=piece.pinned)
        window = self._window(self._copies)
        source = window.bytes_for(piece.target, self._copies)
        return _Read(piece, self._run(piece, _fill_window, piece, source), window, source)

    def _run(
        self, piece: WeightPiece, fill: Callable[P, None], *args: P.args, **kwargs: P.kwargs
    ) -> Future[None]:
        if not piece.is_unpacked:
            return self._readers.submit(fill, *args, **kwargs)
        ended: Future[None] = Future()
        try:
            fill(*args, **kwargs)
        except Exception as error:
            ended.set_exception(error)
            return ended
        return _ended()

    def _window(self, copies: DeviceCopies) -> _Window:
        """The window whose copy began first, or a new one; there are as many as pieces at a time."""
        if self._num_windows < self._most:
            self._num_windows += 1
            return _Window(copies.host_memory(self.window_bytes))
        return self._free.popleft()

    def _finish(self, reads: deque[_Read]) -> int:
        """End the oldest read. Raises its error."""
        read = reads[0]
        read.filled.result()
        if read.source is not None:
            assert self._copies is not None, "windows are for a device"
            copied = self._copies.upload(read.piece.target.view(torch.uint8), read.source)
            if read.window is None:
                self._direct.append(copied)
            else:
                read.window.copied = copied
                self._free.append(read.window)
        if len(self._direct) > self._most:
            self._direct.popleft().synchronize()
        return reads.popleft().piece.num_bytes

    def _abandon(self, reads: deque[_Read]) -> None:
        """Wait until no reader writes any longer, and take the windows back."""
        for read in reads:
            read.filled.cancel()
        wait([read.filled for read in reads])
        self._free += [read.window for read in reads if read.window is not None]
        reads.clear()


def _ended() -> Future[None]:
    ended: Future[None] = Future()
    ended.set_result(None)
    return ended


@torch.inference_mode()
def _fill(piece: WeightPiece) -> None:
    piece.fill(piece.target)


@torch.inference_mode()
def _fill_window(piece: WeightPiece, source: HostBytes) -> None:
    piece.fill(torch.from_numpy(source).view(piece.target.dtype))
