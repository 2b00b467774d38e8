"""Kernels that write keys and entries of compressed attention, in the sizes of DeepSeek V4, compute what a
CPU computes: less than 2 % of the elements are rounded otherwise.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from checkpoint import RopeConfig
from checkpoint.compressed import Compressor
from stage_worker.model.kernels import load_triton
from tests import torch_kernels

pytestmark = pytest.mark.gpu

ROPE, HEAD_DIM, BLOCK = RopeConfig(width=64, is_interleaved=True), 512, 16
PLANS = {"overlap": Compressor(ratio=4, has_overlap=True), "alone": Compressor(ratio=128)}


@pytest.fixture
def gpu(prepared: torch.device) -> torch.device:
    if prepared.type == "cpu":
        pytest.skip("Triton kernels need a GPU; `make test-kernels` interprets them")
    return prepared


def random(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def table_of(count: int) -> tuple[Tensor, Tensor]:
    angles = 100 * random(count, 1, 32, seed=1)
    halves = (angles.cos(), angles.cos()), (-angles.sin(), angles.sin())
    cos, sin = (torch.cat(pair, -1).bfloat16() for pair in halves)
    return cos, sin


def assert_few_differ(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=2.0**-7, atol=2.0**-7)
    assert float((found.cpu() != expected).float().mean()) < 0.02, "other points of rounding"


def test_queries_keys_and_rows_are_those_of_a_cpu(gpu: torch.device) -> None:
    count, pending_width = 33, 2560
    cos, sin = table_of(count)
    queries, keys = random(count, 64, HEAD_DIM, seed=2).bfloat16(), random(count, HEAD_DIM, seed=3).bfloat16()
    pending, slots = random(count, pending_width, seed=4).bfloat16(), torch.randperm(4 * BLOCK)[:count]
    slots[7] = -1
    pages = torch.zeros(4, 1, 1, BLOCK, HEAD_DIM, dtype=torch.bfloat16)
    rows = torch.zeros(4, BLOCK, pending_width, dtype=torch.bfloat16)
    weight = random(HEAD_DIM, seed=5)
    tensors = (queries, keys, cos, sin, slots, pages)
    on_gpu, rows_on_gpu = [x.to(gpu) for x in tensors], rows.to(gpu)
    torch_kernels.norm_and_write(
        *tensors, rope=ROPE, weight=weight, eps=1e-6, pending=pending, pending_rows=rows
    )
    kernels = load_triton("last_rotation")
    kernels.norm_and_write(
        *on_gpu,
        rope=ROPE,
        weight=weight.to(gpu),
        eps=1e-6,
        pending=pending.to(gpu),
        pending_rows=rows_on_gpu,
    )
    assert_few_differ(on_gpu[0], queries)
    assert_few_differ(on_gpu[-1], pages)
    assert torch.equal(rows_on_gpu.cpu(), rows)
    for width in (HEAD_DIM, 128):
        heads = random(count, 64, width, seed=6).bfloat16()
        turned = heads.to(gpu)
        kernels.rotate_last(turned, *on_gpu[2:4], rope=ROPE, is_back=width == HEAD_DIM)
        torch_kernels.rotate_last(heads, cos, sin, rope=ROPE, is_back=width == HEAD_DIM)
        assert_few_differ(turned, heads)


@pytest.mark.parametrize(("plan", "width"), [("overlap", HEAD_DIM), ("overlap", 128), ("alone", HEAD_DIM)])
def test_entries_are_those_of_a_cpu(plan: str, width: int, gpu: torch.device) -> None:
    """In rows with as many columns before and after those of the entries; the first lacks earlier tokens."""
    compressor, count = PLANS[plan], 20
    columns = width * (2 if compressor.has_overlap else 1)
    pending = random(count * 8, BLOCK, 4 * columns, seed=2).bfloat16()
    order = torch.randperm(count * 128, generator=torch.Generator().manual_seed(3))
    sources = order[: count * compressor.span].view(count, -1)
    sources[0, : compressor.span - compressor.ratio] = -1
    pooling = load_triton("pooling").Pooling(
        plan=compressor,
        first=columns,
        bias=random(compressor.ratio, columns, seed=4),
        weight=random(width, seed=5),
        eps=1e-6,
        rope=ROPE,
    )
    cos, sin = table_of(count)
    rows, slots = torch.zeros(count, 1, width, dtype=torch.bfloat16), torch.randperm(count)
    given, into = (pending, sources, None, cos, sin, slots), rows.to(gpu)
    torch_kernels.pool(pooling, *given, rows)
    on_gpu = replace(pooling, bias=pooling.bias.to(gpu), weight=pooling.weight.to(gpu))
    load_triton("pooling").pool(on_gpu, *(None if x is None else x.to(gpu) for x in given), into)
    assert_few_differ(into, rows)
