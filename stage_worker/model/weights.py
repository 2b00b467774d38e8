"""Copies a stage's tensors from safetensors files into allocated memory.

Each tensor is copied window by window: map a few MiB of the file, copy (and convert) them into the
destination, unmap. So beside the destination at most one window is ever resident, and a mapped file page is
counted to the process only while its window is open.
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
from checkpoint.files import FileIdentity, stat_files
from stage_worker.model.layer_weights import TORCH_DTYPES

WINDOW_BYTES = 32 * 1024 * 1024


class ReadProgress(Protocol):
    """Is told how a load gets on; what it raises ends the load."""

    def expect(self, num_bytes: int) -> None:
        """So many bytes of the checkpoint are going to be read."""

    def advance(self, num_bytes: int) -> None:
        """So many more have been."""


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
    """Fill each destination: contiguous, shaped as the checkpoint's tensor of that name, any dtype or device.

    Files are read in order of position; after each window `progress` is told, and what it raises ends the
    load. Raises CheckpointNotFound when a file cannot be opened, BadHeader when it has become shorter since
    its header was read, ValueError when a weight does not fit into the run dtype (float16 ends at 65504).
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


def file_identities(checkpoint: Checkpoint) -> tuple[FileIdentity, ...]:
    """Of all files that hold weights, by name."""
    names = {entry.file for entry in checkpoint.tensors.values()}
    return stat_files(checkpoint.directory, sorted(names))


@torch.inference_mode()
def load_rows(checkpoint: Checkpoint, name: str, destination: Tensor, *, first_row: int) -> None:
    """Fill `destination` with as many rows of the tensor `name`, from `first_row` on, as it has.

    It is contiguous, of any dtype, and like the tensor but for the number of rows. Raises what
    `load_tensors` raises.
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
    """Yields after each window how many bytes of the file it was."""
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
    """Copy the file's elements from byte `begin` on into the whole of `destination`.

    The mapping is copy-on-write only because torch wants a writable buffer; it is never written.
    """
    page_begin = begin - begin % mmap.ALLOCATIONGRANULARITY
    length = begin - page_begin + destination.numel() * dtype.itemsize
    mapped = mmap.mmap(stream.fileno(), length, offset=page_begin, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_WILLNEED"):
        mapped.madvise(mmap.MADV_WILLNEED)
    destination.copy_(_elements(mapped, begin - page_begin, dtype))
    mapped.close()


def _elements(mapped: mmap.mmap, offset: int, dtype: torch.dtype) -> Tensor:
    """The mapped bytes from `offset` on as elements; the format does not promise that they are aligned."""
    if offset % dtype.itemsize == 0:
        return torch.frombuffer(mapped, dtype=dtype, offset=offset)
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=offset).clone().view(dtype)


def _check_range(window: Tensor, entry: TensorEntry, name: str) -> None:
    narrows = window.dtype is torch.float16 and TORCH_DTYPES[entry.dtype] is not torch.float16
    if narrows and not bool(torch.isfinite(window).all()):
        raise ValueError(f"tensor {name} of {entry.dtype.value} has values that float16 cannot hold")
