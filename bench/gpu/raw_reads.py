"""Rate at which files reach a device with neither tensors nor layouts: the bound of loading a checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from stage_worker.model.weight_reads import DEVICE_WINDOW_BYTES as PIECE_BYTES
from stage_worker.model.weight_reads import NUM_DEVICE_READERS as NUM_READERS

WINDOWS_OF_READER = 2


def bytes_per_s(file: Path, num_bytes: int, device: torch.device) -> float:
    """Read the first `num_bytes` of `file` by as many readers as a load has, in pieces of its windows' size,
    and copy each piece to `device` beside the next one. On a CPU they are only read.
    """
    num_bytes = min(num_bytes, file.stat().st_size)
    with _opened(file) as source, ThreadPoolExecutor(NUM_READERS) as readers:
        parts = [_Reader(device) for _ in range(NUM_READERS)]
        began_s = time.perf_counter()
        starts = [range(n * PIECE_BYTES, num_bytes, NUM_READERS * PIECE_BYTES) for n in range(NUM_READERS)]
        list(readers.map(lambda part, begins: part.read(source, begins, num_bytes), parts, starts))
        return num_bytes / (time.perf_counter() - began_s)


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class _Reader:
    """One thread's windows, and the memory of the device that takes their bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        self._windows = [
            torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(WINDOWS_OF_READER)
        ]
        self._target = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    def read(self, source: int, begins: range, end: int) -> None:
        copied: list[torch.cuda.Event] = []
        for number, begin in enumerate(begins):
            window = self._windows[number % WINDOWS_OF_READER]
            if len(copied) == WINDOWS_OF_READER:
                copied.pop(0).synchronize()
            os.preadv(source, [window[: min(PIECE_BYTES, end - begin)].numpy().data], begin)
            if self._stream is not None:
                copied.append(self._copy(window))
        if self._stream is not None:
            self._stream.synchronize()

    def _copy(self, window: torch.Tensor) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            self._target.copy_(window, non_blocking=True)
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()
        return copied
