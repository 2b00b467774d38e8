"""Several residual streams in the self-check's reference, see `checkpoint.streams`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import silu

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

if TYPE_CHECKING:
    from checkpoint.tensors import RoleRows
    from stage_worker.loading.reference import StreamedModel

Places = Callable[[str], "RoleRows"]
"""Place of the tensor of a kind."""


class StreamedConnection:
    """The streams [copies, n, num_streams * width] of one sub-layer, and the weights computed of them."""

    def __init__(self, model: StreamedModel, plan: HyperConnection, places: Places, streams: Tensor) -> None:
        self._model, self._plan = model, plan
        self._streams = torch.unflatten(streams, -1, (plan.num_streams, -1))
        logits = _products(model, streams, places, plan.norm_eps)
        scales, bases = (model.exact(places(kind)) for kind in (SCALE, BASE))
        groups = (x.split_with_sizes(plan.group_sizes, -1) for x in (logits, bases))
        parts = zip(*groups, scales, strict=True)
        self._groups = [logit * scale + base for logit, base, scale in parts]

    def row(self) -> Tensor:
        """The input of the sub-layer, [copies, n, width]."""
        weights = self._groups[0].sigmoid() + self._plan.gate_eps
        return self._model.rounded(torch.einsum("xns,xnsw->xnw", weights, self._streams))

    def with_result(self, result: Tensor) -> Tensor:
        """The new streams, with the `result` [copies, n, width]."""
        plan = self._plan
        shares = plan.magnitude * self._groups[1].sigmoid() + plan.write_eps
        kept = self._streams
        if plan.mixing_rounds is not None:
            kept = torch.einsum("xnjk,xnjw->xnkw", self._mixing(plan.mixing_rounds), kept)
        total = kept + torch.einsum("xns,xnw->xnsw", shares, result)
        return self._model.rounded(total.flatten(2))

    def _mixing(self, num_rounds: int) -> Tensor:
        num_streams, eps = self._plan.num_streams, self._plan.gate_eps
        weights = torch.unflatten(self._groups[2], -1, (num_streams, num_streams)).softmax(-1) + eps
        for number in range(2 * num_rounds - 1):  # columns, then rows and columns in turn
            weights = weights / (weights.sum(-1 if number % 2 else -2, keepdim=True) + eps)
        return weights


class StreamedGates:
    """Gated streams [copies, n, num_streams * width] of one sub-layer, or those after the last one."""

    def __init__(self, model: StreamedModel, plan: GatedCollapse, places: Places, streams: Tensor) -> None:
        self._model, self._plan, self._places = model, plan, places
        self._streams = torch.unflatten(streams, -1, (plan.num_streams, -1))
        weight = torch.unflatten(model.vector(places(NORM)), 0, (plan.num_streams, -1))
        norm = Norm(kind=NormKind.RMS_OFFSET, eps=plan.norm_eps)
        self._normed = model.normed(self._streams, norm, weight)

    def row(self) -> Tensor:
        """The input of the sub-layer, [copies, n, width]."""
        model, flat = self._model, self._normed.flatten(2)
        low = model.rounded(model.projected(flat, self._places(DOWN), None) / self._plan.num_streams)
        gates = model.rounded(model.projected(model.rounded(silu(low)), self._places(UP), None).sigmoid())
        gated = model.rounded(gates * flat)
        return model.rounded(torch.unflatten(gated, -1, (self._plan.num_streams, -1)).mean(2))

    def with_result(self, result: Tensor) -> Tensor:
        """The new streams, with the `result` [copies, n, width]."""
        model = self._model
        logits = model.projected(self._normed.flatten(2), self._places(WRITE), None)
        shares = model.rounded(2 * model.rounded((logits / self._plan.num_streams).sigmoid()))
        return model.rounded((self._streams + torch.einsum("xns,xnw->xnsw", shares, result)).flatten(2))


def connected(
    model: StreamedModel, plan: HyperConnection | GatedConnection, places: Places, streams: Tensor
) -> StreamedConnection | StreamedGates:
    """The connection of one sub-layer to `streams`."""
    if isinstance(plan, GatedConnection):
        return StreamedGates(model, plan, places, streams)
    return StreamedConnection(model, plan, places, streams)


def collapsed(
    model: StreamedModel, plan: WeightedCollapse | GatedCollapse, places: Places, streams: Tensor
) -> Tensor:
    """One row [copies, n, width] of the streams [copies, n, num_streams * width]."""
    if isinstance(plan, GatedCollapse):
        return StreamedGates(model, plan, places, streams).row()
    scale, base = (model.exact(places(kind)) for kind in (SCALE, BASE))
    weights = (_products(model, streams, places, plan.norm_eps) * scale + base).sigmoid() + plan.gate_eps
    by_stream = torch.unflatten(streams, -1, (plan.num_streams, -1))
    return model.rounded(torch.einsum("xns,xnsw->xnw", weights, by_stream))


def _products(model: StreamedModel, streams: Tensor, places: Places, eps: float) -> Tensor:
    """Logits of all weights, of streams that are normed first."""
    normed = streams * torch.rsqrt(streams.square().mean(dim=-1, keepdim=True) + eps)
    return model.exact_products(normed, places(FN))
