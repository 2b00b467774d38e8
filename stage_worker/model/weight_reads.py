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

P = ParamSpec("P")
HostBytes = npt.NDArray[np.uint8]

WINDOW_BYTES, DEVICE_WINDOW_BYTES = 4 * 1024 * 1024, 8 * 1024 * 1024
NUM_READERS, NUM_DEVICE_READERS = 4, 8
"""Enough to keep a disk busy; one reader takes some 2.5 GB/s from the page cache to a GPU."""
NUM_WINDOWS = 2 * NUM_DEVICE_READERS
"""Each reader fills one while its last one is copied to the device."""


class CopyEvent(Protocol):
    """The end of a copy."""

    def synchronize(self) -> None:
        """Wait for it, without the interpreter's lock. Raises an error of the device."""


class DeviceCopies(Protocol):
    """Copies to a device beside its computation, in their order; see `DeviceQueue`."""

    def host_memory(self, num_bytes: int) -> HostBytes:
        """Pinned memory uint8 [num_bytes]."""

    def fence_uploads(self) -> None:
        """Start later uploads after the computation so far, which may still use the memory of their targets:
        allocators reuse memory in the order of computation, and copies have another.
        """

    def upload(self, target: Tensor, source: HostBytes) -> CopyEvent:
        """Copy `source` to `target`, both uint8, before later computation."""


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """A part of a tensor in memory, and `num_bytes` of the checkpoint that it is read from.

    `fill` writes the values into host memory of the shape and dtype of `target`: on a reader, or on the
    thread of the load if `is_unpacked`, since what a thread allocates stays with its arena. It is not called
    for a piece whose bytes are `pinned` memory already.
    """

    target: Tensor
    fill: Callable[[Tensor], None]
    num_bytes: int
    is_unpacked: bool = False
    pinned: HostBytes | None = None


@dataclass(slots=True)
class _Window:
    """Pinned memory; `copied` is the end of the last copy from it."""

    memory: HostBytes
    copied: CopyEvent | None = None

    @torch.inference_mode()
    def bring(self, piece: WeightPiece, target: Tensor, copies: DeviceCopies) -> None:
        """Fill this window with the piece, once the last copy from it has ended, and begin its copy to
        `target`, the bytes of the piece's.
        """
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None
        if target.numel() > len(self.memory):  # the narrowest columns of a matrix with very many rows
            self.memory = copies.host_memory(target.numel())
        source = self.memory[: target.numel()].reshape(target.shape)
        piece.fill(torch.from_numpy(source).view(piece.target.dtype))
        self.copied = copies.upload(target, source)


@dataclass(frozen=True, slots=True)
class _Read:
    """A piece on its way until `done`: read into its place, or into `window` and copied from there."""

    piece: WeightPiece
    done: Future[None]
    window: _Window | None = None


class WeightReads:
    """The readers of one load, and the windows to a device; a context manager, for one thread.

    Weights of a CPU are read into their place. Weights of a device are read into pinned windows, whose copies
    overlap with reads; readers begin them, so that none waits for the thread of the load. At most NUM_WINDOWS
    windows, of `window_bytes` each, are allocated, when pieces need them; weights that are converted or
    unpacked take as much again per reader.
    """

    def __init__(
        self,
        copies: DeviceCopies | None = None,
        *,
        window_bytes: int | None = None,
    ) -> None:
        """`copies` is None for a CPU; `window_bytes` has a default for either."""
        is_direct = copies is None
        self.window_bytes = window_bytes or (WINDOW_BYTES if is_direct else DEVICE_WINDOW_BYTES)
        self._copies = copies
        num_readers = NUM_READERS if is_direct else NUM_DEVICE_READERS
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

    def copy(self, pieces: Iterable[WeightPiece]) -> Generator[int, None, None]:
        """Fill the targets; yield the bytes of each piece, in order, when it is read and its copy has begun:
        later computation sees it.

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
        copies = self._copies
        if copies is None:
            assert piece.target.device.type == "cpu", "weights reach a device by copies"
            return _Read(piece, self._run(piece, _fill, piece))
        target = piece.target.view(torch.uint8)
        if piece.pinned is not None:
            self._direct.append(copies.upload(target, piece.pinned))
            return _Read(piece, _ended())
        window = self._window(copies)
        return _Read(piece, self._run(piece, window.bring, piece, target, copies), window)

    def _run(
        self, piece: WeightPiece, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs
    ) -> Future[None]:
        if not piece.is_unpacked:
            return self._readers.submit(work, *args, **kwargs)
        ended: Future[None] = Future()
        try:
            work(*args, **kwargs)
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
        reads[0].done.result()
        read = reads.popleft()
        if read.window is not None:
            self._free.append(read.window)
        if len(self._direct) > self._most:
            self._direct.popleft().synchronize()
        return read.piece.num_bytes

    def _abandon(self, reads: deque[_Read]) -> None:
        """Wait until no reader writes any longer, and take the windows back."""
        for read in reads:
            read.done.cancel()
        wait([read.done for read in reads])
        self._free += [read.window for read in reads if read.window is not None]
        reads.clear()


def _ended() -> Future[None]:
    ended: Future[None] = Future()
    ended.set_result(None)
    return ended


@torch.inference_mode()
def _fill(piece: WeightPiece) -> None:
    piece.fill(piece.target)
