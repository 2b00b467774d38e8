"""Several residual streams in the self-check's reference, see `checkpoint.streams`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from checkpoint.streams import BASE, FN, SCALE, HyperConnection, WeightedCollapse

if TYPE_CHECKING:
    from checkpoint.tensors import RoleRows
    from stage_worker.loading.reference import StreamedModel

Places = Callable[[str], "RoleRows"]
"""Place of the tensor of a kind."""


class StreamedConnection:
    """The streams [2, n, num_streams * width] of one sub-layer, and the weights computed of them."""

    def __init__(self, model: StreamedModel, plan: HyperConnection, places: Places, streams: Tensor) -> None:
        self._model, self._plan = model, plan
        self._streams = torch.unflatten(streams, -1, (plan.num_streams, -1))
        logits = _products(model, streams, places, plan.norm_eps)
        scales, bases = (model.exact(places(kind)) for kind in (SCALE, BASE))
        groups = (x.split_with_sizes(plan.group_sizes, -1) for x in (logits, bases))
        parts = zip(*groups, scales, strict=True)
        self._groups = [logit * scale + base for logit, base, scale in parts]

    def row(self) -> Tensor:
        """The input of the sub-layer, [2, n, width]."""
        weights = self._groups[0].sigmoid() + self._plan.gate_eps
        return self._model.rounded(torch.einsum("xns,xnsw->xnw", weights, self._streams))

    def with_result(self, result: Tensor) -> Tensor:
        """The new streams, with the `result` [2, n, width]."""
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


def collapsed(model: StreamedModel, plan: WeightedCollapse, places: Places, streams: Tensor) -> Tensor:
    """One row [2, n, width] of the streams [2, n, num_streams * width]."""
    scale, base = (model.exact(places(kind)) for kind in (SCALE, BASE))
    weights = (_products(model, streams, places, plan.norm_eps) * scale + base).sigmoid() + plan.gate_eps
    by_stream = torch.unflatten(streams, -1, (plan.num_streams, -1))
    return model.rounded(torch.einsum("xns,xnsw->xnw", weights, by_stream))


def _products(model: StreamedModel, streams: Tensor, places: Places, eps: float) -> Tensor:
    """Logits of all weights, of streams that are normed first."""
    normed = streams * torch.rsqrt(streams.square().mean(dim=-1, keepdim=True) + eps)
    return model.exact_products(normed, places(FN))
