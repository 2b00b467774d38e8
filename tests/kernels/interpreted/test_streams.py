"""Residual streams equal torch's operators, in the interpreter; a row does not depend on others of its step.

float32 to 1e-5, bfloat16 to one step of the last bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from checkpoint import Norm
from checkpoint.blueprint import NormKind
from checkpoint.streams import (
    BASE,
    DOWN,
    FN,
    NORM,
    SCALE,
    UP,
    WRITE,
    GatedCollapse,
    GatedConnection,
    HyperConnection,
    WeightedCollapse,
)
from stage_worker.model.hyper_connections import WriteWeights
from stage_worker.model.kernels import BY_TRITON, PLAIN
from stage_worker.model.norms import NormWeights, RowNorm
from stage_worker.model.operations import Operations, operations
from tests.kernels.interpreted.paged import random
from tests.kernels.interpreted.test_stage import Launches

pytestmark = pytest.mark.kernels

F32, BF16 = torch.float32, torch.bfloat16
TRITON, TORCH = operations(BY_TRITON), operations(PLAIN)
NUM_STREAMS = (1, 2, 3, 4)
SIZES = ((1, 96), (2, 296), (3, 296), (4, 96))
"""Streams, and their width: no power of two, below and above a part of products."""

HY_V4 = HyperConnection(num_streams=4, norm_eps=0.2, gate_eps=0.03, magnitude=1.7, write_eps=0.05)
DEEPSEEK_V4 = HyperConnection(num_streams=4, norm_eps=0.2, gate_eps=0.03, mixing_rounds=20)
CONNECTIONS: dict[str, HyperConnection | GatedConnection] = {
    "hy_v4": HY_V4,
    "deepseek_v4": DEEPSEEK_V4,
    "one-round": replace(DEEPSEEK_V4, mixing_rounds=1),
    "qwen4_exp": GatedConnection(num_streams=4, rank=20, norm_eps=0.2),
}
COLLAPSES: dict[str, WeightedCollapse | GatedCollapse] = {
    "weighted": WeightedCollapse(num_streams=4, norm_eps=0.2, gate_eps=0.03),
    "gated": GatedCollapse(num_streams=4, rank=20, norm_eps=0.2),
}


def tensors_of(
    plan: WeightedCollapse | GatedCollapse | HyperConnection, width: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Weights that tell streams, groups and elements apart."""
    sizes = {FN: 0.1, BASE: 1.0, SCALE: 1.0, NORM: 0.5, DOWN: 0.2, UP: 0.3, WRITE: 0.2}
    return {
        kind: (random(*shape, seed=seed) * sizes[kind]).to(F32 if plan.is_wide else dtype)
        for seed, (kind, shape) in enumerate(plan.shapes(width).items(), 5)
    }


def streams_of(num_rows: int, num_streams: int, width: int, dtype: torch.dtype) -> Tensor:
    """Of unequal sizes."""
    sizes = torch.tensor([0.2, 1.0, 3.0, 0.5])[:num_streams, None]
    return (random(num_rows, num_streams, width) * sizes).flatten(1).to(dtype)


def row_norm(chosen: Operations, width: int, dtype: torch.dtype) -> RowNorm:
    weights = NormWeights(random(width, dtype=dtype, seed=3), None)
    return chosen.norm(Norm(kind=NormKind.RMS, eps=0.05), weights)


def passed(
    chosen: Operations, plan: HyperConnection | GatedConnection, streams: Tensor, result: Tensor
) -> tuple[Tensor, ...]:
    """What a sub-layer reads, the weights of its result, and the new streams."""
    width = result.shape[1]
    norm = None if isinstance(plan, GatedConnection) else row_norm(chosen, width, streams.dtype)
    before = streams.clone()
    row, weights = chosen.connection(plan, tensors_of(plan, width, streams.dtype), norm)(streams)
    new = chosen.written(streams, result, weights)
    torch.testing.assert_close(streams, before, rtol=0, atol=0, equal_nan=True)  # not modified
    in_place = chosen.written(before, result, weights, in_place=True)
    torch.testing.assert_close(in_place, new, rtol=0, atol=0, equal_nan=True)
    assert (in_place is before) is (chosen is TRITON)
    mixing = () if weights.mixing is None else (weights.mixing,)
    return row, weights.result, *mixing, new


def row_by_row(a: NDArray[Any], b: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
    return np.stack([(row[:, None] * b).sum(axis=0, dtype=dtype) for row in a])


def assert_equal(found: Tensor, expected: Tensor) -> None:
    tolerance = 2**-7 if found.dtype is BF16 else 1e-5
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", CONNECTIONS)
def test_a_sub_layer_reads_and_writes_streams(
    kind: str, sizes: tuple[int, int], num_rows: int, dtype: torch.dtype
) -> None:
    num_streams, width = sizes
    plan = replace(CONNECTIONS[kind], num_streams=num_streams)
    streams = streams_of(num_rows, num_streams, width, dtype)
    result = random(num_rows, width, dtype=dtype, seed=2)
    found, expected = (passed(chosen, plan, streams, result) for chosen in (TRITON, TORCH))
    for mine, theirs in zip(found, expected, strict=True):
        assert_equal(mine, theirs)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 40])
@pytest.mark.parametrize("num_streams", NUM_STREAMS)
@pytest.mark.parametrize("kind", COLLAPSES)
def test_streams_collapse(kind: str, num_streams: int, num_rows: int, dtype: torch.dtype) -> None:
    plan = replace(COLLAPSES[kind], num_streams=num_streams)
    tensors, streams = tensors_of(plan, 296, dtype), streams_of(num_rows, num_streams, 296, dtype)
    found, expected = (chosen.collapse(plan, tensors)(streams) for chosen in (TRITON, TORCH))
    assert_equal(found, expected)


@pytest.mark.parametrize("kind", [kind for kind in NormKind if kind is not NormKind.RMS], ids=str)
def test_what_is_read_is_normed_by_every_kind_of_norm(kind: NormKind) -> None:
    has_bias = kind in (NormKind.LAYER, NormKind.LAYER_OFFSET)
    weights = NormWeights(random(96, seed=3), random(96, seed=4) if has_bias else None)
    norm = Norm(kind=kind, eps=0.05, has_bias=has_bias)
    tensors, streams = tensors_of(HY_V4, 96, F32), streams_of(3, 4, 96, F32)
    found, expected = (
        chosen.connection(HY_V4, tensors, chosen.norm(norm, weights))(streams)[0]
        for chosen in (TRITON, TORCH)
    )
    assert_equal(found, expected)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("kind", ["hy_v4", "deepseek_v4"])
def test_a_row_does_not_depend_on_its_batch(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit; products of gated streams are torch's."""
    # The interpreter's products; the order of BLAS's sums depends on the place of a row, on some CPUs.
    monkeypatch.setattr(np, "matmul", row_by_row)
    streams, result = streams_of(40, 4, 296, dtype), random(40, 296, dtype=dtype, seed=2)
    together = passed(TRITON, CONNECTIONS[kind], streams, result)
    for begin, end in ((0, 1), (17, 18), (30, 37), (39, 40)):
        alone = passed(TRITON, CONNECTIONS[kind], streams[begin:end], result[begin:end])
        assert all(torch.equal(*pair) for pair in zip(alone, (x[begin:end] for x in together), strict=True))


def test_mixing_weights_of_extreme_logits_are_finite() -> None:
    tensors = tensors_of(DEEPSEEK_V4, 96, F32)
    tensors[BASE] = tensors[BASE] * 1000.0
    streams = streams_of(3, 4, 96, F32)
    found, expected = (
        chosen.connection(DEEPSEEK_V4, tensors, None)(streams)[1] for chosen in (TRITON, TORCH)
    )
    assert found.mixing is not None and expected.mixing is not None
    assert_equal(found.mixing, expected.mixing)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("kind", CONNECTIONS)
def test_what_is_not_finite_stays_within_its_row(kind: str) -> None:
    streams, result = streams_of(3, 4, 96, F32), random(3, 96, seed=2)
    streams[1, 200] = float("nan")
    row, *_, new = passed(TRITON, CONNECTIONS[kind], streams, result)
    for found in (row, new):
        assert found.isfinite().all(1).tolist() == [True, False, True]


def test_new_streams_in_bfloat16_are_rounded_once() -> None:
    streams, result = streams_of(7, 3, 96, BF16), random(7, 96, dtype=BF16, seed=2)
    weights = WriteWeights(random(7, 3).abs(), random(7, 3, 3).abs())
    exact = TRITON.written(streams.float(), result.float(), weights)
    assert torch.equal(TRITON.written(streams, result, weights), exact.to(BF16))


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        ("deepseek_v4", ["stream_products_kernel", "stream_read_kernel", "stream_write_kernel"]),
        (
            "qwen4_exp",
            [
                *("mm", "mm", "mm", "stream_gates_kernel", "stream_mean_kernel"),
                *("stream_norm_kernel", "stream_write_kernel"),
            ],
        ),
    ],
)
def test_launches_of_a_sub_layer(kind: str, needed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its norm, and the rounds of mixing weights, have none of their own."""
    plan, streams = CONNECTIONS[kind], streams_of(3, 4, 96, BF16)
    norm = None if kind == "qwen4_exp" else row_norm(TRITON, 96, BF16)
    read = TRITON.connection(plan, tensors_of(plan, 96, BF16), norm)
    with Launches(monkeypatch) as launches:
        row, weights = read(streams)
        TRITON.written(streams, row, weights)
    assert sorted(launches.counts.elements()) == needed
