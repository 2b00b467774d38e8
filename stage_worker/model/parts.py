"""Loaded parts of a stage, kept from one load to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoint import Checkpoint
from checkpoint.blueprint import Implementation
from checkpoint.files import FileIdentity
from checkpoint.tensors import final_norm_tensors, head_tensor, layer_tensors
from stage_worker.model.decoder_layer import DecoderLayer
from stage_worker.model.kernels import Kernels
from stage_worker.model.layer_weights import (
    NewTensor,
    PlainProjection,
    Projection,
    allocate_layer,
    arrange_stacks,
    project,
    reorder_heads,
)
from stage_worker.model.norms import NormWeights, RowNorm
from stage_worker.model.operations import operations
from stage_worker.model.weight_reads import WeightReads
from stage_worker.model.weights import ReadProgress, load_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededParts:
    """Layer numbers, embeddings and head of stages; `is_tied` if the head is the embedding matrix."""

    layers: Sequence[int]
    has_embeddings: bool
    has_head: bool
    is_tied: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsOrigin:
    """Files and memory format of parts; one stage can only use parts with equal origins."""

    fingerprint: str
    files: tuple[FileIdentity, ...]
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    has_long_rope: bool
    implementation: Implementation = Implementation.NATIVE


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoadedWeights:
    """`embeddings` is set for FIRST only, `final_norm` and `head` for LAST only."""

    layers: tuple[DecoderLayer, ...]
    embeddings: Tensor | None
    final_norm: RowNorm | None
    head: Projection | None


class LoadedParts:
    """Complete parts with one origin, for one thread. A tied head beside its embeddings is not packed."""

    def __init__(self) -> None:
        self.origin: PartsOrigin | None = None
        self.layers: dict[int, DecoderLayer] = {}
        self.embeddings: Tensor | None = None
        self.final_norm: RowNorm | None = None
        self.head: Projection | None = None

    def clear(self) -> None:
        self.origin = self.embeddings = self.final_norm = self.head = None
        self._drop_layers(range(0))

    def retain(self, needed: NeededParts, origin: PartsOrigin) -> None:
        """Drop the parts that `needed` from `origin` cannot use. A tied head may change its format."""
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
        """The parts in `needed`; all must be loaded."""
        return LoadedWeights(
            layers=tuple(self.layers[layer] for layer in needed.layers),
            embeddings=self.embeddings,
            final_norm=self.final_norm,
            head=self.head,
        )

    def _drop_layers(self, keep: Sequence[int]) -> None:
        """Drop layers one by one: freeing memory holds the GIL, which other threads need in between."""
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
            self.head = project(matrix, None, kernels.products)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsRead:
    """Names of the parts read and of those reused; `num_bytes` counts bytes read from the checkpoint."""

    read_layers: tuple[int, ...]
    kept_layers: tuple[int, ...]
    read_others: tuple[str, ...]
    kept_others: tuple[str, ...]
    num_bytes: int

    def __str__(self) -> str:
        """For example "layers 6-7 loaded, 0-5 kept; embeddings kept"."""
        layers = f"layers {_runs(self.read_layers)} loaded, {_runs(self.kept_layers)} kept"
        others = [f"{name} loaded" for name in self.read_others] + [
            f"{name} kept" for name in self.kept_others
        ]
        return layers + "".join(f"; {other}" for other in others)


Prepare = Callable[[Sequence[str]], None]
"""Makes stored tensors readable, given their names."""


def nothing_to_prepare(names: Sequence[str]) -> None:
    """All files are on this host."""


class PartLoader:
    """Loads the missing parts one at a time: at most one incomplete one is in memory, at most twice."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        parts: LoadedParts,
        needed: NeededParts,
        *,
        kernels: Kernels,
        new: NewTensor,
        reads: WeightReads,
    ) -> None:
        """`parts` are reusable ones of `needed`, see `LoadedParts.retain`; `new` allocates for `reads`."""
        self._checkpoint, self._config = checkpoint, checkpoint.config
        self._names = checkpoint.config.names
        self._parts, self._needed = parts, needed
        self._kernels, self._new, self._reads = kernels, new, reads

    def load(self, progress: ReadProgress, prepare: Prepare = nothing_to_prepare) -> PartsRead:
        """Read the missing parts, of which `prepare` gets the stored tensors before.

        Raises like `load_tensors`, `prepare` and `progress`, keeping the complete parts.
        """
        missing = list(self._missing())
        names = [name for part in missing for name in part.tensors]
        checkpoint = self._checkpoint
        prepare([stored for name in names for stored in checkpoint.stored_names(name)])
        num_bytes = sum(entry.num_bytes for name in names for entry in checkpoint.parts_of(name))
        report = self._report(missing, num_bytes)
        progress.expect(num_bytes)
        for part in missing:
            part.read(progress)
        if self._needed.is_tied and self._needed.has_head and self._parts.embeddings is not None:
            self._parts.head = PlainProjection(self._parts.embeddings, None)
        return report

    def _missing(self) -> Iterator[_Missing]:
        parts, needed = self._parts, self._needed
        if needed.has_embeddings and parts.embeddings is None:
            yield _Missing("embeddings", (self._names.embeddings,), self._read_embeddings)
        for layer in needed.layers:
            if layer not in parts.layers:
                names = tuple(tensor.name for tensor in layer_tensors(self._config, layer))
                yield _Missing(layer, names, self._layer_reader(layer))
        if needed.has_head and parts.final_norm is None:
            yield _Missing("final norm", final_norm_tensors(self._config), self._read_final_norm)
        if needed.has_head and parts.head is None and not (needed.is_tied and needed.has_embeddings):
            yield _Missing("head", (head_tensor(self._config),), self._read_head)

    def _layer_reader(self, layer: int) -> Callable[[ReadProgress], None]:
        def read(progress: ReadProgress) -> None:
            self._parts.layers[layer] = self._read_layer(layer, progress)

        return read

    def _read_layer(self, layer: int, progress: ReadProgress) -> DecoderLayer:
        plan = self._config.layers[layer]
        weights, destinations = allocate_layer(self._config, layer, self._new)
        load_tensors(self._checkpoint, destinations, reads=self._reads, progress=progress)
        arrange_stacks(self._config, layer, destinations)
        reorder_heads(plan.mixer, weights)
        return DecoderLayer(plan, weights, self._kernels)

    def _read_embeddings(self, progress: ReadProgress) -> None:
        self._parts.embeddings = self._read_matrix(self._names.embeddings, progress)

    def _read_final_norm(self, progress: ReadProgress) -> None:
        names, width = final_norm_tensors(self._config), self._config.hidden_size
        weight, *bias = (self._read_tensor(name, progress, width) for name in names)
        weights = NormWeights(weight, bias[0] if bias else None)
        self._parts.final_norm = operations(self._kernels).norm(self._config.final_norm, weights)

    def _read_head(self, progress: ReadProgress) -> None:
        matrix = self._read_matrix(head_tensor(self._config), progress)
        self._parts.head = project(matrix, None, self._kernels.products)

    def _read_matrix(self, name: str, progress: ReadProgress) -> Tensor:
        return self._read_tensor(name, progress, self._config.vocab_size, self._config.hidden_size)

    def _read_tensor(self, name: str, progress: ReadProgress, *shape: int) -> Tensor:
        tensor = self._new(*shape)
        load_tensors(self._checkpoint, {name: tensor}, reads=self._reads, progress=progress)
        return tensor

    def _report(self, missing: list[_Missing], num_bytes: int) -> PartsRead:
        read = {part.name for part in missing}
        others = ["embeddings"] * self._needed.has_embeddings + ["final norm", "head"] * self._needed.has_head
        if self._needed.is_tied and self._needed.has_embeddings and self._needed.has_head:
            others.remove("head")  # tied: the embeddings
        return PartsRead(
            read_layers=tuple(layer for layer in self._needed.layers if layer in read),
            kept_layers=tuple(layer for layer in self._needed.layers if layer not in read),
            read_others=tuple(name for name in others if name in read),
            kept_others=tuple(name for name in others if name not in read),
            num_bytes=num_bytes,
        )


@dataclass(frozen=True, slots=True)
class _Missing:
    """A layer by its number, or another part by its name; `read` loads and stores it."""

    name: int | str
    tensors: tuple[str, ...]
    read: Callable[[ReadProgress], None]


def _runs(layers: tuple[int, ...]) -> str:
    """ "0-2, 5" for (0, 1, 2, 5); "none" for ()."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs) or "none"
