"""The weights of a stage as it computes with them, made from those that were loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from checkpoint import ModelConfig
from stage_worker.models.decoder_layer import DecoderLayer
from stage_worker.models.kernels import Kernels
from stage_worker.models.layer_weights import StageWeights
from stage_worker.models.projections import PlainProjection, Projection, project


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoadedWeights:
    """`embeddings` is None without FIRST's part, `final_norm` and `head` without LAST's."""

    layers: tuple[DecoderLayer, ...]
    embeddings: Tensor | None
    final_norm: Tensor | None
    head: Projection | None


def finish(
    weights: StageWeights, config: ModelConfig, kernels: Kernels, *, windows: Sequence[int | None]
) -> LoadedWeights:
    """Empties `weights.layers` on the way, so that no more than one layer is ever in memory twice.

    A head that is the embeddings, too, is not packed: those are read by row.
    """
    layers = []
    for layer, window in enumerate(windows):
        layers.append(DecoderLayer(config, weights.layers.pop(0), kernels, layer=layer, window=window))
    head: Projection | None = None
    if weights.head is not None:
        is_tied = weights.head is weights.embeddings
        head = PlainProjection(weights.head, None) if is_tied else project(weights.head, None, kernels)
    return LoadedWeights(
        layers=tuple(layers), embeddings=weights.embeddings, final_norm=weights.final_norm, head=head
    )
