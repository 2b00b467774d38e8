"""Several residual streams of a token: sub-layers read and write them, LAST collapses them.

See `checkpoint.streams`. Streams are rows [m, num_streams * hidden_size] in the run dtype. Weights of gated
streams are computed in the run dtype of streams normed in float32, as in transformers. Others are
computed in float32 from all of them. Sums of streams are float32, too, and rounded once, where a row or a
stream is complete; transformers' DeepSeek V4 rounds the weights and both parts of the new streams first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from torch.nn.functional import rms_norm as scaled_to_unit

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
from stage_worker.model.layer_weights import StreamTensors
from stage_worker.model.norms import RowNorm


@dataclass(frozen=True, slots=True, eq=False)
class WriteWeights:
    """How the result of a sub-layer enters the streams, float32.

    `result` [m, num_streams] are its weights in each stream. `mixing` [m, num_streams, num_streams] has the
    weight [j, k] of the old stream j in the new stream k; None: streams stay as they are.
    """

    result: Tensor
    mixing: Tensor | None = None


Read = Callable[[Tensor], tuple[Tensor, WriteWeights]]
"""The input [m, hidden_size] of a sub-layer for streams [m, num_streams * hidden_size], and how its result
is written.
"""
Collapse = Callable[[Tensor], Tensor]
"""One row [m, hidden_size] for streams [m, num_streams * hidden_size]."""


def connection_of(
    plan: HyperConnection | GatedConnection, tensors: StreamTensors, norm: RowNorm | None = None
) -> Read:
    """The connection of one sub-layer, whose input is normed."""
    read: Read
    if isinstance(plan, GatedConnection):
        read = _GatedConnection(plan, tensors)
    else:
        read = _HyperConnection(plan, tensors)
    return read if norm is None else _NormedRead(read, norm)


def collapse_of(plan: WeightedCollapse | GatedCollapse, tensors: StreamTensors) -> Collapse:
    """The end of the streams."""
    if isinstance(plan, GatedCollapse):
        return _GatedRead(plan, tensors).collapsed
    return _WeightedCollapse(plan, tensors)


def spread(hidden: Tensor, num_streams: int) -> Tensor:
    """Streams [n, num_streams * hidden_size] that all begin as `hidden` [n, hidden_size]."""
    return hidden.repeat(1, num_streams)


def written(streams: Tensor, result: Tensor, weights: WriteWeights) -> Tensor:
    """New streams in the form of `streams`, with `result` [m, hidden_size] of a sub-layer."""
    wide = _rows(streams, weights.result.shape[1])
    shares, added = weights.result[:, :, None], result.float()[:, None]
    if weights.mixing is None:
        total = torch.addcmul(wide, shares, added)
    else:
        total = torch.baddbmm(shares * added, weights.mixing.transpose(1, 2), wide)
    return total.flatten(1).to(streams.dtype)


def doubly_stochastic(logits: Tensor, eps: float, num_rounds: int) -> Tensor:
    """Positive matrices [m, n, n] whose rows and columns sum to about one, of `logits` [m, n, n].

    Each of `num_rounds` scales rows, then columns; the first one's rows are a softmax. Source: Sinkhorn and
    Knopp 1967; transformers' DeepseekV4HyperConnection.
    """
    found = logits.softmax(dim=-1).add_(eps)
    for number in range(num_rounds):
        if number:
            found = found / (found.sum(dim=-1, keepdim=True) + eps)
        found = found / (found.sum(dim=-2, keepdim=True) + eps)
    return found


def _rows(streams: Tensor, num_streams: int) -> Tensor:
    """[m, num_streams, hidden_size] in float32; of float32 streams a view."""
    return torch.unflatten(streams.float(), 1, (num_streams, -1))


def _logits(wide: Tensor, fn: Tensor, eps: float) -> Tensor:
    """Products [m, weights] of float32 streams [m, num_streams, hidden_size], normed to unit mean square.

    The scale of a row is applied to its few products, not to all its elements.
    """
    flat = wide.flatten(1)
    return linear(flat, fn) * torch.rsqrt(flat.square().mean(dim=1, keepdim=True) + eps)


def _mixed(wide: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum [m, hidden_size] of the streams times `weights` [m, num_streams]."""
    return torch.bmm(weights[:, None], wide)[:, 0].to(dtype)


class _NormedRead:
    """A `Read` whose row is normed."""

    def __init__(self, read: Read, norm: RowNorm) -> None:
        self._read, self._norm = read, norm

    def __call__(self, streams: Tensor) -> tuple[Tensor, WriteWeights]:
        row, weights = self._read(streams)
        return self._norm(row), weights


class _HyperConnection:
    """See `HyperConnection`."""

    def __init__(self, plan: HyperConnection, tensors: StreamTensors) -> None:
        self._plan, self._fn = plan, tensors[FN]
        self._base = tensors[BASE]
        sizes = torch.tensor(plan.group_sizes, device=self._base.device)
        self._scale = tensors[SCALE].repeat_interleave(sizes, output_size=sum(plan.group_sizes))

    def __call__(self, streams: Tensor) -> tuple[Tensor, WriteWeights]:
        plan = self._plan
        wide = _rows(streams, plan.num_streams)
        logits = _logits(wide, self._fn, plan.norm_eps) * self._scale + self._base
        read, write, *mix = logits.split_with_sizes(plan.group_sizes, dim=1)
        row = _mixed(wide, read.sigmoid() + plan.gate_eps, streams.dtype)
        result = write.sigmoid() * plan.magnitude + plan.write_eps
        if plan.mixing_rounds is None:
            return row, WriteWeights(result)
        (by_stream,) = mix
        square = torch.unflatten(by_stream, 1, (plan.num_streams, plan.num_streams))
        return row, WriteWeights(result, doubly_stochastic(square, plan.gate_eps, plan.mixing_rounds))


class _WeightedCollapse:
    """See `WeightedCollapse`."""

    def __init__(self, plan: WeightedCollapse, tensors: StreamTensors) -> None:
        self._plan, self._tensors = plan, tensors

    def __call__(self, streams: Tensor) -> Tensor:
        plan, tensors = self._plan, self._tensors
        wide = _rows(streams, plan.num_streams)
        logits = _logits(wide, tensors[FN], plan.norm_eps) * tensors[SCALE] + tensors[BASE]
        return _mixed(wide, logits.sigmoid() + plan.gate_eps, streams.dtype)


class _GatedRead:
    """See `GatedCollapse`."""

    def __init__(self, plan: GatedCollapse, tensors: StreamTensors) -> None:
        self._plan, self._down, self._up = plan, tensors[DOWN], tensors[UP]
        self._weight = torch.unflatten(tensors[NORM].float() + 1.0, 0, (plan.num_streams, -1))

    def collapsed(self, streams: Tensor) -> Tensor:
        """One row [m, hidden_size] of `streams`."""
        return self.mean(self.normed(streams))

    def normed(self, streams: Tensor) -> Tensor:
        """`streams`, each by itself normed."""
        wide = _rows(streams, self._plan.num_streams)
        scaled = scaled_to_unit(wide, wide.shape[-1:], None, self._plan.norm_eps)
        return (scaled * self._weight).flatten(1).to(streams.dtype)

    def mean(self, normed: Tensor) -> Tensor:
        """[m, hidden_size], of normed streams times their gates."""
        low = silu(linear(normed, self._down) / self._plan.num_streams)
        gated = linear(low, self._up).sigmoid_().mul_(normed)
        return torch.unflatten(gated, 1, (self._plan.num_streams, -1)).mean(dim=1)


class _GatedConnection(_GatedRead):
    """See `GatedConnection`."""

    def __init__(self, plan: GatedConnection, tensors: StreamTensors) -> None:
        super().__init__(plan, tensors)
        self._write = tensors[WRITE]

    def __call__(self, streams: Tensor) -> tuple[Tensor, WriteWeights]:
        normed = self.normed(streams)
        logits = linear(normed, self._write) / self._plan.num_streams
        return self.mean(normed), WriteWeights(logits.sigmoid_().mul_(2.0).float())
