"""Copies a stage's tensors from safetensors files into allocated memory.

Each tensor is copied in windows: map a few MiB of the file, copy (and convert) them, unmap. Thus at most
one window is resident beside the destination, and mapped file pages count towards the process only while
their window is open.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

from checkpoint import BadHeader, Checkpoint, TensorEntry, open_regular
from stage_worker.model.layer_weights import TORCH_DTYPES

WINDOW_BYTES = 32 * 1024 * 1024


class ReadProgress(Protocol):
    """Callbacks of a load; their exceptions end it."""

    def expect(self, num_bytes: int) -> None:
        """`num_bytes` of the checkpoint are going to be read."""

    def advance(self, num_bytes: int) -> None:
        """`num_bytes` more were read."""


class _NoProgress:
    def expect(self, num_bytes: int) -> None: ...

    def advance(self, num_bytes: int) -> None: ...


NO_PROGRESS: ReadProgress = _NoProgress()


@torch.inference_mode()
def load_tensors(
    checkpoint: Checkpoint,
    destinations: Mapping[str, Tensor],
    *,
    window_bytes: int = WINDOW_BYTES,
    progress: ReadProgress = NO_PROGRESS,
) -> None:
    """Fill each destination: contiguous, in the shape of the checkpoint's tensor of that name, any dtype or
    device.

    Files are read in order of position. `progress` is called after each window; its exceptions end the
    load.

    Raises:
        CheckpointNotFound: A file cannot be opened.
        BadHeader: A file is shorter than its header states.
        ValueError: A weight does not fit into the run dtype (float16 ends at 65504).
    """
    by_file: dict[str, list[tuple[TensorEntry, str]]] = {}
    for name in destinations:
        entry = checkpoint.tensors[name]
        by_file.setdefault(entry.file, []).append((entry, name))
    for file, entries in sorted(by_file.items()):
        path = checkpoint.directory / file
        with _open(path, max(entry.end for entry, _ in entries)) as stream:
            for entry, name in sorted(entries, key=lambda item: item[0].begin):
                for num_bytes in _load_tensor(stream, entry, destinations[name], name, window_bytes):
                    progress.advance(num_bytes)


@torch.inference_mode()
def load_rows(checkpoint: Checkpoint, name: str, destination: Tensor, *, first_row: int) -> None:
    """Fill `destination` with rows of the tensor `name`, from `first_row` on.

    `destination` is contiguous, of any dtype, and has the tensor's shape except for the number of rows.
    Raises like `load_tensors`.
    """
    whole = checkpoint.tensors[name]
    row_bytes = math.prod(whole.shape[1:]) * whole.dtype.size_bytes
    begin = whole.begin + first_row * row_bytes
    end = begin + len(destination) * row_bytes
    assert tuple(destination.shape[1:]) == whole.shape[1:] and end <= whole.end, f"rows of {name}"
    rows = replace(whole, shape=tuple(destination.shape), begin=begin, end=end)
    with _open(checkpoint.directory / whole.file, end) as stream:
        for _ in _load_tensor(stream, rows, destination, name, WINDOW_BYTES):
            pass


def _open(path: Path, end: int) -> BinaryIO:
    stream = open_regular(path)
    size_bytes = os.fstat(stream.fileno()).st_size
    if size_bytes < end:
        stream.close()
        raise BadHeader(f"{path} has {size_bytes} bytes, its header accounted for {end}")
    return stream


def _load_tensor(
    stream: BinaryIO, entry: TensorEntry, destination: Tensor, name: str, window_bytes: int
) -> Iterator[int]:
    """Yield the number of bytes read after each window."""
    assert tuple(destination.shape) == entry.shape, f"{name}: {tuple(destination.shape)} for {entry.shape}"
    flat = destination.view(-1)
    item_bytes = entry.dtype.size_bytes
    for begin in range(entry.begin, entry.end, window_bytes // item_bytes * item_bytes):
        end = min(begin + window_bytes // item_bytes * item_bytes, entry.end)
        window = flat[(begin - entry.begin) // item_bytes : (end - entry.begin) // item_bytes]
        _copy_window(stream, begin, TORCH_DTYPES[entry.dtype], window)
        _check_range(window, entry, name)
        yield end - begin


def _copy_window(stream: BinaryIO, begin: int, dtype: torch.dtype, destination: Tensor) -> None:
    """Copy elements from byte `begin` on. The mapping is copy-on-write only because torch wants it."""
    page_begin = begin - begin % mmap.ALLOCATIONGRANULARITY
    length = begin - page_begin + destination.numel() * dtype.itemsize
    mapped = mmap.mmap(stream.fileno(), length, offset=page_begin, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_WILLNEED"):
        mapped.madvise(mmap.MADV_WILLNEED)
    destination.copy_(_elements(mapped, begin - page_begin, dtype))
    mapped.close()


def _elements(mapped: mmap.mmap, offset: int, dtype: torch.dtype) -> Tensor:
    """The mapped bytes from `offset` on as elements, which the file format may leave misaligned."""
    if offset % dtype.itemsize == 0:
        return torch.frombuffer(mapped, dtype=dtype, offset=offset)
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=offset).clone().view(dtype)


def _check_range(window: Tensor, entry: TensorEntry, name: str) -> None:
    narrows = window.dtype is torch.float16 and TORCH_DTYPES[entry.dtype] is not torch.float16
    if narrows and not bool(torch.isfinite(window).all()):
        raise ValueError(f"tensor {name} of {entry.dtype.value} has values that float16 cannot hold")
