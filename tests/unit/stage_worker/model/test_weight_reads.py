"""Readers of weights: order, every byte, bounded memory, errors that end a load and leave no thread."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from checkpoint import BadHeader, Checkpoint, CheckpointNotFound
from stage_worker.backends.backend import LoadCancelled
from stage_worker.backends.contract import DeviceError
from stage_worker.model import held_matrices
from stage_worker.model.attention_views import HostArray
from stage_worker.model.held_matrices import HeldRows, NibbleMatrix
from stage_worker.model.host_weights import with_tensors
from stage_worker.model.layer_weights import allocate_layer
from stage_worker.model.weight_reads import (
    NUM_DEVICE_READERS,
    NUM_READERS,
    NUM_WINDOWS,
    HostTable,
    WeightPiece,
    WeightReads,
)
from stage_worker.model.weights import load_tensors
from tests.checkpoints import make_checkpoint
from tests.quantized import FORMATS, write_quantized

GARBAGE = 0xA5
WINDOW_BYTES = 4096


@dataclass(eq=False)
class _LateCopy:
    """Bytes leave the window when somebody waits for the copy, and not before."""

    target: Tensor
    source: HostArray
    copies: LateCopies
    has_ended: bool = False

    def synchronize(self) -> None:
        self.copies.check()
        if not self.has_ended:
            self.target.copy_(torch.from_numpy(self.source))
            self.has_ended = True


@dataclass(eq=False)
class LateCopies:
    """A device on memory of the host. A window that is filled again too early changes what arrives.

    `computation` runs when uploads wait for it, and not before.
    """

    allocated: list[int] = field(default_factory=list)
    started: list[_LateCopy] = field(default_factory=list)
    fails_after: int | None = None
    computation: list[Callable[[], None]] = field(default_factory=list)

    def host_memory(self, num_bytes: int) -> HostArray:
        self.allocated.append(num_bytes)
        return np.full(num_bytes, GARBAGE, np.uint8)

    def locked_memory(self, num_bytes: int) -> HostArray:
        return np.full(num_bytes, GARBAGE, np.uint8)

    def fence_uploads(self) -> None:
        while self.computation:
            self.computation.pop(0)()

    def upload(self, target: Tensor, source: HostArray) -> _LateCopy:
        assert target.dtype is torch.uint8 and target.shape == source.shape
        if self.fails_after == len(self.started):
            self.fails_after = -1
        self.check()
        self.started.append(_LateCopy(target, source, self))
        return self.started[-1]

    def check(self) -> None:
        if self.fails_after == -1:
            raise DeviceError("the device failed")


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("weight-reader")]


def filler(value: int) -> Callable[[Tensor], None]:
    def fill(memory: Tensor) -> None:
        memory.fill_(value)

    return fill


def run(reads: WeightReads, pieces: Iterable[WeightPiece]) -> list[int]:
    with reads:
        return list(reads.copy(pieces))


@pytest.mark.parametrize("num_pieces", [0, 1, NUM_WINDOWS, 5 * NUM_WINDOWS + 1])
def test_pieces_reach_a_device_in_order_through_a_bounded_number_of_windows(num_pieces: int) -> None:
    copies, targets = LateCopies(), torch.zeros(num_pieces, 100)
    pieces = [WeightPiece(targets[index], filler(index + 1), index) for index in range(num_pieces)]
    assert run(WeightReads(copies, window_bytes=WINDOW_BYTES), pieces) == list(range(num_pieces))
    assert torch.equal(targets, torch.arange(1.0, num_pieces + 1)[:, None].expand(num_pieces, 100))
    assert [copy.target.data_ptr() for copy in copies.started] == [target.data_ptr() for target in targets]
    assert copies.allocated == [WINDOW_BYTES] * min(num_pieces, NUM_WINDOWS)


def test_pieces_leave_memory_alone_that_earlier_computation_reads() -> None:
    """As allocators of devices give it away: freed after the computation was queued."""
    copies, target, seen = LateCopies(), torch.zeros(9), list[Tensor]()
    with WeightReads(copies, window_bytes=WINDOW_BYTES) as reads:
        for value in (1, 2):
            copies.computation.append(lambda: seen.append(target.clone()))
            assert list(reads.copy([WeightPiece(target, filler(value), 1)])) == [1]
    copies.fence_uploads()
    assert [one.unique().tolist() for one in seen] == [[0], [1]]
    assert bool((target == 2).all())


@pytest.mark.parametrize("form", ["gptq-v2", "awq"])
def test_codes_are_packed_before_their_memory_has_those_of_the_next_matrix(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing is computation of the device, which runs late; all matrices have one memory for their codes."""
    write_quantized(tmp_path, FORMATS[form], seed=5)
    checkpoint, copies = Checkpoint.open(tmp_path).with_stored(holds_stored=True), LateCopies()
    expected, given = allocate_layer(checkpoint.config, 0, garbage)
    load_tensors(checkpoint, given)
    found, given = allocate_layer(checkpoint.config, 0, garbage)
    begin, finish = held_matrices._ColumnLoad.__init__, held_matrices._ColumnLoad.finish
    memory = torch.empty(1 << 20, dtype=torch.uint8)

    def begin_in_memory(load: Any, matrix: Any, *others: Any) -> None:
        begin(load, matrix, *others)
        load._codes = memory[: load._codes.numel()].view(load._codes.shape)

    monkeypatch.setattr(held_matrices._ColumnLoad, "__init__", begin_in_memory)
    monkeypatch.setattr(
        held_matrices._ColumnLoad, "finish", lambda load: copies.computation.append(partial(finish, load))
    )
    with WeightReads(copies, window_bytes=1 << 12) as reads:
        load_tensors(checkpoint, given, reads=reads)
    copies.fence_uploads()
    pairs = list(zip(tensors_of(found), tensors_of(expected), strict=True))
    assert len(pairs) > 4 and all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("copies", [None, LateCopies()], ids=["in place", "windows"])
def test_readers_work_at_the_same_time(copies: LateCopies | None) -> None:
    num_readers = NUM_READERS if copies is None else NUM_DEVICE_READERS
    together = threading.Barrier(num_readers)

    def fill(memory: Tensor) -> None:
        together.wait(timeout=30)
        memory.fill_(7)

    targets = torch.zeros(2 * num_readers, 8)
    pieces = [WeightPiece(target, fill, 1) for target in targets]
    assert sum(run(WeightReads(copies, window_bytes=WINDOW_BYTES), pieces)) == len(pieces)
    assert bool((targets == 7).all())


def test_reads_go_on_while_windows_are_copied() -> None:
    """The first copy ends only when all other windows have been filled."""
    copies = LateCopies()
    others_filled = threading.Semaphore(0)

    def fill(memory: Tensor) -> None:
        memory.fill_(7)
        others_filled.release()

    class Waiting(_LateCopy):
        def synchronize(self) -> None:
            for _ in range(NUM_WINDOWS):
                assert others_filled.acquire(timeout=30), "no window is read beside a copy"
            super().synchronize()

    upload = copies.upload

    def first_waits(target: Tensor, source: HostArray) -> _LateCopy:
        copy = upload(target, source)
        return Waiting(target, source, copies) if len(copies.started) == 1 else copy

    copies.upload = first_waits  # type: ignore[method-assign]
    targets = torch.zeros(2 * NUM_WINDOWS, 8)
    run(WeightReads(copies, window_bytes=WINDOW_BYTES), [WeightPiece(target, fill, 1) for target in targets])
    assert bool((targets == 7).all())


@pytest.mark.parametrize("copies", [None, LateCopies()], ids=["in place", "windows"])
def test_an_error_of_a_reader_ends_the_load_when_no_reader_works(copies: LateCopies | None) -> None:
    num_working, lock = 0, threading.Lock()

    def count(change: int) -> None:
        nonlocal num_working
        with lock:
            num_working += change

    def fill(memory: Tensor) -> None:
        count(1)
        memory.fill_(7)
        count(-1)

    def fail(memory: Tensor) -> None:
        raise BadHeader("broken here")

    targets = torch.zeros(20, 8)
    pieces = [WeightPiece(target, fail if index == 5 else fill, 1) for index, target in enumerate(targets)]
    with WeightReads(copies, window_bytes=WINDOW_BYTES) as reads:
        copied = reads.copy(pieces)
        seen = [next(copied) for _ in range(5)]
        with pytest.raises(BadHeader, match="broken here"):
            next(copied)
        assert len(seen) == 5 and num_working == 0
        assert not targets[-1].any(), "pieces behind the error are not read"
        assert list(reads.copy([WeightPiece(targets[0], filler(3), 1)])) == [1], (
            "the windows can be used again"
        )
    assert bool((targets[0] == 3).all())
    assert not readers()


def test_a_failed_device_ends_the_load() -> None:
    copies = LateCopies(fails_after=3)
    targets = torch.zeros(20, 8)
    with pytest.raises(DeviceError, match="the device failed"):
        run(
            WeightReads(copies, window_bytes=WINDOW_BYTES),
            [WeightPiece(one, filler(1), 1) for one in targets],
        )
    assert not readers()


def checkpoint_of(tmp_path: Path) -> tuple[Checkpoint, dict[str, Tensor]]:
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, "qwen2", num_layers=2, max_shard_size="40KB"))
    places = {name: torch.full(entry.shape, float("nan")) for name, entry in checkpoint.tensors.items()}
    return checkpoint, places


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copies", [None, LateCopies()], ids=["in place", "windows"])
def test_every_element_of_a_checkpoint_arrives(
    dtype: torch.dtype, copies: LateCopies | None, tmp_path: Path
) -> None:
    checkpoint, places = checkpoint_of(tmp_path)
    expected = {name: place.to(dtype) for name, place in places.items()}
    load_tensors(checkpoint, expected)
    found = {name: torch.full_like(place, float("nan")) for name, place in expected.items()}
    with WeightReads(copies, window_bytes=1000) as reads:
        load_tensors(checkpoint, found, reads=reads)
    for name, place in found.items():
        assert torch.equal(place, expected[name])


@pytest.mark.parametrize("form", ["gptq", "awq", "nf4", "fp8-block"])
def test_unpacked_matrices_arrive_in_their_columns(form: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, FORMATS[form])
    checkpoint, copies = Checkpoint.open(tmp_path), LateCopies()
    expected = {name: torch.empty(checkpoint.shape_of(name)) for name in checkpoint.packed}
    load_tensors(checkpoint, expected)
    found = {name: torch.full_like(place, float("nan")) for name, place in expected.items()}
    with WeightReads(copies, window_bytes=1 << 12) as reads:
        load_tensors(checkpoint, found, reads=reads)
    assert len(copies.started) > len(found)
    for name, place in found.items():
        assert torch.equal(place, expected[name])


@pytest.mark.parametrize("form", ["gptq", "awq", "pack4-actorder", "fp8-block-bf16", "int-channel"])
def test_matrices_as_they_are_stored_arrive_through_windows(form: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, FORMATS[form], seed=5)
    checkpoint, copies = Checkpoint.open(tmp_path).with_stored(holds_stored=True), LateCopies()
    expected, given = allocate_layer(checkpoint.config, 0, garbage)
    load_tensors(checkpoint, given)
    found, given = allocate_layer(checkpoint.config, 0, garbage)
    held = [one.matrix for one in given.values() if isinstance(one, HeldRows)]
    for matrix in held:
        for tensor in tensors_of(matrix):
            tensor.fill_(GARBAGE % 100)
    with WeightReads(copies, window_bytes=1 << 12) as reads:
        load_tensors(checkpoint, given, reads=reads)
    pairs = list(zip(tensors_of(found), tensors_of(expected), strict=True))
    assert all(torch.equal(one, other) for one, other in pairs)
    arrived = sum(copy.source.nbytes for copy in copies.started)
    is_by_row = form not in ("gptq", "awq")
    needed = sum(uploaded_bytes(one, is_by_row=is_by_row) for one in given.values())
    assert arrived == needed, "every byte by a window"


def garbage(*shape: int) -> Tensor:
    return torch.full(shape, float(GARBAGE))


def tensors_of(weights: object) -> list[Tensor]:
    found: list[Tensor] = []

    def noted(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with_tensors(weights, noted)
    return found


def uploaded_bytes(destination: Tensor | HeldRows | HostTable, *, is_by_row: bool) -> int:
    """4-bit codes of formats that are stored by columns arrive one by one, and are packed on the device."""
    if isinstance(destination, Tensor):
        return destination.nbytes
    assert isinstance(destination, HeldRows), "a model without tables"
    matrix, rows = destination.matrix, destination.end - destination.begin
    per_row = matrix.scales.nbytes / matrix.scales.shape[1]
    if isinstance(matrix, NibbleMatrix):
        zeros = 0 if matrix.zeros is None else len(matrix.zeros)
        of_codes = matrix.plan.row_bytes if is_by_row else matrix.plan.columns
        return round(rows * (of_codes + per_row + zeros))
    return round(rows * (matrix.plan.columns + per_row / matrix.plan.height))


@pytest.mark.parametrize("copies", [None, LateCopies()], ids=["in place", "windows"])
def test_an_unreadable_place_of_a_file_is_named(
    copies: LateCopies | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, places = checkpoint_of(tmp_path)
    entry = checkpoint.tensors["model.layers.1.mlp.down_proj.weight"]
    preadv = os.preadv

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        if offset == entry.begin + 2000:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    text = f"{entry.file} cannot be read at byte {entry.begin + 2000}: Input/output error"
    with WeightReads(copies, window_bytes=1000) as reads, pytest.raises(CheckpointNotFound, match=text):
        load_tensors(checkpoint, places, reads=reads)
    assert not readers()


def test_a_file_that_ends_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, places = checkpoint_of(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    entry = checkpoint.tensors[name]
    monkeypatch.setattr(os, "preadv", lambda *given: 0)
    text = rf"{entry.file} ends at byte {entry.begin}, its header accounted for {entry.end}"
    with WeightReads() as reads, pytest.raises(BadHeader, match=text):
        load_tensors(checkpoint, {name: places[name]}, reads=reads)


def test_reads_that_return_less_than_was_wanted_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, places = checkpoint_of(tmp_path)
    expected = {name: torch.empty_like(place) for name, place in places.items()}
    load_tensors(checkpoint, expected)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:77]], at))
    with WeightReads() as reads:
        load_tensors(checkpoint, places, reads=reads)
    for name, place in places.items():
        assert torch.equal(place, expected[name])


def test_a_cancelled_load_leaves_no_thread(tmp_path: Path) -> None:
    checkpoint, places = checkpoint_of(tmp_path)

    class Progress:
        num_bytes = 0

        def expect(self, num_bytes: int) -> None:
            raise AssertionError

        def advance(self, num_bytes: int) -> None:
            self.num_bytes += num_bytes
            if self.num_bytes > 20_000:
                raise LoadCancelled("enough")

    copies = LateCopies()
    with WeightReads(copies, window_bytes=1000) as reads, pytest.raises(LoadCancelled):
        load_tensors(checkpoint, places, reads=reads, progress=Progress())
    assert not readers()
    assert len(copies.started) <= 20_000 // 1000 + 2, "nothing is copied after the cancellation"
