"""How much memory a stage takes: weights exactly, KV pages exactly, activations by the estimate below.

Activations, with s bytes per element, T tokens and S sequences in the largest step, K tokens of KV, and a
longest sequence of C tokens (never more than the cache holds, so C = min(max_sequence_tokens, K)):

* T * `_token_bytes`: the residual stream with its normed copy (2 * hidden * s); the float32 copies that the
  norm makes of it (2 * hidden * 4); q, k, v before and after rotation (2 * (q + 2 * kv) * s) and the
  attention output (q * s); gate, up and their product (3 * intermediate * s); one frame received and one
  being sent (2 * hidden * s). Layers run one after the other and reuse this memory, so it does not grow
  with them.
* min(S * C, K) tokens of K and V gathered from the pages of one layer (2 * kv * s each): as much as one
  more layer of KV. Sequences of similar length are gathered together, padded to at most about twice
  their tokens, and a shared prefix once per sequence; what that adds is not counted.
* T * C * `_mask_bytes` for prefill: for every distinct window of the layers, the mask as bool and while it
  is made (2), in the run dtype and once more where a kernel wants it aligned (2 * s). The scores are not
  counted: the fused kernels of scaled_dot_product_attention take additive masks and never hold them in
  memory.
* with the head, min(S, T) rows of logits: in the run dtype (s), and to sample from them in float32 with a
  copy of the filtered ones (8), sorted with ids (12), and in float64 scaled, as probabilities, summed and
  cut (48).

Nothing is added for the process itself: the budget is for weights, KV and activations (see
`WorkerCapacity`).
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
from coordinator.planning.plan import StepLimits
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
        limits, kv_tokens = self.limits, num_blocks * self.block_size
        longest = min(limits.max_sequence_tokens, kv_tokens)
        gathered = min(limits.max_step_sequences * longest, kv_tokens)
        size = limits.max_step_tokens * (self._token_bytes() + longest * self._mask_bytes())
        size += gathered * kv_bytes_per_token_per_layer(self.config, self.dtype)
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

    def _mask_bytes(self) -> int:
        return len(set(self.config.layer_windows)) * (2 + 2 * self.dtype.size_bytes)

    def _logits_bytes(self) -> int:
        rows = min(self.limits.max_step_sequences, self.limits.max_step_tokens)
        return rows * self.config.vocab_size * (self.dtype.size_bytes + 8 + 12 + 48)
