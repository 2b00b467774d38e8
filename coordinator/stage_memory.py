"""How much memory a stage takes: weights exactly, KV pages exactly, activations by the estimate below.

Activations, with s bytes per element, T tokens in the largest step, S sequences in it, and a longest sequence
of C tokens (which cannot be longer than the KV cache, so C = min(max_sequence_tokens, KV tokens)):

* per token of the step (`_token_bytes`): the residual stream with its normed copy (2 * hidden * s); the
  float32 copies that the norm makes of it (2 * hidden * 4); q, k, v before and after rotation (2 * (q + 2 *
  kv) * s) and the attention output (q * s); gate, up and their product (3 * intermediate * s); one frame
  received and one being sent (2 * hidden * s). Layers run one after the other and reuse this memory, so it
  does not grow with them.
* per token of the longest sequence (`_context_bytes`): its K and V gathered from the pages of one layer (2 *
  kv * s), and for each of the T query rows the mask as bool and as number (1 + s) and the scores of every
  head in float32 before and after softmax (2 * heads * 4), as the math path of scaled_dot_product_attention
  holds them. Fused kernels need less.
* with the head (`_logits_bytes`): S rows of logits in the run dtype and in float32, of sorted values, of
  their indices (int64) and of probabilities: S * vocab * (s + 4 + 4 + 8 + 4).

Nothing is added for the process itself: the budget is for weights, KV and activations (see `WorkerCapacity`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from checkpoint import (
    DType,
    ModelConfig,
    head_bytes,
    kv_bytes_per_token_per_layer,
    layer_weight_bytes,
    stage_weight_bytes,
)
from coordinator.plan import StepLimits
from wire.roles import StageRole


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Sizes of any stage of one model under one set of limits, in bytes; layers are alike."""

    config: ModelConfig
    dtype: DType
    limits: StepLimits
    block_size: int

    @cached_property
    def layer_bytes(self) -> int:
        """Weights of one layer."""
        return layer_weight_bytes(self.config, self.dtype)

    @property
    def head_cost(self) -> int:
        """What the head adds to a decode step: final norm and output matrix are read once, tied or not."""
        return head_bytes(self.config, self.dtype)

    def weight_bytes(self, role: StageRole, num_layers: int) -> int:
        """Weights of a stage: its layers, and embeddings and head where the role has them."""
        return self.outside_bytes(role) + num_layers * self.layer_bytes

    def outside_bytes(self, role: StageRole) -> int:
        """What a role brings besides its layers; tied embeddings count once on ONLY, else on both ends."""
        with_one_layer = stage_weight_bytes(
            self.config, self.dtype, 0, 1, has_embeddings=role.has_embeddings, has_head=role.has_head
        )
        return with_one_layer - self.layer_bytes

    def kv_bytes(self, num_layers: int, num_blocks: int) -> int:
        """KV pages of `num_blocks` blocks in each of `num_layers` layers."""
        return num_layers * num_blocks * self.block_bytes

    @cached_property
    def block_bytes(self) -> int:
        """One block in one layer."""
        return self.block_size * kv_bytes_per_token_per_layer(self.config, self.dtype)

    def activation_bytes(self, role: StageRole, num_blocks: int) -> int:
        """Workspace of the largest step, when the cache has `num_blocks` blocks."""
        longest = min(self.limits.max_sequence_tokens, num_blocks * self.block_size)
        size = self.limits.max_step_tokens * self._token_bytes() + longest * self._context_bytes()
        return size + (self._logits_bytes() if role.has_head else 0)

    def total_bytes(self, role: StageRole, num_layers: int, num_blocks: int) -> int:
        """All that a stage takes."""
        weights = self.weight_bytes(role, num_layers)
        return weights + self.kv_bytes(num_layers, num_blocks) + self.activation_bytes(role, num_blocks)

    def _token_bytes(self) -> int:
        config, size = self.config, self.dtype.size_bytes
        residual = config.hidden_size * (2 * size + 2 * 4)
        attention = (2 * (config.q_size + 2 * config.kv_size) + config.q_size) * size
        return residual + attention + 3 * config.intermediate_size * size + 2 * config.hidden_size * size

    def _context_bytes(self) -> int:
        rows = self.limits.max_step_tokens * (
            1 + self.dtype.size_bytes + 2 * 4 * self.config.num_attention_heads
        )
        return kv_bytes_per_token_per_layer(self.config, self.dtype) + rows

    def _logits_bytes(self) -> int:
        row = self.config.vocab_size * (self.dtype.size_bytes + 4 + 4 + 8 + 4)
        return self.limits.max_step_sequences * row
