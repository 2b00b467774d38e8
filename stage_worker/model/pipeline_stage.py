"""What a stage of a pipeline is, whichever code computes its layers."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from checkpoint import (
    Attention,
    Blueprint,
    Checkpoint,
    DType,
    Latent,
    Pageless,
    stage_weight_bytes,
)
from checkpoint.boundary import HIDDEN_STATES
from checkpoint.choices import block_indexer_of, top_k_of
from checkpoint.compressed import Compressed, compressors_of, has_entries
from checkpoint.held import stage_table_bytes
from checkpoint.implementation import Implementation
from kvcache import group_windows
from stage_worker.model.attention_views import Place, ViewRules
from stage_worker.model.attention_work import queries_per_item
from stage_worker.model.decode_rows import NO_DECODES, DecodeRows
from stage_worker.model.kernels import Kernels
from stage_worker.model.layer_weights import TORCH_DTYPES
from stage_worker.model.parts import LoadedParts, PartsOrigin, PartsRead, Prepare, nothing_to_prepare
from stage_worker.model.rope import Rope, Rotary
from stage_worker.model.state_rows import HostStates
from stage_worker.model.step_layout import PagedLayers, StepArrays, StepLayout
from stage_worker.model.weight_reads import DeviceCopies
from stage_worker.model.weights import NO_PROGRESS, ReadProgress
from stage_worker.validation import SliceLayout

_GATHERED_BYTES = 8 * 1024 * 1024
"""Bytes that a CPU gathers at once for decoding; more would be evicted from the cache before use."""


class PipelineStage(ABC):
    """Layers [layer_begin, layer_end), embeddings and head; weights only, without KV. Not thread-safe."""

    IMPLEMENTATION: ClassVar[Implementation] = Implementation.NATIVE
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
        device: torch.device | str,
        kernels: Kernels,
        ropes: Mapping[Rotary, Rope],
    ) -> None:
        """Describe the stage; `load` fills it. `ropes` are those of its layers that Stageline rotates.

        `group_windows` has number and window of each block group of the model that the stage has pages of.
        Raises ValueError for bad layers.
        """
        self._check_layers(config, layer_begin, layer_end)
        self.config = config
        self.layers = range(layer_begin, layer_end)
        self.has_embeddings = has_embeddings
        self.has_head = has_head
        self.dtype = dtype
        self.torch_dtype = TORCH_DTYPES[dtype]
        self.device = torch.device(device)
        mixers = {layer.mixer for layer in config.layers[layer_begin:layer_end]}
        self.windows = config.layer_windows[layer_begin:layer_end]
        groups = enumerate(group_windows(config.cache_windows))
        cached = {*self.windows, *(None for mixer in mixers if has_entries(mixer))}
        self.group_windows = [(number, window) for number, window in groups if window in cached]
        self.kernels = kernels
        self._ropes = ropes
        self._windows = frozenset(self.windows)
        self.needs_tokens = any(layer.needs_tokens for layer in config.layers[layer_begin:layer_end])
        self._paged = [mixer for mixer in mixers if not isinstance(mixer, Pageless)]
        self.is_recurrent = any(layer.recurrent for layer in config.layers[layer_begin:layer_end])
        self._compressors = compressors_of(mixers)
        self._key_window = max((mixer.window for mixer in mixers if isinstance(mixer, Compressed)), default=0)
        self._queries_per_item = min(map(self._queries_of, self._paged), default=1)

    def _check_layers(self, config: Blueprint, layer_begin: int, layer_end: int) -> None:
        if not 0 <= layer_begin < layer_end <= config.num_layers:
            raise ValueError(f"layers [{layer_begin}, {layer_end}) of a model of {config.num_layers} layers")
        names = tuple(tensor.name for tensor in config.boundary)
        if names != self.CARRIED:
            raise ValueError(f"{', '.join(names)} cross a cut, layers compute {', '.join(self.CARRIED)}")

    @property
    def table_bytes(self) -> int:
        """Bytes of the stage's tables that are on the host for a GPU; 0 for a CPU, where they are weights."""
        if self.device.type == "cpu":
            return 0
        return stage_table_bytes(self.config, self.dtype, self.layers.start, self.layers.stop)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the stage's weights in the run dtype on its device; a tied head beside its embeddings
        counts once.
        """
        whole = stage_weight_bytes(
            self.config,
            self.dtype,
            self.layers.start,
            self.layers.stop,
            has_embeddings=self.has_embeddings,
            has_head=self.has_head,
        )
        return whole - self.table_bytes

    @property
    def samples_by_kernels(self) -> bool:
        """Whether Triton kernels sample from its logits."""
        return self.kernels.are_triton

    @abstractmethod
    def load(
        self,
        checkpoint: Checkpoint,
        *,
        parts: LoadedParts | None = None,
        progress: ReadProgress = NO_PROGRESS,
        prepare: Prepare = nothing_to_prepare,
        copies: DeviceCopies | None = None,
    ) -> PartsRead:
        """Read this stage's tensors that are missing in `parts`, which `prepare` makes readable.

        `copies` are those of a device that is not the CPU.

        Raises ValueError for a checkpoint with another config, and errors of `load_tensors`, `prepare` and
        `progress`; the stage has no weights then.
        """

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
            rules=self._rules(block_size),
        )

    def empty_arrays(self, *, block_size: int) -> list[StepArrays]:
        """A step without rows, by block group, to be padded; for Triton kernels."""
        rules = self._rules(block_size)
        found = [StepArrays.empty((window,), rules) for _, window in self.group_windows]
        if self.is_recurrent:
            found[0] = replace(found[0], states=self.host_states((), ()))
        return found

    def host_states(self, lengths: Sequence[int], slots: Sequence[int]) -> HostStates:
        """Rows of slices of `lengths` tokens, one after the other, whose recurrent states are in `slots`."""
        return HostStates.of(lengths, slots, by_triton=self.kernels.are_triton)

    @property
    def is_recordable(self) -> bool:
        """Whether a stage enqueues the same work for all steps of a size."""
        return False

    @torch.inference_mode()
    def reserve_positions(self, end: int) -> None:
        """Make what layouts of positions below `end` share; it stays the same from now on."""
        for rope in self._ropes.values():
            rope.reserve(end)

    @property
    def queries_per_item(self) -> int:
        """Queries of one item of attention work of a slice of several tokens."""
        return self._queries_per_item

    def _rules(self, block_size: int) -> ViewRules:
        return ViewRules(
            block_size=block_size,
            device=self.device,
            dtype=self.torch_dtype,
            kernels=self.kernels,
            max_keys=self._max_keys,
            queries_per_item=self._queries_per_item,
            compressors=self._compressors,
            key_window=self._key_window,
            top_k=top_k_of(self.config.kinds) if self.kernels.are_triton else None,
            indexer=block_indexer_of(self.config.kinds) if self.kernels.are_triton else None,
        )

    @torch.inference_mode()
    def layout(self, arrays: Sequence[StepArrays], place: Place) -> StepLayout:
        """The layout of a step with `arrays` for each block group of the stage, which are on the device."""
        rotary = arrays[0].rotary(self._ropes, place)
        ropes = self._ropes if self._compressors else None
        first, *others = [part.layout(rotary, place, ropes) for part in arrays]
        return replace(first, others=tuple(others)) if others else first

    def enter(self, token_ids: Tensor) -> tuple[Tensor, ...]:
        """The tensors of the boundary before the first layer for ids int64 [n]. Raises like `embed`."""
        return (self.embed(token_ids),)

    def advance(self, carried: Sequence[Tensor], step: StepLayout, pages: PagedLayers) -> tuple[Tensor, ...]:
        """The tensors of the boundary after the layers, which write `pages`. Raises ValueError."""
        (hidden,) = carried
        return (self.forward(hidden, step, pages),)

    def leave(self, carried: Sequence[Tensor]) -> Tensor:
        """The input of `logits` after the last layer, [n, residual_width]."""
        return carried[0]

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """Hidden states [n, residual_width] of ids int64 [n]. Raises ValueError for invalid ids on a CPU."""

    def embed_valid(self, token_ids: Tensor) -> Tensor:
        """Like `embed`, for ids that are known to be valid: enqueues the same work for all of them."""
        return self.embed(token_ids)

    @abstractmethod
    def forward(self, hidden: Tensor, step: StepLayout, pages: PagedLayers) -> Tensor:
        """Hidden states [n, residual_width] after the layers, which write `pages`. Raises ValueError."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 [m, vocab_size] of the last layer's hidden states [m, residual_width]."""

    def picked_logits(self, hidden: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Logits float32 [m, vocab_size] of `rows` int64 [m] of `hidden` (None: all), and flags int32 [m].

        A flag is not 0 if the row of `hidden` has a NaN or an infinity. None instead of flags: logits tell.
        """
        return self.logits(hidden if rows is None else hidden.index_select(0, rows)), None

    def _check_input(self, hidden: Tensor, step: StepLayout) -> None:
        """Raise ValueError for hidden states that are not those of `step`."""
        expected = (step.num_tokens, self.config.residual_width)
        if hidden.shape != expected or hidden.dtype != self.torch_dtype:
            given = f"{tuple(hidden.shape)} {hidden.dtype}"
            raise ValueError(f"hidden states {given}, the step needs {expected} {self.torch_dtype}")

    def _check_ids(self, token_ids: Tensor) -> None:
        """Raise ValueError for ids outside the vocabulary, on a CPU."""
        if token_ids.device.type == "cpu" and token_ids.numel():
            low, high = (int(x) for x in token_ids.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(f"token ids {low}..{high} for a vocabulary of {self.config.vocab_size}")

    def _check_config(self, checkpoint: Checkpoint) -> None:
        """Raise ValueError for a checkpoint of another model."""
        if checkpoint.config != self.config:
            raise ValueError(f"the checkpoint in {checkpoint.path} has another config than this stage")

    def _queries_of(self, mixer: Attention | Latent | Compressed) -> int:
        shape = mixer.page_shape
        return queries_per_item(mixer.num_heads // shape.heads, shape.width, self.dtype.size_bytes)

    @property
    def _max_keys(self) -> int:
        """Maximum keys of one layer that a decode view gathers; unlimited on a GPU."""
        if self.device.type != "cpu":
            return sys.maxsize
        most = max((mixer.page_shape.num_elements for mixer in self._paged), default=1)
        return _GATHERED_BYTES // (most * self.dtype.size_bytes)

    def _origin(self, checkpoint: Checkpoint) -> PartsOrigin:
        return PartsOrigin(
            fingerprint=checkpoint.fingerprint,
            files=checkpoint.file_identities(),
            dtype=self.torch_dtype,
            device=self.device,
            kernels=self.kernels,
            has_long_rope=checkpoint.config.has_long_rope,
            implementation=self.IMPLEMENTATION,
        )
