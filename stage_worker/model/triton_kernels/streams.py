"""Several residual streams: how sub-layers read and write them, see `stage_worker.model.hyper_connections`.

Products and sums are float32. Values are rounded where torch's operators round: hyper-connections where a row
or a stream is complete, gated streams after each operator.

A row's products with the projection of a hyper-connection are sums of parts of STREAM_SPLIT elements, which
a second kernel adds: a single token fills a GPU, and its sums are in the same order in every batch.
"""

# Constants of kernels are in capitals.
# ruff: noqa: N803
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from checkpoint.step_sizes import STREAM_SPLIT, stream_parts
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
from stage_worker.model.hyper_connections import Collapse, Read, WriteWeights
from stage_worker.model.layer_weights import StreamTensors
from stage_worker.model.triton_kernels.launch import PRECISION, Launch, padded
from stage_worker.model.triton_kernels.norms import KernelNorm, normed, normed_row

_ROWS, _COLUMNS = 32, 64
"""Rows and elements of a product of tiles."""
_ELEMENTS = 1024
"""Of a stream that one program writes."""


# fmt: off
# Steps have any number of rows: other kernels for some would be compiled while a stage serves.
@triton.jit(do_not_specialize=["num_rows"])
def stream_products_kernel(
    streams, fn, num_rows, partials, WIDTH: tl.constexpr, NUM_WEIGHTS: tl.constexpr, LANES: tl.constexpr,
    ROWS: tl.constexpr, SPLIT: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Products of SPLIT elements of some rows with `fn` [NUM_WEIGHTS, WIDTH], and their sum of squares after
    these: grid [blocks of rows, parts of WIDTH].
    """
    rows, lanes = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, LANES)
    is_row, is_weight = (rows < num_rows)[:, None], (lanes < NUM_WEIGHTS)[None, :]
    own = streams + rows.to(tl.int64)[:, None] * WIDTH
    total = tl.zeros([ROWS, LANES], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    begin = tl.program_id(1) * SPLIT
    for start in range(begin, begin + SPLIT, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        is_column = columns < WIDTH
        x = tl.load(own + columns[None, :], mask=is_row & is_column[None, :], other=0.0).to(tl.float32)
        weights = tl.load(
            fn + lanes[None, :] * WIDTH + columns[:, None], mask=is_weight & is_column[:, None], other=0.0
        )
        total = tl.dot(x, weights, total, input_precision=PRECISION)
        squares += tl.sum(x * x, 1)
    total = tl.where((lanes == NUM_WEIGHTS)[None, :], squares[:, None], total)
    places = (rows.to(tl.int64)[:, None] * tl.num_programs(1) + tl.program_id(1)) * LANES + lanes[None, :]
    tl.store(partials + places, total, mask=is_row & (lanes <= NUM_WEIGHTS)[None, :])


@triton.jit
def _doubly_stochastic(logits, is_weight, eps, ROUNDS: tl.constexpr):
    """See `hyper_connections.doubly_stochastic`; zeros outside of `is_weight`."""
    logits = tl.where(is_weight, logits, -3.0e38)
    found = tl.where(is_weight, tl.exp(logits - tl.max(logits, 1)[:, None]), 0.0)
    found = tl.where(is_weight, found / tl.sum(found, 1)[:, None] + eps, 0.0)
    found = found / (tl.sum(found, 0) + eps)[None, :]
    for _ in range(1, ROUNDS):
        found = found / (tl.sum(found, 1) + eps)[:, None]
        found = found / (tl.sum(found, 0) + eps)[None, :]
    return found


@triton.jit
def _sigmoids(
    partials, is_part, base, scale, factor, GROUP: tl.constexpr, NUM_STREAMS: tl.constexpr,
    STREAMS: tl.constexpr,
):
    """Sigmoids of the logits of a group with a weight for each stream."""
    stream = tl.arange(0, STREAMS)
    is_stream, places = stream < NUM_STREAMS, GROUP * NUM_STREAMS + stream
    mask = is_part[:, None] & is_stream[None, :]
    total = tl.sum(tl.load(partials[:, None] + places[None, :], mask=mask, other=0.0), 0)
    added = tl.load(base + places, mask=is_stream, other=0.0)
    return tl.sigmoid(total * factor * tl.load(scale + GROUP) + added)


@triton.jit
def _store_mixing(
    partials, is_part, base, scale, factor, eps, mixing, NUM_STREAMS: tl.constexpr, STREAMS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Weights of old streams in new ones, [NUM_STREAMS, NUM_STREAMS]."""
    stream = tl.arange(0, STREAMS)
    places = stream[:, None] * NUM_STREAMS + stream[None, :]
    is_weight = (stream < NUM_STREAMS)[:, None] & (stream < NUM_STREAMS)[None, :]
    own = partials[:, None, None] + 2 * NUM_STREAMS + places[None, :, :]
    total = tl.sum(tl.load(own, mask=is_part[:, None, None] & is_weight[None, :, :], other=0.0), 0)
    added = tl.load(base + 2 * NUM_STREAMS + places, mask=is_weight, other=0.0)
    logits = total * factor * tl.load(scale + 2) + added
    tl.store(mixing + places, _doubly_stochastic(logits, is_weight, eps, ROUNDS), mask=is_weight)


@triton.jit
def stream_read_kernel(
    streams, partials, base, scale, norm_eps, gate_eps, magnitude, write_eps, weight, bias, eps,
    found, result, mixing,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, NUM_STREAMS: tl.constexpr, STREAMS: tl.constexpr,
    NUM_PARTS: tl.constexpr, PARTS: tl.constexpr, NUM_WEIGHTS: tl.constexpr, LANES: tl.constexpr,
    MIXING_ROUNDS: tl.constexpr, ROUNDS: tl.constexpr, CENTRES: tl.constexpr,
):
    """One row: the sum of its streams, normed with a `weight`; and the weights of a result, without what is
    None.
    """
    row = tl.program_id(0).to(tl.int64)
    parts, stream = tl.arange(0, PARTS), tl.arange(0, STREAMS)
    is_part = parts < NUM_PARTS
    partials += (row * NUM_PARTS + parts) * LANES
    square = tl.sum(tl.load(partials + NUM_WEIGHTS, mask=is_part, other=0.0), 0)
    factor = tl.rsqrt(square / (NUM_STREAMS * WIDTH) + norm_eps)
    read = _sigmoids(partials, is_part, base, scale, factor, 0, NUM_STREAMS, STREAMS) + gate_eps
    if result is not None:
        write = _sigmoids(partials, is_part, base, scale, factor, 1, NUM_STREAMS, STREAMS)
        write = write * magnitude + write_eps
        tl.store(result + row * NUM_STREAMS + stream, write, mask=stream < NUM_STREAMS)
    if mixing is not None:
        own = mixing + row * (NUM_STREAMS * NUM_STREAMS)
        _store_mixing(
            partials, is_part, base, scale, factor, gate_eps, own, NUM_STREAMS, STREAMS, MIXING_ROUNDS
        )
    columns = tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([1, COLUMNS], tl.float32)
    for number in tl.static_range(NUM_STREAMS):
        own = streams + (row * NUM_STREAMS + number) * WIDTH + columns
        x = tl.load(own, mask=columns < WIDTH, other=0.0).to(tl.float32)
        total += x * tl.sum(tl.where(stream == number, read, 0.0), 0)
    x = total.to(found.dtype.element_ty)
    if weight is not None:
        x = normed_row(x, weight, bias, eps, COLUMNS, WIDTH, ROUNDS, CENTRES)
    tl.store(found + row * WIDTH + columns, x, mask=columns < WIDTH)


@triton.jit
def stream_write_kernel(
    streams, added, result, mixing, found, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    NUM_STREAMS: tl.constexpr, STREAMS: tl.constexpr,
):
    """COLUMNS elements of all new streams of one row: grid [rows, blocks of elements]."""
    row, stream = tl.program_id(0).to(tl.int64), tl.arange(0, STREAMS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_stream, is_column = stream < NUM_STREAMS, columns < WIDTH
    share = tl.load(result + row * NUM_STREAMS + stream, mask=is_stream, other=0.0)
    x = tl.load(added + row * WIDTH + columns, mask=is_column, other=0.0).to(tl.float32)
    total = share[:, None] * x[None, :]
    places = (row * NUM_STREAMS + stream)[:, None] * WIDTH + columns[None, :]
    mask = is_stream[:, None] & is_column[None, :]
    if mixing is None:
        total += tl.load(streams + places, mask=mask, other=0.0).to(tl.float32)
    else:
        for number in tl.static_range(NUM_STREAMS):
            own = mixing + (row * NUM_STREAMS + number) * NUM_STREAMS + stream
            share = tl.load(own, mask=is_stream, other=0.0)
            own = streams + (row * NUM_STREAMS + number) * WIDTH + columns
            x = tl.load(own, mask=is_column, other=0.0).to(tl.float32)
            total += share[:, None] * x[None, :]
    # In place, every thread has read what others write.
    tl.debug_barrier()
    tl.store(found + places, total.to(found.dtype.element_ty), mask=mask)


@triton.jit
def stream_norm_kernel(
    streams, weight, eps, found, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, NUM_STREAMS: tl.constexpr
):
    """One stream of one row, normed, times float32 `weight` [NUM_STREAMS, WIDTH]: grid [rows, streams]."""
    number, columns = tl.program_id(1), tl.arange(0, COLUMNS)[None, :]
    place = (tl.program_id(0).to(tl.int64) * NUM_STREAMS + number) * WIDTH
    is_column = columns < WIDTH
    x = tl.load(streams + place + columns, mask=is_column, other=0.0).to(tl.float32)
    factor = tl.load(weight + number * WIDTH + columns, mask=is_column, other=0.0)
    x = normed(x, factor, is_column, eps, found.dtype.element_ty, WIDTH, False, False)
    tl.store(found + place + columns, x.to(found.dtype.element_ty), mask=is_column)


@triton.jit
def _sigmoid(x, into):
    return tl.sigmoid(x).to(into).to(tl.float32)


@triton.jit
def stream_gates_kernel(
    low, logits, found, result, RANK: tl.constexpr, LANES: tl.constexpr, NUM_STREAMS: tl.constexpr,
    STREAMS: tl.constexpr,
):
    """Between the products of gates, one row: SiLU of `low` over the number of streams; and the weights of a
    result of `logits`, if not None.
    """
    row, lanes, stream = tl.program_id(0).to(tl.int64), tl.arange(0, LANES), tl.arange(0, STREAMS)
    into = low.dtype.element_ty
    x = tl.load(low + row * RANK + lanes, mask=lanes < RANK, other=0.0).to(tl.float32)
    x = (x / NUM_STREAMS).to(into).to(tl.float32)
    tl.store(found + row * RANK + lanes, (x * tl.sigmoid(x)).to(into), mask=lanes < RANK)
    if logits is not None:
        is_stream = stream < NUM_STREAMS
        y = tl.load(logits + row * NUM_STREAMS + stream, mask=is_stream, other=0.0).to(tl.float32)
        y = _sigmoid((y / NUM_STREAMS).to(into).to(tl.float32), into)
        tl.store(result + row * NUM_STREAMS + stream, 2.0 * y, mask=is_stream)


@triton.jit
def stream_mean_kernel(
    gates, normed_streams, found, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, NUM_STREAMS: tl.constexpr
):
    """COLUMNS elements of the mean of normed streams times the sigmoid of `gates`: grid [rows, blocks]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < WIDTH
    into = found.dtype.element_ty
    total = tl.zeros([COLUMNS], tl.float32)
    for number in tl.static_range(NUM_STREAMS):
        places = (row * NUM_STREAMS + number) * WIDTH + columns
        gate = tl.load(gates + places, mask=is_column, other=0.0).to(tl.float32)
        x = tl.load(normed_streams + places, mask=is_column, other=0.0).to(tl.float32)
        total += (_sigmoid(gate, into) * x).to(into).to(tl.float32)
    tl.store(found + row * WIDTH + columns, (total / NUM_STREAMS).to(into), mask=is_column)
# fmt: on


def connection_of(
    plan: HyperConnection | GatedConnection, tensors: StreamTensors, norm: KernelNorm | None
) -> Read:
    """The connection of one sub-layer, whose input is normed."""
    if isinstance(plan, HyperConnection):
        return FusedHyperConnection(plan, tensors, norm)
    assert norm is None, "gated streams are normed before they are read"
    return FusedGatedConnection(plan, tensors)


def collapse_of(plan: WeightedCollapse | GatedCollapse, tensors: StreamTensors) -> Collapse:
    """The end of the streams."""
    if isinstance(plan, GatedCollapse):
        return _GatedRead(plan, tensors).collapsed
    return FusedCollapse(plan, tensors)


def written(streams: Tensor, result: Tensor, weights: WriteWeights, *, in_place: bool = False) -> Tensor:
    """See `Operations.written`: a program reads what it writes before."""
    num_rows, num_streams = weights.result.shape
    width = streams.shape[1] // num_streams
    streams = streams.contiguous()
    found = streams if in_place else streams.new_empty(streams.shape)
    columns = min(_ELEMENTS, padded(width))
    constants = {
        "WIDTH": width,
        "COLUMNS": columns,
        "NUM_STREAMS": num_streams,
        "STREAMS": padded(num_streams),
    }
    Launch(stream_write_kernel, (num_rows, triton.cdiv(width, columns)), constants)(
        streams, result.contiguous(), weights.result, weights.mixing, found
    )
    return found


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _WeightedRead:
    """Weights of sums of streams, and the norm of what is read."""

    num_streams: int
    norm_eps: float
    gate_eps: float
    tensors: StreamTensors
    magnitude: float = 1.0
    write_eps: float = 0.0
    mixing_rounds: int = 0
    norm: KernelNorm | None = None

    def into(self, streams: Tensor, result: Tensor | None, mixing: Tensor | None) -> Tensor:
        """The row [m, hidden_size] that is read of `streams` [m, num_streams * hidden_size].

        `result` float32 [m, num_streams] and `mixing` float32 [m, num_streams, num_streams] are filled.
        """
        streams = streams.contiguous()
        num_rows, width = len(streams), streams.shape[1] // self.num_streams
        partials = self._products(streams)
        num_parts, lanes = partials.shape[1:]
        constants = {
            "WIDTH": width,
            "COLUMNS": padded(width),
            "NUM_STREAMS": self.num_streams,
            "STREAMS": padded(self.num_streams),
            "NUM_PARTS": num_parts,
            "PARTS": padded(num_parts),
            "NUM_WEIGHTS": len(self.tensors[FN]),
            "LANES": lanes,
            "MIXING_ROUNDS": self.mixing_rounds,
            "ROUNDS": self.norm is not None and self.norm.rounds_first,
            "CENTRES": self.norm is not None and self.norm.is_centred,
        }
        found = streams.new_empty(num_rows, width)
        num_warps = max(1, min(16, padded(width) // 512))
        Launch(stream_read_kernel, (num_rows,), constants, num_warps)(
            *(streams, partials, *self._arguments(), found, result, mixing)
        )
        return found

    def _arguments(self) -> tuple[Any, ...]:
        norm = (None, None, None) if self.norm is None else self.norm.arguments()
        numbers = (self.norm_eps, self.gate_eps, self.magnitude, self.write_eps)
        return self.tensors[BASE], self.tensors[SCALE], *numbers, *norm

    def _products(self, streams: Tensor) -> Tensor:
        """Partial sums float32 [m, parts, lanes], see `stream_products_kernel`."""
        fn = self.tensors[FN]
        num_weights, width = fn.shape
        num_parts, lanes = stream_parts(num_weights, width)
        partials = fn.new_empty(len(streams), num_parts, lanes)
        constants = {
            "WIDTH": width,
            "NUM_WEIGHTS": num_weights,
            "LANES": lanes,
            "ROWS": _ROWS,
            "SPLIT": STREAM_SPLIT,
            "COLUMNS": _COLUMNS,
        }
        Launch(stream_products_kernel, (triton.cdiv(len(streams), _ROWS), num_parts), constants)(
            streams, fn, len(streams), partials
        )
        return partials


class FusedHyperConnection:
    """See `HyperConnection`; what it reads is normed in the same launch."""

    def __init__(self, plan: HyperConnection, tensors: StreamTensors, norm: KernelNorm | None) -> None:
        self._plan = plan
        self._read = _WeightedRead(
            num_streams=plan.num_streams,
            norm_eps=plan.norm_eps,
            gate_eps=plan.gate_eps,
            tensors=tensors,
            magnitude=plan.magnitude,
            write_eps=plan.write_eps,
            mixing_rounds=plan.mixing_rounds or 0,
            norm=norm,
        )

    def __call__(self, streams: Tensor) -> tuple[Tensor, WriteWeights]:
        num_streams, mixing = self._plan.num_streams, None
        result = streams.new_empty(len(streams), num_streams, dtype=torch.float32)
        if self._plan.mixing_rounds is not None:
            mixing = result.new_empty(len(streams), num_streams, num_streams)
        return self._read.into(streams, result, mixing), WriteWeights(result, mixing)


class FusedCollapse:
    """See `WeightedCollapse`."""

    def __init__(self, plan: WeightedCollapse, tensors: StreamTensors) -> None:
        self._read = _WeightedRead(
            num_streams=plan.num_streams, norm_eps=plan.norm_eps, gate_eps=plan.gate_eps, tensors=tensors
        )

    def __call__(self, streams: Tensor) -> Tensor:
        return self._read.into(streams, None, None)


class _GatedRead:
    """See `GatedCollapse`; products are torch's."""

    def __init__(self, plan: GatedCollapse, tensors: StreamTensors) -> None:
        self._plan, self._down, self._up = plan, tensors[DOWN], tensors[UP]
        self._weight = tensors[NORM].float() + 1.0

    def collapsed(self, streams: Tensor) -> Tensor:
        """One row [m, hidden_size] of `streams`."""
        return self.read(self.normed(streams), None, None)

    def normed(self, streams: Tensor) -> Tensor:
        """`streams`, each by itself normed."""
        num_streams = self._plan.num_streams
        width = streams.shape[1] // num_streams
        found = streams.new_empty(streams.shape)
        constants = {"WIDTH": width, "COLUMNS": padded(width), "NUM_STREAMS": num_streams}
        num_warps = max(1, min(16, padded(width) // 512))
        Launch(stream_norm_kernel, (len(streams), num_streams), constants, num_warps)(
            streams.contiguous(), self._weight, self._plan.norm_eps, found
        )
        return found

    def read(self, normed: Tensor, logits: Tensor | None, result: Tensor | None) -> Tensor:
        """The mean [m, hidden_size] of normed streams times their gates.

        `result` float32 [m, num_streams] is filled with the weights of a result, of `logits` in its shape.
        """
        num_streams, rank = self._plan.num_streams, self._plan.rank
        num_rows, width = len(normed), normed.shape[1] // num_streams
        low = linear(normed, self._down)
        squeezed = low.new_empty(low.shape)
        of_streams = {"NUM_STREAMS": num_streams, "STREAMS": padded(num_streams)}
        constants = {"RANK": rank, "LANES": padded(rank), **of_streams}
        Launch(stream_gates_kernel, (num_rows,), constants)(low, logits, squeezed, result)
        gates = linear(squeezed, self._up)
        found = normed.new_empty(num_rows, width)
        columns = min(_ELEMENTS, padded(width))
        constants = {"WIDTH": width, "COLUMNS": columns, "NUM_STREAMS": num_streams}
        Launch(stream_mean_kernel, (num_rows, triton.cdiv(width, columns)), constants)(gates, normed, found)
        return found


class FusedGatedConnection(_GatedRead):
    """See `GatedConnection`."""

    def __init__(self, plan: GatedConnection, tensors: StreamTensors) -> None:
        super().__init__(plan, tensors)
        self._write = tensors[WRITE]

    def __call__(self, streams: Tensor) -> tuple[Tensor, WriteWeights]:
        normed = self.normed(streams)
        result = streams.new_empty(len(streams), self._plan.num_streams, dtype=torch.float32)
        row = self.read(normed, linear(normed, self._write), result)
        return row, WriteWeights(result)
