"""Loading a stage from the page cache: into memory of the host, and through windows, against raw reads."""

from __future__ import annotations

import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.harness.figure import Figure, Round, of_rounds
from bench.harness.group import Setting
from bench.harness.llama import LLAMA_88M, LLAMA_480M, checkpoint
from checkpoint import Checkpoint
from stage_worker.model.attention_views import HostArray
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.kernels import PLAIN
from stage_worker.model.weight_reads import NUM_DEVICE_READERS, NUM_READERS, CopyEvent, DeviceCopies

TARGET = 0.8
GB = 1e9
RAW_BYTES = 8 * 1024 * 1024
MAPPED_BYTES = 32 * 1024 * 1024


HOW = {
    "new memory": "a stage's load into memory of the host : as many readers that fill new memory",
    "windows": "a stage's load to a device whose copies take no time : as many readers of one window each",
}
Rates = dict[str, list[float]]
"""GB/s of each way, in rounds."""


async def measure(setting: Setting) -> list[Figure]:
    """Measure all ways in turns, in each round."""
    geometry = LLAMA_88M if setting.is_quick else LLAMA_480M
    model = _Model(Checkpoint.open(checkpoint(setting.cache_directory, geometry)))
    ways: dict[str, Callable[[], None]] = {
        "raw, new memory": model.read_raw_into_new_memory,
        "load, new memory": lambda: model.load(None),
        "raw, windows": model.read_raw_into_windows,
        "load, windows": lambda: model.load(_NoDevice()),
        "mapped": model.read_mapped,
    }
    rates: Rates = {name: [] for name in ways}
    for way in ways.values():
        way()  # the page cache has the file, and code is imported
    for _ in range(setting.rounds(9, 2)):
        for name, way in ways.items():
            started_s = time.perf_counter()
            way()
            rates[name].append(model.num_bytes / (time.perf_counter() - started_s) / GB)
        setting.say(", ".join(f"{name}: {each[-1]:.2f} GB/s" for name, each in rates.items()))
    return [_figure(where, rates) for where in HOW]


def _figure(where: str, rates: Rates) -> Figure:
    pairs = zip(rates[f"load, {where}"], rates[f"raw, {where}"], strict=True)
    names = {name: name.replace(", ", "_").replace(" ", "_") for name in rates}
    return of_rounds(
        f"loading, {where} : raw reads",
        [Round(*pair) for pair in pairs],
        unit="GB/s",
        how=HOW[where],
        target=TARGET,
        noise=0.25,
        details={f"{names[name]}_gb_s": statistics.median(rates[name]) for name in rates}
        | {f"{names[name]}_best_gb_s": max(rates[name]) for name in rates},
    )


@dataclass(slots=True)
class _NoEvent:
    def synchronize(self) -> None:
        pass


class _NoDevice(DeviceCopies):
    """A device that takes bytes at once: DMA of a GPU takes no time of a processor."""

    def host_memory(self, num_bytes: int) -> HostArray:
        return np.empty(num_bytes, np.uint8)

    def locked_memory(self, num_bytes: int) -> HostArray:
        return np.empty(num_bytes, np.uint8)

    def fence_uploads(self) -> None:
        pass

    def upload(self, target: Tensor, source: HostArray) -> CopyEvent:
        return _NoEvent()


@dataclass(slots=True)
class _Model:
    """A checkpoint of one file of bfloat16 tensors."""

    checkpoint: Checkpoint
    path: Path = field(init=False)
    num_bytes: int = field(init=False)
    begin: int = field(init=False)

    def __post_init__(self) -> None:
        entries = self.checkpoint.tensors.values()
        (name,) = {entry.file for entry in entries}
        self.path = self.checkpoint.directory / name
        self.begin, end = min(entry.begin for entry in entries), max(entry.end for entry in entries)
        self.num_bytes = end - self.begin

    def load(self, copies: DeviceCopies | None) -> None:
        """All parts of a stage that has the whole model, with plain weights."""
        config = self.checkpoint.config
        stage = DecoderStage(
            config,
            layer_begin=0,
            layer_end=config.num_layers,
            has_embeddings=True,
            has_head=True,
            dtype=config.dtype,
            kernels=PLAIN,
        )
        stage.load(self.checkpoint, copies=copies)

    def read_raw_into_new_memory(self) -> None:
        """Tensors of the sizes of the checkpoint's, each read by all readers."""
        for entry in self.checkpoint.tensors.values():
            memory = torch.empty(entry.num_bytes, dtype=torch.uint8).numpy().data
            into = partial(_part_of, memory)
            self._read(entry.begin, entry.num_bytes, into, num_readers=NUM_READERS)

    def read_raw_into_windows(self) -> None:
        """The whole file."""
        windows = threading.local()

        def window(place: int, size: int) -> memoryview:
            if not hasattr(windows, "memory"):
                windows.memory = memoryview(bytearray(RAW_BYTES))
            found: memoryview = windows.memory[:size]
            return found

        self._read(self.begin, self.num_bytes, window, num_readers=NUM_DEVICE_READERS)

    def read_mapped(self) -> None:
        """Without readers, as Stageline loaded before: windows of the mapped file are copied."""
        with self.path.open("rb") as file:
            for entry in self.checkpoint.tensors.values():
                memory = torch.empty(entry.num_bytes, dtype=torch.uint8)
                for begin in range(0, entry.num_bytes, MAPPED_BYTES):
                    window = memory[begin : begin + MAPPED_BYTES]
                    window.copy_(_mapped(file.fileno(), entry.begin + begin, len(window)))

    def _read(
        self, begin: int, num_bytes: int, into: Callable[[int, int], memoryview], *, num_readers: int
    ) -> None:
        places = iter(range(0, num_bytes, RAW_BYTES))
        lock = threading.Lock()
        descriptor = os.open(self.path, os.O_RDONLY)

        def read() -> None:
            while True:
                with lock:
                    place = next(places, None)
                if place is None:
                    return
                left = into(place, min(RAW_BYTES, num_bytes - place))
                while left:
                    count = os.preadv(descriptor, [left], begin + place)
                    left, place = left[count:], place + count

        threads = [threading.Thread(target=read) for _ in range(num_readers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.close(descriptor)


def _part_of(memory: memoryview, place: int, size: int) -> memoryview:
    return memory[place : place + size]


def _mapped(descriptor: int, begin: int, num_bytes: int) -> Tensor:
    offset = begin % mmap.ALLOCATIONGRANULARITY
    mapped = mmap.mmap(descriptor, offset + num_bytes, offset=begin - offset, access=mmap.ACCESS_COPY)
    mapped.madvise(mmap.MADV_WILLNEED)
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=offset)
