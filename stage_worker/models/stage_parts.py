"""The parts of a stage as they are computed with; they outlive the stage that they were read for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoint.file_identity import FileIdentity
from stage_worker.models.decoder_layer import DecoderLayer
from stage_worker.models.kernels import Kernels
from stage_worker.models.projections import PlainProjection, Projection, project


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededParts:
    """What a stage consists of: `layers` by their numbers in the model. `is_tied`: the output head is the
    embedding matrix."""

    layers: range
    has_embeddings: bool
    has_head: bool
    is_tied: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsOrigin:
    """What parts have in common that one stage can compute with: files, and form in memory."""

    fingerprint: str
    files: tuple[FileIdentity, ...]
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoadedWeights:
    """`embeddings` is None without FIRST's part, `final_norm` and `head` without LAST's."""

    layers: tuple[DecoderLayer, ...]
    embeddings: Tensor | None
    final_norm: Tensor | None
    head: Projection | None


class StageParts:
    """Whole parts only, all of one origin; each is there or not. Used by one thread.

    A head that is the embeddings, too, is not packed beside them: those are read by row.
    """

    def __init__(self) -> None:
        self.origin: PartsOrigin | None = None
        self.layers: dict[int, DecoderLayer] = {}
        self.embeddings: Tensor | None = None
        self.final_norm: Tensor | None = None
        self.head: Projection | None = None

    def clear(self) -> None:
        """Holds nothing any more."""
        self.origin = self.embeddings = self.final_norm = self.head = None
        self._drop_layers(range(0))

    def retain(self, needed: NeededParts, origin: PartsOrigin) -> None:
        """Drops what a stage of `needed` from `origin` cannot use. A tied head may take its other form."""
        if origin != self.origin:
            self.clear()
        self.origin = origin
        self._drop_layers(needed.layers)
        if not needed.has_head:
            self.final_norm = None
        if needed.is_tied:
            self._retain_tied(needed, origin.kernels)
            return
        if not needed.has_embeddings:
            self.embeddings = None
        if not needed.has_head:
            self.head = None

    def weights(self, needed: NeededParts) -> LoadedWeights:
        """All that `needed` names, which must be here."""
        return LoadedWeights(
            layers=tuple(self.layers[layer] for layer in needed.layers),
            embeddings=self.embeddings,
            final_norm=self.final_norm,
            head=self.head,
        )

    def _drop_layers(self, keep: range) -> None:
        """One after another: giving memory back holds the interpreter, and others must have their turn."""
        for layer in [layer for layer in self.layers if layer not in keep]:
            del self.layers[layer]

    def _retain_tied(self, needed: NeededParts, kernels: Kernels) -> None:
        matrix = self.embeddings
        if matrix is None and isinstance(self.head, PlainProjection):
            matrix = self.head.weight
        self.embeddings = matrix if needed.has_embeddings else None
        if not needed.has_head:
            self.head = None
        elif needed.has_embeddings:
            self.head = None if matrix is None else PlainProjection(matrix, None)
        elif matrix is not None:
            self.head = project(matrix, None, kernels)
