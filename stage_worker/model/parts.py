"""Loaded parts of a stage, kept from one load to the next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from checkpoint import Blueprint, Checkpoint
from checkpoint.files import FileIdentity
from checkpoint.implementation import Implementation
from checkpoint.tensors import collapse_shapes, final_norm_tensors, head_tensor, layer_tensors
from stage_worker.model.decoder_layer import DecoderLayer
from stage_worker.model.host_weights import HostCopies, HostWeights
from stage_worker.model.hyper_connections import Collapse
from stage_worker.model.kernels import Kernels, ProductMethod
from stage_worker.model.layer_weights import (
    AttentionWeights,
    CompressedWeights,
    DeltaWeights,
    DenseWeights,
    LatentWeights,
    LayerWeights,
    MambaWeights,
    NewTensor,
    StreamTensors,
    allocate_layer,
)
from stage_worker.model.norms import NormWeights, RowNorm
from stage_worker.model.operations import operations
from stage_worker.model.projections import ROUNDED, PlainProjection, Projection, Weight, project
from stage_worker.model.row_orders import arrange_stacks, reorder_heads, scale_rows
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
    """`embeddings` is set for FIRST only, `collapse`, `final_norm` and `head` for LAST only.

    Only models of several residual streams have a `collapse`, and some of them have no `final_norm`.
    """

    layers: tuple[DecoderLayer, ...]
    embeddings: Tensor | None
    collapse: Collapse | None
    final_norm: RowNorm | None
    head: Projection | None


PartWeights = LayerWeights | NormWeights | StreamTensors | Tensor
"""What is read of a part: a layer, the final norm, the collapse of streams, or a matrix."""


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A layer by its number, or another part by its name, and its tensors in the checkpoint.

    Embeddings and a tied head have the same tensor.
    """

    name: int | str
    tensors: tuple[str, ...]


EMBEDDINGS = "embeddings"
COLLAPSE = "collapse of streams"
FINAL_NORM = "final norm"
HEAD = "head"


def parts_of(config: Blueprint, needed: NeededParts) -> list[ModelPart]:
    """The parts in `needed`; a tied head beside the embeddings is none."""
    found = [ModelPart(EMBEDDINGS, (config.names.embeddings,))] * needed.has_embeddings
    for layer in needed.layers:
        found.append(ModelPart(layer, tuple(tensor.name for tensor in layer_tensors(config, layer))))
    if needed.has_head:
        if config.collapse is not None:
            found.append(ModelPart(COLLAPSE, tuple(collapse_shapes(config))))
        if config.final_norm is not None:
            found.append(ModelPart(FINAL_NORM, final_norm_tensors(config)))
        if not (needed.is_tied and needed.has_embeddings):
            found.append(ModelPart(HEAD, (head_tensor(config),)))
    return found


class LoadedParts:
    """Complete parts with one origin, for one thread. A tied head beside its embeddings is not packed.

    `on_host` are parts in memory of the host that a device may still need, by their tensors. `in_modules` are
    parts of transformers' modules, by their tensors: each with its parameters by name.
    """

    def __init__(self) -> None:
        self.in_modules: dict[tuple[str, ...], Mapping[str, Tensor]] = {}
        self.on_host: dict[tuple[str, ...], HostWeights[PartWeights]] = {}
        self.origin: PartsOrigin | None = None
        self.layers: dict[int, DecoderLayer] = {}
        self.embeddings: Tensor | None = None
        self.collapse: Collapse | None = None
        self.final_norm: RowNorm | None = None
        self.head: Projection | None = None

    def clear(self) -> None:
        self.on_host.clear()
        self.in_modules.clear()
        self._clear_device()
        self.origin = None

    @property
    def pinned_bytes(self) -> int:
        """Pinned memory of the parts on the host."""
        return sum(weights.pinned_bytes for weights in self.on_host.values())

    def retain_on_host(self, wanted: Collection[ModelPart], origin: PartsOrigin) -> None:
        """Drop all but the `wanted` parts from `origin` on the host."""
        if origin != self.origin:
            self.clear()
        self._clear_device()
        self.origin = origin
        kept = {part.tensors for part in wanted}
        self.on_host = {tensors: one for tensors, one in self.on_host.items() if tensors in kept}

    def retain_in_modules(self, wanted: Collection[tuple[str, ...]], origin: PartsOrigin) -> None:
        """Drop all but the `wanted` parts of modules from `origin`."""
        if origin != self.origin:
            self.clear()
        self.origin = origin
        self.in_modules = {tensors: one for tensors, one in self.in_modules.items() if tensors in wanted}

    def _clear_device(self) -> None:
        self.embeddings = self.collapse = self.final_norm = self.head = None
        self._drop_layers(range(0))

    def retain(self, needed: NeededParts, origin: PartsOrigin) -> None:
        """Drop the parts that `needed` from `origin` cannot use. A tied head may change its format."""
        if origin != self.origin:
            self.clear()
        self.origin = origin
        self._drop_layers(needed.layers)
        if not needed.has_head:
            self.collapse = self.final_norm = None
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
            collapse=self.collapse,
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
    """Names of the parts read, of those reused, and of those copied from memory of the host.

    `num_bytes` counts bytes read from the checkpoint.
    """

    read_layers: tuple[int, ...]
    kept_layers: tuple[int, ...]
    read_others: tuple[str, ...]
    kept_others: tuple[str, ...]
    num_bytes: int
    host_layers: tuple[int, ...] = ()
    host_others: tuple[str, ...] = ()

    def __str__(self) -> str:
        """For example "layers 6-7 loaded, 0-5 kept; embeddings kept"."""
        layers = f"layers {_runs(self.read_layers)} loaded, {_runs(self.kept_layers)} kept"
        if self.host_layers:
            layers += f", {_runs(self.host_layers)} copied from the host"
        others = [f"{name} loaded" for name in self.read_others]
        others += [f"{name} kept" for name in self.kept_others]
        others += [f"{name} copied from the host" for name in self.host_others]
        return layers + "".join(f"; {other}" for other in others)


Prepare = Callable[[Sequence[str]], None]
"""Makes stored tensors readable, given their names."""


def nothing_to_prepare(names: Sequence[str]) -> None:
    """All files are on this host."""


class PartReader:
    """Reads the weights of one part at a time, in the run dtype, or as they are stored."""

    def __init__(self, checkpoint: Checkpoint, *, new: NewTensor, reads: WeightReads) -> None:
        """`new` allocates for `reads`."""
        self._checkpoint, self._config = checkpoint, checkpoint.config
        self._new, self._reads = new, reads

    def begin(self, parts: Sequence[ModelPart], progress: ReadProgress, prepare: Prepare) -> int:
        """`parts` are going to be read: `prepare` gets their stored tensors. Returns their bytes in files."""
        checkpoint, names = self._checkpoint, [name for part in parts for name in part.tensors]
        prepare([stored for name in names for stored in checkpoint.stored_names(name)])
        num_bytes = sum(entry.num_bytes for name in names for entry in checkpoint.parts_of(name))
        progress.expect(num_bytes)
        return num_bytes

    def read(self, part: ModelPart, progress: ReadProgress) -> PartWeights:
        """Raises like `load_tensors` and `progress`."""
        if isinstance(part.name, int):
            return self._layer(part.name, progress)
        if part.name == FINAL_NORM:
            weight, *bias = (self._tensor(name, progress, self._config.hidden_size) for name in part.tensors)
            return NormWeights(weight, bias[0] if bias else None)
        if part.name == COLLAPSE:
            return self._collapse(progress)
        (name,) = part.tensors
        return self._tensor(name, progress, self._config.vocab_size, self._config.hidden_size)

    def _layer(self, layer: int, progress: ReadProgress) -> LayerWeights:
        weights, destinations = allocate_layer(self._config, layer, self._new, self._reads.new_table)
        load_tensors(self._checkpoint, destinations, reads=self._reads, progress=progress)
        arrange_stacks(self._config, layer, destinations)
        scale_rows(self._config, layer, destinations)
        reorder_heads(self._config.layers[layer].mixer, weights)
        return weights

    def _collapse(self, progress: ReadProgress) -> StreamTensors:
        config, plan = self._config, self._config.collapse
        assert plan is not None, "a model of one residual stream"
        tensors = {kind: self._new(*shape) for kind, shape in plan.shapes(config.hidden_size).items()}
        if plan.is_wide:
            tensors = {kind: tensor.float() for kind, tensor in tensors.items()}
        names = map(config.names.of_collapse, tensors)
        destinations = dict(zip(names, tensors.values(), strict=True))
        load_tensors(self._checkpoint, destinations, reads=self._reads, progress=progress)
        return tensors

    def _tensor(self, name: str, progress: ReadProgress, *shape: int) -> Tensor:
        tensor = self._new(*shape)
        load_tensors(self._checkpoint, {name: tensor}, reads=self._reads, progress=progress)
        return tensor


class PartLoader:
    """Loads the missing parts one at a time: at most one incomplete one is in memory, at most twice.

    Parts on the host are copied to the device; others are read.
    """

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
        self._config = checkpoint.config
        self._parts, self._needed = parts, needed
        self._kernels, self._reads = kernels, reads
        self._device = new(0).device
        self._reader = PartReader(checkpoint, new=new, reads=reads)

    def load(self, progress: ReadProgress, prepare: Prepare = nothing_to_prepare) -> PartsRead:
        """Read the missing parts, of which `prepare` gets the stored tensors before.

        Raises like `load_tensors`, `prepare` and `progress`, keeping the complete parts.
        """
        missing = [part for part in parts_of(self._config, self._needed) if not self._is_loaded(part)]
        on_host = self._parts.on_host
        read = [part for part in missing if part.tensors not in on_host]
        report = self._report(missing, read, self._reader.begin(read, progress, prepare))
        for part in missing:
            self._place(part, self._weights(part, progress))
        if self._needed.is_tied and self._needed.has_head and self._parts.embeddings is not None:
            self._parts.head = PlainProjection(self._parts.embeddings, None)
        return report

    def _is_loaded(self, part: ModelPart) -> bool:
        parts = self._parts
        if isinstance(part.name, int):
            return part.name in parts.layers
        others = {
            EMBEDDINGS: parts.embeddings,
            COLLAPSE: parts.collapse,
            FINAL_NORM: parts.final_norm,
            HEAD: parts.head,
        }
        return others[part.name] is not None

    def _weights(self, part: ModelPart, progress: ReadProgress) -> PartWeights:
        on_host = self._parts.on_host
        if part.tensors not in on_host:
            return self._reader.read(part, progress)
        return on_host[part.tensors].restored(self._device, self._reads, lambda: progress.advance(0))

    def _place(self, part: ModelPart, weights: PartWeights) -> None:
        parts, config = self._parts, self._config
        match weights:
            case LayerWeights():
                assert isinstance(part.name, int), "a layer has a number"
                parts.layers[part.name] = DecoderLayer(config.layers[part.name], weights, self._kernels)
            case NormWeights():
                assert config.final_norm is not None, "a norm that the model lacks"
                parts.final_norm = operations(self._kernels).norm(config.final_norm, weights)
            case Mapping():
                assert config.collapse is not None, "a model of one residual stream"
                parts.collapse = operations(self._kernels).collapse(config.collapse, weights)
            case _ if part.name == EMBEDDINGS:
                parts.embeddings = weights
            case _:
                parts.head = project(weights, None, self._kernels.products)

    def _report(self, missing: list[ModelPart], read: list[ModelPart], num_bytes: int) -> PartsRead:
        of_host = {part.name for part in missing} - {part.name for part in read}
        loaded = {part.name for part in read}
        names = [part.name for part in parts_of(self._config, self._needed)]
        layers = [name for name in names if isinstance(name, int)]
        others = [name for name in names if isinstance(name, str)]
        return PartsRead(
            read_layers=tuple(layer for layer in layers if layer in loaded),
            kept_layers=tuple(layer for layer in layers if layer not in loaded | of_host),
            read_others=tuple(name for name in others if name in loaded),
            kept_others=tuple(name for name in others if name not in loaded | of_host),
            host_layers=tuple(layer for layer in layers if layer in of_host),
            host_others=tuple(name for name in others if name in of_host),
            num_bytes=num_bytes,
        )


def held_for(products: ProductMethod, weights: LayerWeights) -> LayerWeights:
    """`weights` with the matrices of projections as `products` read them on a GPU: `project` is done with
    them, and copies none.
    """
    if (rounded := ROUNDED.get(products)) is None:
        return weights

    def held(weight: Weight) -> Weight:
        return rounded(weight) if isinstance(weight, Tensor) else weight

    def held_dense(dense: DenseWeights) -> DenseWeights:
        return replace(dense, up=held(dense.up), down=held(dense.down))

    mixer, inner = weights.mixer, weights.feed_forward
    match mixer:
        case AttentionWeights():
            mixer = replace(mixer, qkv=held(mixer.qkv))
        case DeltaWeights() | MambaWeights():
            mixer = replace(mixer, input=held(mixer.input))
        case CompressedWeights():
            pending = None if mixer.pending is None else held(mixer.pending)
            query, key = held(mixer.query), held(mixer.key)
            mixer = replace(mixer, query_down=held(mixer.query_down), query=query, key=key, pending=pending)
        case LatentWeights():
            query_down = None if mixer.query_down is None else held(mixer.query_down)
            gate = None if mixer.gate is None else held(mixer.gate)
            mixer = replace(mixer, query_down=query_down, query=held(mixer.query), gate=gate)
            mixer = replace(mixer, latent=held(mixer.latent))
    if isinstance(inner, DenseWeights):
        inner = held_dense(inner)
    elif inner is not None and inner.shared is not None:
        inner = replace(inner, shared=held_dense(inner.shared))
    o = None if weights.o is None else held(weights.o)
    return replace(weights, mixer=mixer, o=o, feed_forward=inner)


class PartKeeper:
    """Reads parts one at a time on a device, and keeps them in memory of the host."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        parts: LoadedParts,
        *,
        kernels: Kernels,
        new: NewTensor,
        reads: WeightReads,
    ) -> None:
        """`new` allocates for `reads`, and for the products of `kernels`."""
        self._parts, self._products = parts, kernels.layer_products
        self._reader = PartReader(checkpoint, new=new, reads=reads)

    def keep(
        self,
        wanted: Sequence[ModelPart],
        copies: HostCopies,
        progress: ReadProgress,
        prepare: Prepare,
        *,
        pinned_limit_bytes: int,
    ) -> None:
        """Read those of `wanted` that are not on the host; the first ones are pinned, within the limit.

        Raises like `load_tensors`, `prepare` and `progress`, keeping the complete parts.
        """
        parts = self._parts
        missing = [part for part in wanted if part.tensors not in parts.on_host]
        self._reader.begin(missing, progress, prepare)
        for part in missing:
            weights = self._reader.read(part, progress)
            if isinstance(weights, LayerWeights):
                weights = held_for(self._products, weights)
            parts.on_host[part.tensors] = HostWeights.copied(
                weights, copies, pinned_limit_bytes=pinned_limit_bytes - parts.pinned_bytes
            )


def _runs(layers: tuple[int, ...]) -> str:
    """ "0-2, 5" for (0, 1, 2, 5); "none" for ()."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs) or "none"
