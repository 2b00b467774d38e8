"""The layers of one stage: one decoder for all families, built from a Blueprint.

Numerics follow transformers, so that float32 greedy tokens agree with its `generate`: RMSNorm in float32,
rounded before its weight, or as its kind says; rotary angles in float32, cos and sin rounded to the run
dtype; residuals in the run dtype; logits computed in the run dtype, then scaled and limited in float32.
Fused projections compute the same sums as separate ones. `logits` applies the final norm to the rows that
need logits; hidden states are sent un-normed.

bfloat16 on a CPU with bfloat16 products rounds differently in three places: a projection is added to the
residual stream, and to its bias, before rounding (transformers rounds, adds, and rounds again); attention
applies its float32 scale to the scores, not to the queries; compiled attention of prompts rounds weights
relative to the largest, and divides by their sum after the product with the values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import Tensor
from torch.nn.functional import embedding

from checkpoint import Blueprint, Checkpoint, DType, Mixer, Pageless
from checkpoint.step_graphs import are_recordable
from kvcache.layer_rows import RowKind
from stage_worker.backends.contract import KernelChoice
from stage_worker.model.host_weights import HostCopies
from stage_worker.model.hyper_connections import spread
from stage_worker.model.kernels import AttentionMethod, Kernels, ProductMethod
from stage_worker.model.layer_weights import TORCH_DTYPES
from stage_worker.model.operations import limited, operations
from stage_worker.model.parts import (
    LoadedParts,
    LoadedWeights,
    NeededParts,
    PartKeeper,
    PartLoader,
    PartsRead,
    Prepare,
    nothing_to_prepare,
    parts_of,
)
from stage_worker.model.pipeline_stage import PipelineStage
from stage_worker.model.projections import with_rows
from stage_worker.model.rope import Rope, Rotary
from stage_worker.model.step_layout import (
    LayerEntries,
    LayerKv,
    LayerMemory,
    LayerStates,
    NoMemory,
    PagedLayers,
    Selection,
    StepLayout,
)
from stage_worker.model.weight_reads import DeviceCopies, WeightReads
from stage_worker.model.weights import NO_PROGRESS, ReadProgress

log = logging.getLogger(__name__)

_FEWEST_ROWS = 4
"""oneDNN's packed products of 1 and 2 rows take 1.1 to 1.4 times as long as products of 4."""


class DecoderStage(PipelineStage):
    """A stage computed from its Blueprint."""

    def __init__(
        self,
        config: Blueprint,
        *,
        layer_begin: int,
        layer_end: int,
        has_embeddings: bool,
        has_head: bool,
        dtype: DType,
        device: torch.device | str = "cpu",
        kernels: Kernels | None = None,
        choice: KernelChoice = KernelChoice.AUTO,
    ) -> None:
        """Describe the stage; `load` fills it. Raises ValueError for bad layers, and KernelsUnavailable."""
        run_dtype, device = TORCH_DTYPES[dtype], torch.device(device)
        mixers = {layer.mixer for layer in config.layers[layer_begin:layer_end]}
        super().__init__(
            config,
            layer_begin=layer_begin,
            layer_end=layer_end,
            has_embeddings=has_embeddings,
            has_head=has_head,
            dtype=dtype,
            device=device,
            kernels=kernels or Kernels.of(config, device, run_dtype, choice),
            ropes={
                rotary: Rope(rotary.rope, rotary.head_dim, run_dtype, device) for rotary in _rotaries(mixers)
            },
        )
        # Rounded like transformers' Gemma.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=self.torch_dtype))
        self._weights: LoadedWeights | None = None

    @torch.inference_mode()
    def load(
        self,
        checkpoint: Checkpoint,
        *,
        parts: LoadedParts | None = None,
        progress: ReadProgress = NO_PROGRESS,
        prepare: Prepare = nothing_to_prepare,
        copies: DeviceCopies | None = None,
    ) -> PartsRead:
        """Read this stage's tensors that are missing in `parts`, converted to the run dtype.

        `prepare` makes them readable, see `PartLoader.load`.

        Unneeded parts are dropped first; afterwards `parts` holds exactly this stage's.

        Raises:
            ValueError: The checkpoint's config is not the stage's.
            Exception: Errors of `load_tensors`, `prepare` and `progress`; the stage has no weights, `parts`
                the complete ones.
        """
        parts = LoadedParts() if parts is None else parts
        needed = self._needed()
        read = self.load_parts(checkpoint, parts, needed, progress=progress, prepare=prepare, copies=copies)
        parts.on_host.clear()
        self._weights = parts.weights(needed)
        log.info(
            "layers [%d, %d) in %s on %s: %s",
            self.layers.start,
            self.layers.stop,
            self.dtype.value,
            self.device,
            self.kernels,
        )
        return read

    @property
    def is_recordable(self) -> bool:
        """With Triton kernels, and without experts: the others' masks are made of values on the host."""
        return self.kernels.decode is AttentionMethod.TRITON and are_recordable(self.config.kinds)

    @torch.inference_mode()
    def load_parts(
        self,
        checkpoint: Checkpoint,
        parts: LoadedParts,
        needed: NeededParts,
        *,
        progress: ReadProgress = NO_PROGRESS,
        prepare: Prepare = nothing_to_prepare,
        copies: DeviceCopies | None = None,
    ) -> PartsRead:
        """Make `parts` exactly those in `needed`, which may be of other stages, in this stage's format.

        Raises like `load`.
        """
        self._check_config(checkpoint)
        parts.retain(needed, self._origin(checkpoint))
        with WeightReads(copies) as reads:
            loader = PartLoader(
                checkpoint, parts, needed, kernels=self.kernels, new=self._new_tensor, reads=reads
            )
            return loader.load(progress, prepare)

    @torch.inference_mode()
    def keep_on_host(
        self,
        checkpoint: Checkpoint,
        parts: LoadedParts,
        needed: NeededParts,
        copies: HostCopies,
        *,
        pinned_limit_bytes: int,
        progress: ReadProgress = NO_PROGRESS,
        prepare: Prepare = nothing_to_prepare,
    ) -> None:
        """Make `parts` exactly those in `needed`, in memory of the host, as the stage's device has them.

        The device has one of them at a time. Raises like `load`.
        """
        self._check_config(checkpoint)
        wanted = parts_of(self.config, needed)
        parts.retain_on_host(wanted, self._origin(checkpoint))
        with WeightReads(copies) as reads:
            keeper = PartKeeper(checkpoint, parts, kernels=self.kernels, new=self._new_tensor, reads=reads)
            keeper.keep(wanted, copies, progress, prepare, pinned_limit_bytes=pinned_limit_bytes)

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Hidden states [n, residual_width] of ids int64 [n]. Raises ValueError for invalid ids on a CPU."""
        self._check_ids(token_ids)
        return self.embed_valid(token_ids)

    @torch.inference_mode()
    def embed_valid(self, token_ids: Tensor) -> Tensor:
        weight = self._loaded().embeddings
        assert weight is not None, "embed() on a stage without embeddings"
        hidden = embedding(token_ids.to(self.device), weight)
        hidden = hidden if self._embedding_scale == 1.0 else hidden.mul_(self._embedding_scale)
        return hidden if self.config.num_streams == 1 else spread(hidden, self.config.num_streams)

    @torch.inference_mode()
    def forward(self, hidden: Tensor, step: StepLayout, pages: PagedLayers) -> Tensor:
        """Hidden states [n, residual_width] after the layers, which write `pages`. Raises ValueError."""
        self._check_input(hidden, step)
        for layout, part in zip(step.groups, pages.groups, strict=True):
            if layout.writes.begun is not None:
                part.clear(layout.writes.begun)
        hidden = _with_fewest_rows(hidden, self.kernels.layer_products)
        memories = _memories(step, pages)
        for layer in self._loaded().layers:
            own = list(islice(memories, layer.num_memories))
            hidden = layer.forward(hidden, *(own or [NoMemory(step)]))
        return hidden[: step.num_tokens]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 [m, vocab_size] of the last layer's hidden states [m, residual_width]."""
        return self.picked_logits(hidden, None)[0]

    @torch.inference_mode()
    def picked_logits(self, hidden: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
        weights = self._loaded()
        assert weights.head is not None, "logits of a stage without output head"
        if weights.collapse is not None:  # of the rows that need logits only
            hidden = weights.collapse(hidden if rows is None else hidden.index_select(0, rows))
            rows = None
        normed, flags = hidden, None
        if weights.final_norm is not None:
            normed, flags = operations(self.kernels).final_norm(hidden, rows, weights.final_norm)
        logits = weights.head(_with_fewest_rows(normed, self.kernels.products))[: len(normed)]
        logits = logits.to(torch.float32)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else limited(logits, cap), flags

    def _needed(self) -> NeededParts:
        return NeededParts(
            layers=self.layers,
            has_embeddings=self.has_embeddings,
            has_head=self.has_head,
            is_tied=self.config.tie_word_embeddings,
        )

    def _loaded(self) -> LoadedWeights:
        assert self._weights is not None, "the stage's weights are not loaded"
        return self._weights

    def _new_tensor(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.torch_dtype, device=self.device)


def _rotaries(mixers: Iterable[Mixer]) -> Iterator[Rotary]:
    """All that layers with `mixers` look up."""
    for mixer in mixers:
        if not isinstance(mixer, Pageless):
            yield from Rotary.all_of(mixer)


def _memories(step: StepLayout, pages: PagedLayers) -> Iterator[LayerMemory]:
    """Memory of each layer's mixer, and then of the one beside it, if there are any."""
    selection, rows = Selection(), pages.groups[0].rows
    for number, (group, index) in enumerate(pages.places):
        if group is not None:
            entries = LayerEntries(step.groups[0], rows, number) if RowKind.ENTRY in rows else None
            yield LayerKv(step.groups[group], pages.groups[group], index, selection, entries)
        else:
            assert pages.states is not None, "a recurrent layer without states"
            yield LayerStates(step, pages.states.layer(index))


def _with_fewest_rows(hidden: Tensor, products: ProductMethod) -> Tensor:
    return with_rows(hidden, _FEWEST_ROWS) if products is ProductMethod.ONEDNN else hidden
