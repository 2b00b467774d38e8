"""Reads a stage's tensors from checkpoint files into allocated memory.

Tensors are read in pieces of a few MiB by the threads of `WeightReads`: straight into their place on a CPU,
if they are stored in the run dtype, or else through memory of each reader. Quantised matrices are unpacked
by the thread of the load, in pieces that take the memory of some windows; bytes that stay as they are stored
are read like other tensors. Files are read and not mapped: a read error ends the load, not the process.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import groupby
from math import isfinite, prod
from pathlib import Path
from typing import BinaryIO, Protocol, Self

import torch
from torch import Tensor

from checkpoint import BadHeader, Checkpoint, CheckpointNotFound, DType, TensorEntry, open_regular
from checkpoint.quantization import PackedMatrix, StoredPart
from stage_worker.model.held_matrices import HeldLoad, HeldRows, held_load
from stage_worker.model.unpack import STORED_TORCH_DTYPES, ReadElements, Tile, num_rows, tiles, unpack
from stage_worker.model.weight_reads import WINDOW_BYTES, HostTable, WeightPiece, WeightReads

UNPACKING_WINDOWS = 8
"""Windows whose memory one piece of a quantised matrix takes while it is unpacked; fewer are slower."""
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
    destinations: Mapping[str, Tensor | HeldRows | HostTable],
    *,
    reads: WeightReads | None = None,
    window_bytes: int = WINDOW_BYTES,
    progress: ReadProgress = NO_PROGRESS,
) -> None:
    """Fill each destination: contiguous, in the shape of the checkpoint's tensor of that name, any dtype; or
    rows of a matrix that stays as it is stored, or of a table that stays on the host.

    `reads` has the threads, and windows for destinations on a device; None reads here, for a CPU, in pieces
    of `window_bytes`. Files are read in order of position, then matrices that stay as they are. `progress` is
    called after each piece; its exceptions end the load.

    Raises:
        CheckpointNotFound: A file cannot be opened or read.
        BadHeader: A file is shorter than its header states.
        ValueError: A weight does not fit into the run dtype (float16 ends at 65504).
    """
    order = sorted(destinations, key=lambda name: _place(checkpoint, name))
    if reads is not None:
        window_bytes = reads.window_bytes
    with _Files(checkpoint.directory) as files:
        pieces = (
            piece
            for name in order
            if not isinstance(destination := destinations[name], HeldRows)
            for piece in _pieces(checkpoint, files, name, destination, window_bytes=window_bytes)
        )
        _fill(pieces, reads, progress)
        loads = (
            _held_load(checkpoint, files, name, held, window_bytes)
            for name in order
            if isinstance(held := destinations[name], HeldRows)
        )
        _fill_held(loads, reads, progress)


def _fill_held(loads: Iterator[HeldLoad], reads: WeightReads | None, progress: ReadProgress) -> None:
    """Loads without an end share one pass of the readers: experts have many small matrices."""
    for has_end, together in groupby(loads, lambda load: load.has_end):
        if not has_end:
            _fill((piece for load in together for piece in load.pieces()), reads, progress)
            continue
        for load in together:
            _fill(load.pieces(), reads, progress)
            load.finish()


@torch.inference_mode()
def load_rows(checkpoint: Checkpoint, name: str, destination: Tensor, *, first_row: int) -> None:
    """Fill `destination` with rows of the tensor `name`, from `first_row` on, on this thread.

    `destination` is contiguous, on a CPU, of any dtype, and has the tensor's shape except for the number of
    rows. A tensor of several matrices has their rows, one matrix after the other. Raises like
    `load_tensors`.
    """
    shape = checkpoint.shape_of(name)
    rows = prod(shape[:-1]) if len(shape) > 1 else shape[0]
    is_right = tuple(destination.shape[1:]) == (shape[-1:] if len(shape) > 1 else ())
    assert is_right and first_row + len(destination) <= rows, f"rows of {name}"
    make = _packed_pieces if name in checkpoint.packed else _plain_pieces
    with _Files(checkpoint.directory) as files:
        for _ in _fill_here(make(checkpoint, files, name, destination, first_row, WINDOW_BYTES)):
            pass


def _fill(pieces: Iterator[WeightPiece], reads: WeightReads | None, progress: ReadProgress) -> None:
    copied = _fill_here(pieces) if reads is None else reads.copy(pieces)
    with closing(copied):
        for num_bytes in copied:
            progress.advance(num_bytes)


def _fill_here(pieces: Iterator[WeightPiece]) -> Generator[int, None, None]:
    for piece in pieces:
        piece.fill(piece.target)
        yield piece.num_bytes


def _place(checkpoint: Checkpoint, name: str) -> tuple[str, int]:
    return min((entry.file, entry.begin) for entry in checkpoint.parts_of(name))


class _Scratch(threading.local):
    """Memory of each thread, outside of its malloc arena, whose top glibc keeps when the thread has ended."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def memory(self, num_bytes: int) -> Tensor:
        """Bytes that are valid until the next call."""
        if len(self._memory) < num_bytes:
            self._memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        return self._memory[:num_bytes]


class _Files:
    """Files of a checkpoint, opened once; any thread may read them once they are open."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, BinaryIO] = {}
        self._stack = ExitStack()
        self._scratch = _Scratch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def open(self, entry: TensorEntry) -> None:
        """Open the file of a tensor. Raises BadHeader and like `open_regular`."""
        path = self._directory / entry.file
        if entry.file not in self._open:
            self._open[entry.file] = self._stack.enter_context(open_regular(path))
        size_bytes = os.fstat(self._open[entry.file].fileno()).st_size
        if size_bytes < entry.end:
            raise BadHeader(f"{path} has {size_bytes} bytes, its header accounted for {entry.end}")

    def elements(self, entry: TensorEntry, begin: int, end: int) -> Tensor:
        """Elements [begin, end) of a tensor, in new memory. Raises like `read_into`."""
        found = torch.empty(end - begin, dtype=STORED_TORCH_DTYPES[entry.dtype])
        self.read_into(found, entry, begin)
        return found

    def converted_into(self, memory: Tensor, entry: TensorEntry, begin: int) -> None:
        """As `read_into`, for memory of another dtype."""
        stored = STORED_TORCH_DTYPES[entry.dtype]
        read = self._scratch.memory(len(memory) * stored.itemsize).view(stored)
        self.read_into(read, entry, begin)
        memory.copy_(read)

    def read_into(self, memory: Tensor, entry: TensorEntry, begin: int) -> None:
        """Fill `memory`, contiguous and of the stored dtype, with elements from number `begin` on.

        Raises CheckpointNotFound and BadHeader with file and position.
        """
        place = entry.begin + begin * memory.element_size()
        left: memoryview = memory.view(-1).view(torch.uint8).numpy().data
        assert entry.begin <= place and place + len(left) <= entry.end, "elements of another tensor"
        path, descriptor = self._directory / entry.file, self._open[entry.file].fileno()
        while left:
            try:
                count = os.preadv(descriptor, [left], place)
            except OSError as error:
                raise CheckpointNotFound(
                    f"{path} cannot be read at byte {place}: {error.strerror}"
                ) from error
            if not count:
                raise BadHeader(f"{path} ends at byte {place}, its header accounted for {entry.end}")
            left, place = left[count:], place + count


def _pieces(
    checkpoint: Checkpoint, files: _Files, name: str, destination: Tensor | HostTable, *, window_bytes: int
) -> Iterator[WeightPiece]:
    if isinstance(destination, HostTable):
        pieces = _pieces(checkpoint, files, name, destination.rows, window_bytes=window_bytes)
        return (replace(piece, is_on_host=True) for piece in pieces)
    shape = checkpoint.shape_of(name)
    assert tuple(destination.shape) == shape, f"{name}: {tuple(destination.shape)} for {shape}"
    make = _packed_pieces if name in checkpoint.packed else _plain_pieces
    return make(checkpoint, files, name, destination, 0, window_bytes)


def _plain_pieces(
    checkpoint: Checkpoint,
    files: _Files,
    name: str,
    destination: Tensor,
    first_row: int,
    window_bytes: int,
) -> Iterator[WeightPiece]:
    entry, flat = checkpoint.tensors[name], destination.view(-1)
    assert _is_read_plainly(entry, destination), f"{name} is packed"
    stored_bytes = STORED_TORCH_DTYPES[entry.dtype].itemsize
    files.open(entry)
    offset = first_row * prod(destination.shape[1:])
    step = window_bytes // max(stored_bytes, flat.element_size())
    for begin in range(0, len(flat), step):
        window = flat[begin : begin + step]
        fill = partial(_fill_plain, files, entry, offset + begin, name)
        yield WeightPiece(window, fill, len(window) * stored_bytes)


def _fill_plain(files: _Files, entry: TensorEntry, begin: int, name: str, memory: Tensor) -> None:
    if memory.dtype is STORED_TORCH_DTYPES[entry.dtype]:
        files.read_into(memory, entry, begin)
        return
    assert _is_read_plainly(entry, memory), f"{name} is packed"
    files.converted_into(memory, entry, begin)
    _check_range(memory, name, entry.dtype.value)


def _is_read_plainly(entry: TensorEntry, memory: Tensor) -> bool:
    """Whether elements are values, and not codes: also whole numbers, for a `memory` of such."""
    return isinstance(entry.dtype, DType) or not memory.dtype.is_floating_point


def _packed_pieces(
    checkpoint: Checkpoint,
    files: _Files,
    name: str,
    destination: Tensor,
    first_row: int,
    window_bytes: int,
) -> Iterator[WeightPiece]:
    matrix = checkpoint.packed[name]
    rows = destination.view(-1, matrix.shape[-1])
    shares, read = _Shares(checkpoint, matrix), _reader(checkpoint, files, matrix)
    for tile in tiles(matrix, first_row, first_row + len(rows), max_elements=_most_elements(window_bytes)):
        begin, end = tile.row_begin - first_row, tile.row_end - first_row
        window = rows[begin:end, tile.column_begin : tile.column_end]
        fill = partial(_fill_packed, matrix, tile, read, name)
        yield WeightPiece(window, fill, shares.bytes_of(tile.size), is_unpacked=True)


def _fill_packed(matrix: PackedMatrix, tile: Tile, read: ReadElements, name: str, memory: Tensor) -> None:
    memory.copy_(unpack(matrix, tile, read))
    _check_range(memory, name, matrix.scheme.label)


def _held_load(
    checkpoint: Checkpoint, files: _Files, name: str, destination: HeldRows, window_bytes: int
) -> HeldLoad:
    matrix = checkpoint.packed[name]
    assert num_rows(matrix) == destination.end - destination.begin, f"rows of {name}"
    shares, read = _Shares(checkpoint, matrix), _reader(checkpoint, files, matrix)

    def read_into(part: StoredPart, begin: int, memory: Tensor) -> None:
        entry = checkpoint.tensors[matrix.parts[part].name]
        files.read_into(memory.view(STORED_TORCH_DTYPES[entry.dtype]), entry, begin)

    max_elements = _most_elements(window_bytes)
    return held_load(matrix, destination, read, read_into, shares.bytes_of, max_elements=max_elements)


def _most_elements(window_bytes: int) -> int:
    return max(UNPACKING_WINDOWS * min(window_bytes, WINDOW_BYTES) // UNPACKED_BYTES, 1)


def _reader(checkpoint: Checkpoint, files: _Files, matrix: PackedMatrix) -> ReadElements:
    """Reads parts of a matrix, whose files are opened here."""
    for entry in checkpoint.parts_of(matrix.name):
        files.open(entry)

    def read(part: StoredPart, begin: int, end: int) -> Tensor:
        entry = checkpoint.tensors[matrix.parts[part].name]
        return files.elements(entry, begin, prod(entry.shape) if end == -1 else end)

    return read


class _Shares:
    """Bytes of a matrix's stored tensors, in proportion to the elements that were read."""

    def __init__(self, checkpoint: Checkpoint, matrix: PackedMatrix) -> None:
        self._num_bytes = sum(entry.num_bytes for entry in checkpoint.parts_of(matrix.name))
        self._num_elements, self._done = num_rows(matrix) * matrix.shape[-1], 0

    def bytes_of(self, num_elements: int) -> int:
        """The share of `num_elements` more; all shares add up to all bytes."""
        before = self._num_bytes * self._done // self._num_elements
        self._done += num_elements
        return self._num_bytes * self._done // self._num_elements - before


def _check_range(memory: Tensor, name: str, stored: str) -> None:
    """Raise ValueError for values that were finite in the wider dtype `stored`."""
    if memory.dtype is torch.float16 and not all(map(isfinite, memory.aminmax())):
        raise ValueError(f"tensor {name} of {stored} has values that float16 cannot hold")
