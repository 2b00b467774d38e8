"""Tables of n-grams that a GPU reads in page-locked memory of its host."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint import Checkpoint, DType, stage_weight_bytes
from checkpoint.held import stage_table_bytes, table_bytes
from stage_worker.backends import cuda_runtime
from stage_worker.backends.backend import StageLoadError
from stage_worker.loading.stage_loader import WorkerResources, _check_memory, explained
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.host_weights import HostWeights
from stage_worker.model.kernels import PLAIN
from stage_worker.model.layer_weights import LayerWeights, allocate_layer
from stage_worker.model.ngrams import NgramLookup
from stage_worker.model.weight_reads import WINDOW_BYTES, HostTable, WeightReads
from stage_worker.model.weights import load_tensors
from tests.fake_device import FakeQueue
from tests.families import make_family

WITH_NGRAMS = 0
PAGE_BYTES = 4096


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(make_family(tmp_path_factory.mktemp("host-tables") / "model", "qwen4_exp_text"))


def new(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"))


def loaded(checkpoint: Checkpoint, queue: FakeQueue | None, **options: Any) -> LayerWeights:
    """The layer with n-grams, of a device whose copies `queue` makes, or of a CPU."""
    with WeightReads(queue, **options) as reads:
        weights, places = allocate_layer(checkpoint.config, WITH_NGRAMS, new, reads.new_table)
        load_tensors(checkpoint, places, reads=reads)
    return weights


def tables_of(checkpoint: Checkpoint, queue: FakeQueue) -> tuple[HostTable, Tensor]:
    """The table on the host for a device, and as a CPU has it."""
    found, expected = (loaded(checkpoint, copies).ngrams for copies in (queue, None))
    assert found is not None and expected is not None
    assert isinstance(found.table, HostTable) and isinstance(expected.table, Tensor)
    return found.table, expected.table


def test_a_table_is_read_into_page_locked_memory_of_its_size(checkpoint: Checkpoint) -> None:
    """From parts of files, and by no upload; the other weights are uploaded."""
    queue = FakeQueue()
    found, expected = tables_of(checkpoint, queue)
    assert torch.equal(found.rows, expected)
    assert queue.locked_bytes == table_bytes(checkpoint.config.layers[WITH_NGRAMS], DType.F32)
    plan = checkpoint.config.layers[WITH_NGRAMS].ngrams
    assert plan is not None and plan.num_shards > 1 and queue.num_uploads > 0
    small, with_uploads = FakeQueue(), FakeQueue()
    loaded(checkpoint, small, window_bytes=256)
    with WeightReads(with_uploads, window_bytes=256) as reads:
        _, places = allocate_layer(checkpoint.config, WITH_NGRAMS, new)
        load_tensors(checkpoint, places, reads=reads)
    of_a_piece = 256 // found.rows.element_size()
    pieces = sum(-(-len(shard) * plan.head_dim // of_a_piece) for shard in plan.shards)
    assert with_uploads.num_uploads - small.num_uploads == pieces


def test_rows_are_looked_up_on_the_host(checkpoint: Checkpoint) -> None:
    plan = checkpoint.config.layers[WITH_NGRAMS].ngrams
    weights = loaded(checkpoint, FakeQueue()).ngrams
    assert plan is not None and weights is not None and isinstance(weights.table, HostTable)
    tokens, before = torch.tensor([5, 9, 31]), torch.tensor([[4, 3], [5, 4], [plan.separator, 1]])
    on_host = NgramLookup(plan, weights)(tokens, before)
    on_device = NgramLookup(plan, replace(weights, table=weights.table.rows))(tokens, before)
    assert torch.equal(on_host, on_device) and on_host.shape == (3, plan.width)


def test_a_spare_keeps_a_table_as_it_is(checkpoint: Checkpoint) -> None:
    """Neither copied to blocks beside the other weights, nor back."""
    weights, queue = loaded(checkpoint, FakeQueue()), FakeQueue()
    assert weights.ngrams is not None and isinstance(weights.ngrams.table, HostTable)
    kept = HostWeights.copied(weights, queue, pinned_limit_bytes=1 << 30)
    all_on_device = replace(weights, ngrams=replace(weights.ngrams, table=weights.ngrams.table.rows))
    with_table = HostWeights.copied(all_on_device, queue, pinned_limit_bytes=1 << 30)
    assert with_table.num_bytes - kept.num_bytes == weights.ngrams.table.rows.nbytes
    with WeightReads(queue) as reads:
        again = kept.restored(torch.device("cpu"), reads, lambda: None)
    assert again.ngrams is not None and again.ngrams.table is weights.ngrams.table
    assert torch.equal(again.ngrams.conv, weights.ngrams.conv)


def test_a_spare_counts_a_table_as_pinned_memory(checkpoint: Checkpoint) -> None:
    """Within its limit, which leaves less for blocks of the other weights."""
    weights = loaded(checkpoint, FakeQueue())
    assert weights.ngrams is not None and isinstance(weights.ngrams.table, HostTable)
    table_bytes = weights.ngrams.table.rows.nbytes
    none, one = (
        HostWeights.copied(weights, FakeQueue(), pinned_limit_bytes=limit)
        for limit in (WINDOW_BYTES + table_bytes - 1, WINDOW_BYTES + table_bytes)
    )
    assert (none.num_pinned, none.pinned_bytes) == (0, table_bytes)
    assert (one.num_pinned, one.pinned_bytes) == (1, one.num_bytes + table_bytes)


def test_memory_that_is_not_page_locked_ends_the_load_with_size_and_reason(checkpoint: Checkpoint) -> None:
    queue = FakeQueue()
    queue.refusal = "cudaHostRegister: out of memory"
    plan = checkpoint.config.layers[WITH_NGRAMS].ngrams
    assert plan is not None
    message = (
        rf"cannot page-lock \d+\.\d KiB of host memory for a table of {plan.num_rows} rows,"
        r" which the GPU reads there: cudaHostRegister: out of memory: free memory of the host, or raise the"
        r" memory limit of the worker's container or service$"
    )
    with pytest.raises(StageLoadError, match=message), explained(torch.device("cpu")):
        loaded(checkpoint, queue)


def test_the_table_is_no_weight_of_a_gpu(checkpoint: Checkpoint) -> None:
    """Its memory on the host is checked against what the worker has for it."""
    config = checkpoint.config
    sizes = {"layer_begin": 0, "layer_end": 2, "has_embeddings": True, "has_head": False}
    on_gpu, on_cpu = (
        DecoderStage(config, **sizes, dtype=DType.F32, device=device, kernels=PLAIN)  # type: ignore[arg-type]
        for device in ("meta", "cpu")
    )
    whole = stage_weight_bytes(config, DType.F32, 0, 2, has_embeddings=True, has_head=False)
    tables = stage_table_bytes(config, DType.F32, 0, 2)
    assert (on_cpu.weight_bytes, on_cpu.table_bytes) == (whole, 0)
    assert (on_gpu.weight_bytes, on_gpu.table_bytes) == (whole - tables, tables)
    assignment: Any = SimpleNamespace(
        layer_begin=0,
        layer_end=2,
        num_blocks=1,
        block_size=16,
        staging_sizes=lambda _: SimpleNamespace(total_bytes=0),
    )
    resources = WorkerResources(
        device=torch.device("cuda:0"),
        memory_bytes=on_gpu.weight_bytes,
        model_directory=None,
        host_memory_bytes=tables,
    )
    _check_memory(assignment, resources, on_gpu, kv_bytes=0)
    small = replace(resources, host_memory_bytes=tables - 1)
    message = rf"{tables} bytes .* cuda:0 reads .* may use {tables - 1} of it"
    with pytest.raises(StageLoadError, match=message):
        _check_memory(assignment, small, on_gpu, kv_bytes=0)


class FakeRuntime:
    """Page locks of the driver, up to `most` of them; the device has the memory `shift` bytes further.

    Memory must be mapped when it is locked and unlocked, both for the same current `device`.
    """

    def __init__(self, *, most: int = 100, shift: int = 0) -> None:
        self.most, self.shift, self.device = most, shift, 3
        self.locked: dict[int, int] = {}

    def call(self, function: str, *arguments: Any) -> None:
        calls: dict[str, Callable[..., None]] = {
            "GetDevice": self._get_device,
            "SetDevice": self._set_device,
            "HostRegister": self._lock,
            "HostGetDevicePointer": self._find,
            "HostUnregister": self._unlock,
        }
        calls[function](*arguments)

    def _lock(self, place: ctypes.c_void_p, size: ctypes.c_size_t, flags: ctypes.c_uint) -> None:
        address = _mapped(place)
        assert flags.value == 1 | 2
        if len(self.locked) == self.most:
            raise OSError("cudaHostRegister: out of memory")
        self.locked[address] = size.value

    def _find(self, found: Any, place: ctypes.c_void_p, flags: ctypes.c_uint) -> None:
        assert flags.value == 0
        found._obj.value = _mapped(place) + self.shift

    def _unlock(self, place: ctypes.c_void_p) -> None:
        assert self.device == 3
        del self.locked[_mapped(place)]

    def _get_device(self, found: Any) -> None:
        found._obj.value = self.device

    def _set_device(self, device: ctypes.c_int) -> None:
        self.device = device.value


def _mapped(place: ctypes.c_void_p) -> int:
    """The address, of a page of an anonymous mapping."""
    address = place.value
    assert address is not None and address % PAGE_BYTES == 0
    ranges = [line.split(" ", 1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    assert any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)
    return address


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    """Pieces are of two pages. All memory is unlocked in the end."""
    found = FakeRuntime()
    monkeypatch.setattr(cuda_runtime, "device_runtime", lambda: found)
    monkeypatch.setattr(cuda_runtime, "LOCKED_PIECE_BYTES", 2 * PAGE_BYTES)
    yield found
    gc.collect()
    assert not found.locked


def test_memory_is_locked_in_pieces_and_unlocked_with_its_last_view(runtime: FakeRuntime) -> None:
    """Before it is freed, after which nothing could be read there."""
    size = 5 * PAGE_BYTES + 100
    tensor = torch.from_numpy(cuda_runtime.locked_memory(size)).view(torch.float16)[10:]
    tensor.fill_(1.0)
    gc.collect()
    assert list(runtime.locked.values()) == [2 * PAGE_BYTES, 2 * PAGE_BYTES, PAGE_BYTES + 100]
    first, second, third = runtime.locked
    assert second - first == third - second == 2 * PAGE_BYTES
    view = tensor[5:]
    del tensor
    gc.collect()
    assert len(runtime.locked) == 3 and bool((view == 1.0).all())
    runtime.device = 0  # of a thread that computes nothing
    del view
    gc.collect()
    assert not runtime.locked


@pytest.mark.parametrize("most", [0, 2])
def test_memory_that_the_driver_refuses_is_unlocked_again(runtime: FakeRuntime, most: int) -> None:
    runtime.most = most
    with pytest.raises(OSError, match="cudaHostRegister: out of memory"):
        cuda_runtime.locked_memory(5 * PAGE_BYTES)


def test_memory_at_another_address_of_the_device_is_refused(runtime: FakeRuntime) -> None:
    """Kernels read a table as one range of addresses."""
    runtime.shift = 4096
    with pytest.raises(OSError, match=r"the device has host memory of address 0x\w+ at 0x\w+"):
        cuda_runtime.locked_memory(PAGE_BYTES)
