"""The kernel of prompts on Hopper equals the formula of attention, in an emulator of Gluon."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stage_worker.model import attention_work
from stage_worker.model.attention_work import AttentionWork
from stage_worker.model.triton_kernels import hopper_attention
from stage_worker.model.triton_kernels.launch import Launch
from tests.kernels.emulated.gluon import Emulator
from tests.kernels.interpreted.paged import Given, Paged, Shape

pytestmark = pytest.mark.kernels

TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Errors, relative to the values, which have a spread of 1."""
GQA = Shape(heads=4, kv_heads=1, width=128)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of keys are short, so that chunks have several."""
    monkeypatch.setattr(attention_work, "KEY_SPLIT", 128)
    monkeypatch.setattr(attention_work, "CHUNK_SPLIT", 256)
    emulator = Emulator(hopper_attention, monkeypatch)
    monkeypatch.setattr(Launch, "__call__", lambda launched, *arguments: emulator.run(launched, *arguments))


def found_by_kernel(paged: Paged, work: AttentionWork) -> Tensor:
    """float32 [tokens, heads, width], with parts of keys merged."""
    shape = paged.given.shape
    output = torch.full((paged.num_tokens, shape.heads, shape.width), float("nan"), dtype=paged.given.dtype)
    mixed = torch.full((work.num_partial, shape.heads, shape.width), float("nan"))
    stats = torch.full((work.num_partial, shape.heads, 2), float("nan"))
    assert hopper_attention.takes(paged.query, output, paged.pages)
    hopper_attention.start(paged.query, output, work, paged.pages, mixed, stats, shape.row_width**-0.5)
    for row, first, num_parts, distance in work.merges.tolist():
        parts = torch.arange(num_parts) * distance + first
        kept = torch.exp2(stats[parts, :, 0] - stats[parts, :, 0].amax(0))
        total = (stats[parts, :, 1] * kept).sum(0)
        output[row] = ((mixed[parts] * kept[..., None]).sum(0) / total[:, None]).to(output.dtype)
    return output.float()


def check(given: Given) -> None:
    paged = Paged(given)
    error = (found_by_kernel(paged, paged.work()).double() - paged.expected()).abs().max()
    assert float(error) < TOLERANCES[given.dtype]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_chunk_at_the_beginning_and_behind_keys(dtype: torch.dtype) -> None:
    check(Given(shape=GQA, slices=[(0, 70), (500, 75)], dtype=dtype))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (12, 1)])
def test_groups_of_heads(heads: int, kv_heads: int) -> None:
    shape = Shape(heads=heads, kv_heads=kv_heads, width=128)
    check(Given(shape=shape, slices=[(120, 150)], dtype=torch.bfloat16))


def test_decodes_and_short_chunks_in_parts() -> None:
    check(Given(shape=GQA, slices=[(0, 1), (127, 1), (300, 1), (500, 30)], dtype=torch.bfloat16))


def test_items_without_queries_or_keys() -> None:
    """They write nothing, and zeros."""
    paged = Paged(Given(shape=GQA, slices=[(0, 40)], dtype=torch.bfloat16))

    work = paged.work()
    items = work.items.clone()
    items[0, 1] = 0
    items[1, 2:6] = 0
    found = found_by_kernel(paged, replace(work, items=items))
    assert found[:32].isnan().all()
    assert not found[32:].any()


@pytest.mark.parametrize(
    ("width", "block_size", "pages", "is_taken"),
    [
        (128, 16, torch.bfloat16, True),
        (128, 128, torch.bfloat16, True),
        (128, 8, torch.bfloat16, False),
        (128, 256, torch.bfloat16, False),
        (64, 16, torch.bfloat16, False),
        (128, 16, torch.float8_e4m3fn, False),
        (128, 16, torch.float16, False),
    ],
)
def test_other_pages_are_refused(width: int, block_size: int, pages: torch.dtype, is_taken: bool) -> None:
    query = torch.empty(1, 4, width, dtype=torch.bfloat16)
    of_pages = torch.empty(3, 2, 1, block_size, width, dtype=pages)
    assert hopper_attention.takes(query, query, of_pages) is is_taken
