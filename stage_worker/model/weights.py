"""Copies a stage's tensors from safetensors files into allocated memory.

Each tensor is copied in windows: map a few MiB of the file, copy (and convert) them, unmap. Thus at most
one window is resident beside the destination, and mapped file pages count towards the process only while
their window is open. Quantised matrices are unpacked in windows of fewer elements, which take the same
memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import BinaryIO, Protocol, Self

import torch
from torch import Tensor

from checkpoint import BadHeader, Checkpoint, DType, TensorEntry, open_regular
from checkpoint.quantization import StoredPart
from stage_worker.model.unpack import STORED_TORCH_DTYPES, num_rows, tiles, unpack

WINDOW_BYTES = 32 * 1024 * 1024
UNPACKED_BYTES = 16
"""Memory for one element while it is unpacked: its stored form, codes, value, scale and zero point."""


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
    order = sorted(destinations, key=lambda name: _place(checkpoint, name))
    with _Files(checkpoint.directory) as files:
        for name in order:
            for num_bytes in _load(checkpoint, files, name, destinations[name], window_bytes):
                progress.advance(num_bytes)


@torch.inference_mode()
def load_rows(checkpoint: Checkpoint, name: str, destination: Tensor, *, first_row: int) -> None:
    """Fill `destination` with rows of the tensor `name`, from `first_row` on.

    `destination` is contiguous, of any dtype, and has the tensor's shape except for the number of rows. A
    tensor of several matrices has their rows, one matrix after the other. Raises like `load_tensors`.
    """
    shape = checkpoint.shape_of(name)
    rows = prod(shape[:-1]) if len(shape) > 1 else shape[0]
    is_right = tuple(destination.shape[1:]) == (shape[-1:] if len(shape) > 1 else ())
    assert is_right and first_row + len(destination) <= rows, f"rows of {name}"
    with _Files(checkpoint.directory) as files:
        if name in checkpoint.packed:
            loads = _load_packed(checkpoint, files, name, destination, first_row, WINDOW_BYTES)
        else:
            loads = _load_plain(checkpoint, files, name, destination, first_row, WINDOW_BYTES)
        for _ in loads:
            pass


def _place(checkpoint: Checkpoint, name: str) -> tuple[str, int]:
    return min((entry.file, entry.begin) for entry in checkpoint.parts_of(name))


class _Files:
    """Files of a checkpoint, opened once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def elements(self, entry: TensorEntry, begin: int, end: int) -> Tensor:
        """Elements [begin, end) of a tensor, mapped. Raises BadHeader and like `open_regular`."""
        dtype = STORED_TORCH_DTYPES[entry.dtype]
        if begin == end:
            return torch.empty(0, dtype=dtype)
        first, last = (entry.begin + place * dtype.itemsize for place in (begin, end))
        assert first < last <= entry.end, "elements of another tensor"
        return _mapped(self._opened(entry), first, last, dtype)

    def _opened(self, entry: TensorEntry) -> BinaryIO:
        path = self._directory / entry.file
        if entry.file not in self._open:
            self._open[entry.file] = self._stack.enter_context(open_regular(path))
        stream = self._open[entry.file]
        size_bytes = os.fstat(stream.fileno()).st_size
        if size_bytes < entry.end:
            raise BadHeader(f"{path} has {size_bytes} bytes, its header accounted for {entry.end}")
        return stream


def _load(
    checkpoint: Checkpoint, files: _Files, name: str, destination: Tensor, window_bytes: int
) -> Iterator[int]:
    """Yield the number of bytes read after each window."""
    shape = checkpoint.shape_of(name)
    assert tuple(destination.shape) == shape, f"{name}: {tuple(destination.shape)} for {shape}"
    if name in checkpoint.packed:
        return _load_packed(checkpoint, files, name, destination, 0, window_bytes)
    return _load_plain(checkpoint, files, name, destination, 0, window_bytes)


def _load_plain(
    checkpoint: Checkpoint,
    files: _Files,
    name: str,
    destination: Tensor,
    first_row: int,
    window_bytes: int,
) -> Iterator[int]:
    entry, flat = checkpoint.tensors[name], destination.view(-1)
    assert isinstance(entry.dtype, DType), f"{name} is packed"
    item_bytes = entry.dtype.size_bytes
    offset = first_row * prod(destination.shape[1:])
    step = window_bytes // item_bytes
    for begin in range(0, len(flat), step):
        window = flat[begin : begin + step]
        window.copy_(files.elements(entry, offset + begin, offset + begin + len(window)))
        is_wider = STORED_TORCH_DTYPES[entry.dtype] is not torch.float16
        _check_range(window, name, entry.dtype.value, narrows=is_wider)
        yield len(window) * item_bytes


def _load_packed(
    checkpoint: Checkpoint,
    files: _Files,
    name: str,
    destination: Tensor,
    first_row: int,
    window_bytes: int,
) -> Iterator[int]:
    matrix = checkpoint.packed[name]
    rows = destination.view(-1, matrix.shape[-1])
    total_bytes = sum(entry.num_bytes for entry in checkpoint.parts_of(name))
    total, done = num_rows(matrix) * matrix.shape[-1], 0

    def read(part: StoredPart, begin: int, end: int) -> Tensor:
        entry = checkpoint.tensors[matrix.parts[part].name]
        return files.elements(entry, begin, prod(entry.shape) if end == -1 else end)

    most = max(window_bytes // UNPACKED_BYTES, 1)
    for tile in tiles(matrix, first_row, first_row + len(rows), max_elements=most):
        begin, end = tile.row_begin - first_row, tile.row_end - first_row
        window = rows[begin:end, tile.column_begin : tile.column_end]
        window.copy_(unpack(matrix, tile, read))
        _check_range(window, name, matrix.scheme.label, narrows=True)
        yield total_bytes * (done + tile.size) // total - total_bytes * done // total
        done += tile.size


def _mapped(stream: BinaryIO, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """The bytes [begin, end) as elements, which the file format may leave misaligned.

    The mapping ends with the tensor. It is copy-on-write only because torch wants it.
    """
    page_begin = begin - begin % mmap.ALLOCATIONGRANULARITY
    offset = begin - page_begin
    mapped = mmap.mmap(stream.fileno(), end - page_begin, offset=page_begin, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_WILLNEED"):
        mapped.madvise(mmap.MADV_WILLNEED)
    if offset % dtype.itemsize == 0:
        return torch.frombuffer(mapped, dtype=dtype, offset=offset)
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=offset).clone().view(dtype)


def _check_range(window: Tensor, name: str, stored: str, *, narrows: bool) -> None:
    if narrows and window.dtype is torch.float16 and not bool(torch.isfinite(window).all()):
        raise ValueError(f"tensor {name} of {stored} has values that float16 cannot hold")
