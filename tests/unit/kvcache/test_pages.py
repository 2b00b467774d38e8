import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvcache.pages import InvalidWrite, KvPages

_LAYERS, _BLOCKS, _BLOCK_SIZE, _HEADS, _DIM = 3, 5, 4, 2, 8


def make(dtype: torch.dtype = torch.float32) -> KvPages:
    return KvPages(
        num_layers=_LAYERS,
        num_blocks=_BLOCKS,
        block_size=_BLOCK_SIZE,
        num_kv_heads=_HEADS,
        head_dim=_DIM,
        dtype=dtype,
        device="cpu",
    )


def some(num_tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num_tokens, _HEADS, _DIM).to(dtype)


def everything(pages: KvPages) -> torch.Tensor:
    """[layers, keys and values, heads, 1, all slots in order, dim]; a copy, because gathers share memory."""
    every = torch.arange(_BLOCKS)[None]
    return torch.stack([torch.stack(pages.gather(layer, every)) for layer in range(_LAYERS)])


def write(pages: KvPages, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    pages.write(layer, torch.cat((keys, values), dim=1), slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_slots_are_gathered_from_their_pages(dtype: torch.dtype) -> None:
    pages = make(dtype)
    slots = torch.tensor([17, 2, 9])
    written = {layer: (some(3, dtype), some(3, dtype)) for layer in (0, 2)}
    for layer, (keys, values) in written.items():
        write(pages, layer, keys, values, slots)
    for layer, expected in written.items():
        for found, tensor in zip(pages.gather(layer, torch.tensor([[4, 0, 2]])), expected, strict=True):
            assert found.shape == (_HEADS, 1, 3 * _BLOCK_SIZE, _DIM)
            assert found.is_contiguous()
            assert torch.equal(found[:, 0, [1, 6, 9]], tensor.transpose(0, 1))
            assert found.count_nonzero() == tensor.count_nonzero()
    assert everything(pages)[1].count_nonzero() == 0


def test_a_batch_of_tables_is_gathered_like_each_alone() -> None:
    pages = make()
    write(pages, 1, some(20), some(20), torch.randperm(20))
    tables = torch.tensor([[3, 1], [0, 0], [4, 3]])
    keys, values = (found.clone() for found in pages.gather(1, tables))
    assert keys.shape == values.shape == (_HEADS, 3, 2 * _BLOCK_SIZE, _DIM)
    for row in range(3):
        alone = pages.gather(1, tables[row : row + 1])
        assert torch.equal(keys[:, row], alone[0][:, 0])
        assert torch.equal(values[:, row], alone[1][:, 0])


def test_large_gathers_allocate_their_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = make()
    write(pages, 0, some(20), some(20), torch.arange(20))
    small, _ = pages.gather(0, torch.tensor([[0]]))
    again, _ = pages.gather(0, torch.tensor([[1]]))
    assert small.data_ptr() == again.data_ptr()
    monkeypatch.setattr("kvcache.pages._KEPT_BYTES", 100)
    first, _ = pages.gather(0, torch.tensor([[0, 1]]))
    second, _ = pages.gather(0, torch.tensor([[2, 3]]))
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, everything(pages)[0, 0, :, :, : 2 * _BLOCK_SIZE])


def test_clearing_zeroes_a_page_in_all_layers_and_no_other() -> None:
    pages = make()
    for layer in range(_LAYERS):
        write(pages, layer, some(20), torch.full((20, _HEADS, _DIM), float("nan")), torch.arange(20))
    before = everything(pages).unflatten(4, (_BLOCKS, _BLOCK_SIZE))
    pages.clear(torch.tensor([1, 4]))
    after = everything(pages).unflatten(4, (_BLOCKS, _BLOCK_SIZE))
    assert not after[..., [1, 4], :, :].any()
    torch.testing.assert_close(
        after[..., [0, 2, 3], :, :], before[..., [0, 2, 3], :, :], equal_nan=True, atol=0, rtol=0
    )


_STEP: dict[str, Any] = {"shape": (2, _HEADS, _DIM), "dtype": torch.float32, "device": torch.device("cpu")}


@pytest.mark.parametrize(
    ("slots", "changes", "message"),
    [
        (np.array([0, 20]), {}, r"slots 0\.\.20 are out of range, available are 0\.\.19"),
        (np.array([-1, 3]), {}, r"slots -1\.\.3 are out of range"),
        (np.array([3, 3]), {}, "expected 2 different ones, got 1"),
        (np.array([3]), {}, r"expected torch.float32 \(1, 2, 8\) on cpu, got torch.float32 \(2, 2, 8\)"),
        (np.array([3.0, 4.0]), {}, "expected int64"),
        (np.array([3, 4], np.int32), {}, "expected int64"),
        (np.array([[3, 4]]), {}, r"got int64 \(1, 2\)"),
        (np.array([3, 4]), {"shape": (2, _DIM, _HEADS)}, r"got torch.float32 \(2, 8, 2\)"),
        (np.array([3, 4]), {"dtype": torch.bfloat16}, "got torch.bfloat16"),
        (np.array([3, 4]), {"device": torch.device("meta")}, "on meta"),
    ],
)
def test_a_step_that_does_not_fit_is_rejected_with_numbers(
    slots: NDArray[np.int64], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidWrite, match=message):
        make().validate_write(slots, **(_STEP | changes))


def test_a_step_that_fits_is_accepted() -> None:
    pages = make()
    pages.validate_write(np.array([19, 0]), **_STEP)
    pages.validate_write(np.array([], np.int64), **(_STEP | {"shape": (0, _HEADS, _DIM)}))


@pytest.mark.parametrize(
    "bad",
    [some(3), some(2), torch.randn(2, 2 * _HEADS, _DIM).to(torch.bfloat16), torch.randn(2, _DIM, 2 * _HEADS)],
)
def test_a_write_that_does_not_fit_writes_nothing(bad: torch.Tensor) -> None:
    pages = make()
    with pytest.raises(InvalidWrite, match=r"keys and values: expected torch.float32 \(2, 4, 8\) on cpu"):
        pages.write(0, bad, torch.tensor([1, 2]))
    assert everything(pages).count_nonzero() == 0


def test_gather_refuses_other_ranks_and_pages_that_do_not_exist() -> None:
    pages = make()
    with pytest.raises(InvalidWrite, match=r"\(1, 1, 1\)"):
        pages.gather(0, torch.zeros(1, 1, 1, dtype=torch.int64))
    with pytest.raises(IndexError):
        pages.gather(0, torch.tensor([[_BLOCKS]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_follow_the_formula(dtype: torch.dtype) -> None:
    pages = make(dtype)
    assert pages.size_bytes == _BLOCKS * _LAYERS * 2 * 64 * dtype.itemsize
    assert pages.num_slots == 20


def test_spare_pages_are_behind_all_blocks_and_have_no_slots() -> None:
    pages = KvPages(
        num_layers=_LAYERS,
        num_blocks=_BLOCKS,
        block_size=_BLOCK_SIZE,
        num_kv_heads=_HEADS,
        head_dim=_DIM,
        dtype=torch.float32,
        device="cpu",
        num_spare=1,
    )
    assert (pages.num_blocks, pages.num_slots) == (_BLOCKS, _BLOCKS * _BLOCK_SIZE)
    assert pages.store(1).shape == (_BLOCKS + 1, 2, _HEADS, _BLOCK_SIZE, _DIM)
    slots = np.array([pages.num_slots], np.int64)
    with pytest.raises(InvalidWrite, match=f"slots {pages.num_slots}"):
        pages.validate_write(slots, shape=(1, _HEADS, _DIM), dtype=torch.float32, device=torch.device("cpu"))
    write(pages, 1, some(1), some(1), torch.from_numpy(slots))
    assert not bool(everything(pages).any())
    assert bool(pages.store(1)[-1].any())


def test_impossible_sizes_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"\(0, 1, 1, 1, 2\), and layers at least 0, got 1"):
        KvPages(
            num_layers=1,
            num_blocks=0,
            block_size=1,
            num_kv_heads=1,
            head_dim=1,
            dtype=torch.float32,
            device="cpu",
        )


_UNWRITTEN_STORE = """
import os, sys, torch
from kvcache.pages import KvPages

def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

dtype = getattr(torch, sys.argv[1])
sizes = dict(num_layers=2, block_size=16, num_kv_heads=8, head_dim=128, dtype=dtype, device="cpu")
tokens = torch.cat((torch.ones(16, 8, 128, dtype=dtype), torch.full((16, 8, 128), 2, dtype=dtype)), dim=1)
small = KvPages(num_blocks=2, **sizes)
small.write(0, tokens, torch.arange(16))  # loads what writing needs
before = resident()
pages = KvPages(num_blocks=2**28 // (2 * 2 * 16 * 8 * 128 * dtype.itemsize), **sizes)
assert pages.size_bytes == 2**28, pages.size_bytes
pages.write(1, tokens, torch.arange(160, 176))
keys, values = pages.gather(1, torch.tensor([[10, 11]]))
assert keys[:, 0, :16].eq(1).all() and values[:, 0, :16].eq(2).all()
assert not keys[:, 0, 16:].any() and not values[:, 0, 16:].any()
print(resident() - before)
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from Linux' /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_cpu_store_takes_memory_only_for_what_is_written(dtype: str) -> None:
    """In a separate process: memory kept from earlier tests can hide the growth."""
    command = [sys.executable, "-c", _UNWRITTEN_STORE, dtype]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 2**25


@pytest.mark.parametrize("num_blocks", [1, 5, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_cpu_store_is_aligned_like_any_tensor(num_blocks: int, dtype: torch.dtype) -> None:
    pages = KvPages(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=4,
        num_kv_heads=2,
        head_dim=8,
        dtype=dtype,
        device="cpu",
    )
    keys, _ = pages.gather(0, torch.arange(num_blocks)[None])
    assert keys.count_nonzero() == 0
    assert pages._store.data_ptr() % 64 == 0


def test_the_accounting_does_not_load_torch() -> None:
    code = "import sys, kvcache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
