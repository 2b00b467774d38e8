"""The layers of one stage: a configurable decoder for Llama, Mistral, Qwen2 and Qwen3 checkpoints.

Numerics follow transformers, so that float32 greedy tokens agree with its `generate`: RMSNorm in float32 and
rounded before its weight; rotary angles in float32, cos and sin rounded to the run dtype; attention scaled by
head_dim ** -0.5; residuals in the run dtype; logits computed in the run dtype and returned as float32. Fused
projections compute the same sums as separate ones. The final norm belongs to `logits`, which only ever sees
the rows that need logits; hidden states travel un-normed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from checkpoint import Checkpoint, DType, ModelConfig, stage_weight_bytes
from stage_worker.models.attention import attend
from stage_worker.models.layer_weights import LayerWeights, StageWeights, allocate_stage
from stage_worker.models.norms import rms_norm
from stage_worker.models.paged_kv import PagedKv
from stage_worker.models.rope import Rope, rotate
from stage_worker.models.step_layout import StepLayout
from stage_worker.models.torch_dtypes import TORCH_DTYPES
from stage_worker.slice_layout import SliceLayout
from stage_worker.weights import load_tensors


class DecoderStage:
    """Layers [layer_begin, layer_end) of a model, with the embeddings and the output head if asked for.

    Holds weights only; keys and values live in the pages given to `forward`. Not for concurrent use.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        layer_begin: int,
        layer_end: int,
        has_embeddings: bool,
        has_head: bool,
        dtype: DType,
        device: torch.device | str = "cpu",
    ) -> None:
        """Describe the stage; `load` allocates and fills the weights. Raises ValueError for an empty or
        impossible layer range."""
        if not 0 <= layer_begin < layer_end <= config.num_layers:
            raise ValueError(
                f"layers [{layer_begin}, {layer_end}) of a model with {config.num_layers} layers"
            )
        self.config = config
        self.layers = range(layer_begin, layer_end)
        self.has_embeddings = has_embeddings
        self.has_head = has_head
        self.dtype = dtype
        self.torch_dtype = TORCH_DTYPES[dtype]
        self.device = torch.device(device)
        self.windows = config.layer_windows[layer_begin:layer_end]
        self._rope = Rope.of(config, self.device)
        self._weights: StageWeights | None = None

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
    def load(self, checkpoint: Checkpoint, *, on_progress: Callable[[float], None] | None = None) -> None:
        """Read this stage's tensors, and no others, converting them to the run dtype.

        `on_progress` is told the fraction that is loaded; what it raises ends the load.

        Raises ValueError when the checkpoint's config is not the stage's, and what `load_tensors` raises;
        the stage then stays without weights.
        """
        if checkpoint.config != self.config:
            raise ValueError(f"the checkpoint in {checkpoint.directory} has another config than this stage")
        weights, destinations = allocate_stage(
            self.config,
            self.layers,
            self._new_tensor,
            has_embeddings=self.has_embeddings,
            has_head=self.has_head,
        )
        load_tensors(checkpoint, destinations, on_progress=on_progress)
        self._weights = weights

    @torch.inference_mode()
    def layout(self, slices: list[SliceLayout], *, block_size: int) -> StepLayout:
        """The StepLayout of `slices` for this stage. Raises ValueError, see `StepLayout.build`."""
        return StepLayout.build(
            slices,
            block_size=block_size,
            windows=frozenset(self.windows),
            rope=self._rope,
            dtype=self.torch_dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Hidden states [n, hidden_size] of `token_ids` int64 [n].

        Raises ValueError for an id outside the vocabulary; ids that are on a GPU already are not checked.
        """
        weight = self._loaded().embeddings
        assert weight is not None, "embed() on a stage without embeddings"
        if token_ids.device.type == "cpu" and token_ids.numel():
            low, high = (int(x) for x in token_ids.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(f"token ids {low}..{high} for a vocabulary of {self.config.vocab_size}")
        return embedding(token_ids.to(self.device), weight)

    @torch.inference_mode()
    def forward(self, hidden: Tensor, step: StepLayout, pages: PagedKv) -> Tensor:
        """Hidden states [n, hidden_size] after the stage's layers; keys and values go to `pages`.

        Does not modify `hidden`. Raises ValueError when it has another shape or dtype than the step needs.
        """
        expected = (step.num_tokens, self.config.hidden_size)
        if hidden.shape != expected or hidden.dtype != self.torch_dtype:
            given = f"{tuple(hidden.shape)} {hidden.dtype}"
            raise ValueError(f"hidden states {given}, the step needs {expected} {self.torch_dtype}")
        for layer, (weights, window) in enumerate(zip(self._loaded().layers, self.windows, strict=True)):
            hidden = self._attention(hidden, weights, layer, window, step, pages)
            hidden = self._mlp(hidden, weights)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 [m, vocab_size] of the last layer's hidden states [m, hidden_size]."""
        weights = self._loaded()
        assert weights.final_norm is not None, "logits() on a stage without output head"
        assert weights.head is not None
        normed = rms_norm(hidden, weights.final_norm, self.config.rms_norm_eps)
        return linear(normed, weights.head).to(torch.float32)

    def _attention(
        self,
        hidden: Tensor,
        weights: LayerWeights,
        layer: int,
        window: int | None,
        step: StepLayout,
        pages: PagedKv,
    ) -> Tensor:
        config = self.config
        normed = rms_norm(hidden, weights.input_norm, config.rms_norm_eps)
        fused = linear(normed, weights.qkv, weights.qkv_bias)
        fused = fused.view(step.num_tokens, -1, config.head_dim)
        heads = [config.num_attention_heads, config.num_kv_heads, config.num_kv_heads]
        query, key, value = torch.split(fused, heads, dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            query = rms_norm(query, weights.q_norm, config.rms_norm_eps)
            key = rms_norm(key, weights.k_norm, config.rms_norm_eps)
        query, key = rotate(query, step.cos, step.sin), rotate(key, step.cos, step.sin)
        mixed = attend(query, key, value, layer=layer, window=window, step=step, pages=pages)
        return hidden + linear(mixed.view(step.num_tokens, -1), weights.o, weights.o_bias)

    def _mlp(self, hidden: Tensor, weights: LayerWeights) -> Tensor:
        """SwiGLU. Source: Shazeer 2020, arXiv:2002.05202."""
        normed = rms_norm(hidden, weights.post_attention_norm, self.config.rms_norm_eps)
        gate, up = linear(normed, weights.gate_up, weights.gate_up_bias).chunk(2, dim=-1)
        return hidden + linear(silu(gate) * up, weights.down, weights.down_bias)

    def _loaded(self) -> StageWeights:
        assert self._weights is not None, "the stage's weights are not loaded"
        return self._weights

    def _new_tensor(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.torch_dtype, device=self.device)
