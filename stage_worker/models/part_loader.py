"""Reads the parts of a stage that are not in memory yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from checkpoint import Checkpoint
from checkpoint.tensors import EMBEDDINGS, FINAL_NORM, OUTPUT_HEAD, layer_tensor_name, layer_tensor_shapes
from stage_worker.models.decoder_layer import DecoderLayer
from stage_worker.models.kernels import Kernels
from stage_worker.models.layer_weights import NewTensor, allocate_layer
from stage_worker.models.projections import PlainProjection, project
from stage_worker.models.stage_parts import NeededParts, StageParts
from stage_worker.weights import ReadProgress, load_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsRead:
    """Which parts of a stage were read, and which were there. `num_bytes` were read of the checkpoint."""

    read_layers: tuple[int, ...]
    kept_layers: tuple[int, ...]
    read_others: tuple[str, ...]
    kept_others: tuple[str, ...]
    num_bytes: int

    def __str__(self) -> str:
        """Such as "layers 6-7 loaded, 0-5 kept; embeddings kept"."""
        layers = f"layers {_runs(self.read_layers)} loaded, {_runs(self.kept_layers)} kept"
        others = [f"{name} loaded" for name in self.read_others] + [
            f"{name} kept" for name in self.kept_others
        ]
        return layers + "".join(f"; {other}" for other in others)


class PartLoader:
    """Completes the parts of one stage, part by part: beside whole parts at most one is in memory that is
    not finished, and then perhaps twice, as it was read and packed."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        parts: StageParts,
        needed: NeededParts,
        *,
        kernels: Kernels,
        new: NewTensor,
    ) -> None:
        """`parts` are those of `needed` that can be used, see `StageParts.retain`."""
        self._checkpoint, self._config = checkpoint, checkpoint.config
        self._parts, self._needed = parts, needed
        self._kernels, self._new = kernels, new

    def load(self, progress: ReadProgress) -> PartsRead:
        """Reads what is missing. Raises what `load_tensors` and `progress` raise; parts that were complete by
        then are there."""
        missing = list(self._missing())
        names = [name for part in missing for name in part.tensors]
        num_bytes = sum(entry.end - entry.begin for entry in map(self._checkpoint.tensors.__getitem__, names))
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
            yield _Missing("embeddings", (EMBEDDINGS,), self._read_embeddings)
        suffixes = layer_tensor_shapes(self._config)
        for layer in needed.layers:
            if layer not in parts.layers:
                names = tuple(layer_tensor_name(layer, suffix) for suffix in suffixes)
                yield _Missing(layer, names, self._layer_reader(layer))
        if needed.has_head and parts.final_norm is None:
            yield _Missing("final norm", (FINAL_NORM,), self._read_final_norm)
        if needed.has_head and parts.head is None and not (needed.is_tied and needed.has_embeddings):
            yield _Missing("head", (self._head_name,), self._read_head)

    @property
    def _head_name(self) -> str:
        return EMBEDDINGS if self._needed.is_tied else OUTPUT_HEAD

    def _layer_reader(self, layer: int) -> Callable[[ReadProgress], None]:
        def read(progress: ReadProgress) -> None:
            self._parts.layers[layer] = self._read_layer(layer, progress)

        return read

    def _read_layer(self, layer: int, progress: ReadProgress) -> DecoderLayer:
        weights, destinations = allocate_layer(self._config, layer, self._new)
        load_tensors(self._checkpoint, destinations, progress=progress)
        return DecoderLayer(self._config, weights, self._kernels, window=self._config.layer_windows[layer])

    def _read_embeddings(self, progress: ReadProgress) -> None:
        self._parts.embeddings = self._read_matrix(EMBEDDINGS, progress)

    def _read_final_norm(self, progress: ReadProgress) -> None:
        self._parts.final_norm = self._read_tensor(FINAL_NORM, progress, self._config.hidden_size)

    def _read_head(self, progress: ReadProgress) -> None:
        self._parts.head = project(self._read_matrix(self._head_name, progress), None, self._kernels)

    def _read_matrix(self, name: str, progress: ReadProgress) -> Tensor:
        return self._read_tensor(name, progress, self._config.vocab_size, self._config.hidden_size)

    def _read_tensor(self, name: str, progress: ReadProgress, *shape: int) -> Tensor:
        tensor = self._new(*shape)
        load_tensors(self._checkpoint, {name: tensor}, progress=progress)
        return tensor

    def _report(self, missing: list[_Missing], num_bytes: int) -> PartsRead:
        read = {part.name for part in missing}
        others = ["embeddings"] * self._needed.has_embeddings + ["final norm", "head"] * self._needed.has_head
        if self._needed.is_tied and self._needed.has_embeddings and self._needed.has_head:
            others.remove("head")  # it is the embeddings
        return PartsRead(
            read_layers=tuple(layer for layer in self._needed.layers if layer in read),
            kept_layers=tuple(layer for layer in self._needed.layers if layer not in read),
            read_others=tuple(name for name in others if name in read),
            kept_others=tuple(name for name in others if name not in read),
            num_bytes=num_bytes,
        )


@dataclass(frozen=True, slots=True)
class _Missing:
    """A layer by its number, or another part by its name; `read` puts it in its place."""

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
