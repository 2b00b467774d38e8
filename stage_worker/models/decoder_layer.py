"""One decoder layer: attention and a gated MLP, each behind a norm and added to the residual stream."""

from __future__ import annotations

from torch import Tensor

from checkpoint import ModelConfig
from stage_worker.models.attention import attend
from stage_worker.models.kernels import Kernels
from stage_worker.models.layer_weights import LayerWeights
from stage_worker.models.norms import rms_norm
from stage_worker.models.operations import operations
from stage_worker.models.paged_kv import PagedKv
from stage_worker.models.projections import project
from stage_worker.models.step_layout import StepLayout


class DecoderLayer:
    """Everything about a layer that neither a step changes nor the stage that it is part of."""

    def __init__(
        self, config: ModelConfig, weights: LayerWeights, kernels: Kernels, *, window: int | None
    ) -> None:
        """Weights that are packed are not kept as given."""
        self._window = window
        self._operations = operations(kernels)
        self._eps = config.rms_norm_eps
        self._head_dim = config.head_dim
        self._num_heads = config.num_attention_heads
        self._num_rotated = config.num_attention_heads + config.num_kv_heads
        self._input_norm, self._mlp_norm = weights.input_norm, weights.post_attention_norm
        self._q_norm, self._k_norm = weights.q_norm, weights.k_norm
        self._qkv = project(weights.qkv, weights.qkv_bias, kernels)
        self._o = project(weights.o, weights.o_bias, kernels)
        self._gate_up = project(weights.gate_up, weights.gate_up_bias, kernels)
        self._down = project(weights.down, weights.down_bias, kernels)

    def forward(self, hidden: Tensor, step: StepLayout, pages: PagedKv, layer: int) -> Tensor:
        """Hidden states after this layer, of the shape of `hidden` [m, hidden_size], which stays as it is.

        Its keys and values are those of `layer` in `pages`, which counts from the stage's first.

        `m` is the step's number of tokens, or more: rows behind those are computed, but attend to nothing.
        """
        normed = self._operations.rms_norm(hidden, self._input_norm, self._eps)
        hidden = self._o.added_to(hidden, self._attention(normed, step, pages, layer))
        normed = self._operations.rms_norm(hidden, self._mlp_norm, self._eps)
        # SwiGLU. Source: Shazeer 2020, arXiv:2002.05202.
        return self._down.added_to(hidden, self._operations.gate(self._gate_up(normed)))

    def _attention(self, normed: Tensor, step: StepLayout, pages: PagedKv, layer: int) -> Tensor:
        """[m, heads * head_dim]: what attention mixed, zeros behind the step's tokens."""
        num_rows, num_tokens, num_heads = normed.shape[0], step.num_tokens, self._num_heads
        heads = self._qkv(normed).view(num_rows, -1, self._head_dim)[:num_tokens]
        query, fresh = heads[:, :num_heads], heads[:, num_heads:]
        if self._q_norm is not None and self._k_norm is not None:
            key = heads[:, num_heads : self._num_rotated]
            query.copy_(rms_norm(query, self._q_norm, self._eps))
            key.copy_(rms_norm(key, self._k_norm, self._eps))
        # All slices are written before any attends, since slices may share pages.
        self._operations.rotate_and_write(heads, num_heads, layer, step, pages)
        new = normed.new_empty if num_rows == num_tokens else normed.new_zeros
        mixed = new(num_rows, num_heads, self._head_dim)
        attend(
            query,
            fresh,
            mixed[:num_tokens],
            operations=self._operations,
            layer=layer,
            window=self._window,
            step=step,
            pages=pages,
        )
        return mixed.view(num_rows, -1)
