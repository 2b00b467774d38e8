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
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import embedding

from checkpoint import Blueprint, Checkpoint, DType, Mixer, stage_weight_bytes
from checkpoint.blueprint import HIDDEN_STATES
from stage_worker.backends.contract import KernelChoice
from stage_worker.model.attention_work import queries_per_item
from stage_worker.model.decode_rows import NO_DECODES, DecodeRows
from stage_worker.model.kernels import Kernels, ProductMethod
from stage_worker.model.layer_weights import TORCH_DTYPES
from stage_worker.model.operations import limited
from stage_worker.model.parts import (
    LoadedParts,
    LoadedWeights,
    NeededParts,
    PartLoader,
    PartsOrigin,
    PartsRead,
    Prepare,
    nothing_to_prepare,
)
from stage_worker.model.rope import Rope, Rotary
from stage_worker.model.step_layout import PagedLayers, Place, StepArrays, StepLayout, ViewRules
from stage_worker.model.weights import NO_PROGRESS, ReadProgress
from stage_worker.validation import SliceLayout

log = logging.getLogger(__name__)

_GATHERED_BYTES = 8 * 1024 * 1024
"""Bytes that a CPU gathers at once for decoding; more would be evicted from the cache before use."""

_FEWEST_ROWS = 4
"""oneDNN's packed products of 1 and 2 rows take 1.1 to 1.4 times as long as products of 4."""


class DecoderStage:
    """Layers [layer_begin, layer_end), embeddings and head; weights only, without KV. Not thread-safe."""

    CARRIED: ClassVar[tuple[str, ...]] = (HIDDEN_STATES,)
    """Tensors of `Blueprint.boundary` that `enter`, `advance` and `leave` know."""

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
        if not 0 <= layer_begin < layer_end <= config.num_layers:
            raise ValueError(f"layers [{layer_begin}, {layer_end}) of a model of {config.num_layers} layers")
        names = tuple(tensor.name for tensor in config.boundary)
        if names != self.CARRIED:
            raise ValueError(f"{', '.join(names)} cross a cut, layers compute {', '.join(self.CARRIED)}")
        self.config = config
        self.layers = range(layer_begin, layer_end)
        self.has_embeddings = has_embeddings
        self.has_head = has_head
        self.dtype = dtype
        self.torch_dtype = TORCH_DTYPES[dtype]
        self.device = torch.device(device)
        self.windows = config.layer_windows[layer_begin:layer_end]
        self.kernels = kernels or Kernels.of(config, self.device, self.torch_dtype, choice)
        self._windows = frozenset(self.windows)
        mixers = {layer.mixer for layer in config.layers[layer_begin:layer_end]}
        self._most_kv_elements = max(mixer.page_shape.num_elements for mixer in mixers)
        self._queries_per_item = min(self._queries_of(mixer) for mixer in mixers)
        self._ropes = {
            rotary: Rope(rotary.rope, rotary.head_dim, self.torch_dtype, self.device)
            for rotary in map(Rotary.of, mixers)
        }
        # Rounded like transformers' Gemma.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=self.torch_dtype))
        self._weights: LoadedWeights | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the stage's weights in the run dtype; a tied head beside its embeddings counts once."""
        return stage_weight_bytes(
            self.config,
            self.dtype,
            self.layers.start,
            self.layers.stop,
            has_embeddings=self.has_embeddings,
            has_head=self.has_head,
        )

    @torch.inference_mode()
    def load(
        self,
        checkpoint: Checkpoint,
        *,
        parts: LoadedParts | None = None,
        progress: ReadProgress = NO_PROGRESS,
        prepare: Prepare = nothing_to_prepare,
    ) -> PartsRead:
        """Read this stage's tensors that are missing in `parts`, converted to the run dtype.

        `prepare` makes them readable, see `PartLoader.load`.

        Unneeded parts are dropped first; afterwards `parts` holds exactly this stage's.

        Raises:
            ValueError: The checkpoint's config is not the stage's.
            Exception: Errors of `load_tensors`, `prepare` and `progress`; the stage has no weights, `parts`
                the complete ones.
        """
        if checkpoint.config != self.config:
            raise ValueError(f"the checkpoint in {checkpoint.path} has another config than this stage")
        parts = LoadedParts() if parts is None else parts
        needed = self._needed()
        parts.retain(needed, self._origin(checkpoint))
        loader = PartLoader(checkpoint, parts, needed, kernels=self.kernels, new=self._new_tensor)
        read = loader.load(progress, prepare)
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

    def step_arrays(
        self,
        slices: list[SliceLayout],
        *,
        block_size: int,
        decodes: DecodeRows = NO_DECODES,
        windows: Collection[int | None] | None = None,
    ) -> StepArrays:
        """Build the StepArrays of `decodes`, then `slices`, for layers with `windows` (default: all).

        Raises ValueError, see `StepArrays.build`.
        """
        return StepArrays.build(
            slices,
            decodes=decodes,
            windows=self._windows if windows is None else windows,
            rules=ViewRules(
                block_size=block_size,
                device=self.device,
                dtype=self.torch_dtype,
                kernels=self.kernels,
                max_keys=self._max_keys,
                queries_per_item=self._queries_per_item,
            ),
        )

    @torch.inference_mode()
    def layout(self, arrays: Sequence[StepArrays], place: Place) -> StepLayout:
        """The layout of a step with `arrays` for each block group of the stage, which are on the device."""
        rotary = arrays[0].rotary(self._ropes, place)
        first, *others = [part.layout(rotary, place) for part in arrays]
        return replace(first, others=tuple(others)) if others else first

    def enter(self, token_ids: Tensor) -> tuple[Tensor, ...]:
        """The tensors of the boundary before the first layer for ids int64 [n]. Raises like `embed`."""
        return (self.embed(token_ids),)

    def advance(self, carried: Sequence[Tensor], step: StepLayout, pages: PagedLayers) -> tuple[Tensor, ...]:
        """The tensors of the boundary after the layers, which write `pages`. Raises ValueError."""
        (hidden,) = carried
        return (self.forward(hidden, step, pages),)

    def leave(self, carried: Sequence[Tensor]) -> Tensor:
        """The input of `logits` after the last layer, [n, hidden_size]."""
        return carried[0]

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Hidden states [n, hidden_size] of ids int64 [n]. Raises ValueError for an invalid id on the CPU."""
        weight = self._loaded().embeddings
        assert weight is not None, "embed() on a stage without embeddings"
        if token_ids.device.type == "cpu" and token_ids.numel():
            low, high = (int(x) for x in token_ids.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(f"token ids {low}..{high} for a vocabulary of {self.config.vocab_size}")
        hidden = embedding(token_ids.to(self.device), weight)
        return hidden if self._embedding_scale == 1.0 else hidden.mul_(self._embedding_scale)

    @torch.inference_mode()
    def forward(self, hidden: Tensor, step: StepLayout, pages: PagedLayers) -> Tensor:
        """Hidden states [n, hidden_size] after the layers, which write `pages`. Raises ValueError."""
        expected = (step.num_tokens, self.config.hidden_size)
        if hidden.shape != expected or hidden.dtype != self.torch_dtype:
            given = f"{tuple(hidden.shape)} {hidden.dtype}"
            raise ValueError(f"hidden states {given}, the step needs {expected} {self.torch_dtype}")
        groups = list(zip(step.groups, pages.groups, strict=True))
        for layout, part in groups:
            if layout.writes.begun is not None:
                part.clear(layout.writes.begun)
        hidden = _with_fewest_rows(hidden, self.kernels.layer_products)
        for (group, index), layer in zip(pages.places, self._loaded().layers, strict=True):
            hidden = layer.forward(hidden, *groups[group], index)
        return hidden[: step.num_tokens]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 [m, vocab_size] of the last layer's hidden states [m, hidden_size]."""
        weights = self._loaded()
        assert weights.final_norm is not None, "logits() on a stage without output head"
        assert weights.head is not None
        normed = weights.final_norm(_with_fewest_rows(hidden, self.kernels.products))
        logits = weights.head(normed)[: len(hidden)].to(torch.float32)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else limited(logits, cap)

    def _queries_of(self, mixer: Mixer) -> int:
        shape = mixer.page_shape
        return queries_per_item(mixer.num_heads // shape.heads, shape.width, self.dtype.size_bytes)

    @property
    def _max_keys(self) -> int:
        """Maximum keys of one layer that a decode view gathers; unlimited on a GPU."""
        if self.device.type != "cpu":
            return sys.maxsize
        return _GATHERED_BYTES // (self._most_kv_elements * self.dtype.size_bytes)

    def _needed(self) -> NeededParts:
        return NeededParts(
            layers=self.layers,
            has_embeddings=self.has_embeddings,
            has_head=self.has_head,
            is_tied=self.config.tie_word_embeddings,
        )

    def _origin(self, checkpoint: Checkpoint) -> PartsOrigin:
        return PartsOrigin(
            fingerprint=checkpoint.fingerprint,
            files=checkpoint.file_identities(),
            dtype=self.torch_dtype,
            device=self.device,
            kernels=self.kernels,
            has_long_rope=checkpoint.config.has_long_rope,
        )

    def _loaded(self) -> LoadedWeights:
        assert self._weights is not None, "the stage's weights are not loaded"
        return self._weights

    def _new_tensor(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.torch_dtype, device=self.device)


def _with_fewest_rows(hidden: Tensor, products: ProductMethod) -> Tensor:
    missing = _FEWEST_ROWS - len(hidden) if products is ProductMethod.ONEDNN else 0
    if missing <= 0:
        return hidden
    return torch.cat((hidden, hidden.new_zeros(missing, hidden.shape[1])))
