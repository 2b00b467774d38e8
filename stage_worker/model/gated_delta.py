"""Gated DeltaNet: linear attention whose memory of a sequence is one state, see `checkpoint.GatedDelta`.

Within a part of a longer slice, the updates are one triangular system (the UT transform), so the work is
matrix products. Token by token, the same sums have another order. Everything from the unit queries and keys
to the output before its norm is float32, as is the state. Where slices begin decides on the order of the
sums: a sequence that is recomputed in other slices differs by rounding, which adds up over the tokens of a
state (with wide random weights, logits by up to 1.5e-4 of their spread in float32).

Source: Yang et al. 2024, arXiv:2412.06464, section 3; transformers' torch_chunk_gated_delta_rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from checkpoint import GatedDelta, Norm
from checkpoint.recurrent import UNIT_EPS
from stage_worker.model.causal_convolution import CausalConvolution
from stage_worker.model.kernels import Kernels
from stage_worker.model.layer_weights import DeltaWeights
from stage_worker.model.norms import NormWeights, row_norm
from stage_worker.model.operations import Operations
from stage_worker.model.projections import project, with_rows
from stage_worker.model.recurrence import RecurrentMixer, advance, decay_rates
from stage_worker.model.step_layout import LayerStates


def gated_delta_net(
    mixer: GatedDelta, weights: DeltaWeights, operations: Operations, kernels: Kernels
) -> RecurrentMixer:
    """See `GatedDelta`. Packed weights replace the given ones."""
    fused = operations.delta_function(mixer, weights)
    projection = project(weights.input, None, kernels.layer_products)
    return RecurrentMixer(projection, fused or SeparateDelta(mixer, weights))


class SeparateDelta:
    """A `StateFunction` by torch's operators."""

    def __init__(self, mixer: GatedDelta, weights: DeltaWeights) -> None:
        self._mixer = mixer
        self._is_tiled = mixer.layout.is_tiled
        self._convolution = CausalConvolution(weights.conv)
        self._rates = decay_rates(weights.decay, has_rates=mixer.layout.has_rates)
        self._dt_bias = weights.dt_bias
        self._norm = row_norm(Norm(eps=mixer.norm_eps), NormWeights(weights.norm, None))
        self._gate = torch.sigmoid if mixer.has_sigmoid_gate else silu

    def __call__(self, projected: Tensor, memory: LayerStates) -> Tensor:
        mixer, num_tokens = self._mixer, memory.step.num_tokens
        mixed, gate, beta, a = projected[:num_tokens].split_with_sizes(
            (mixer.conv_size, mixer.o_size, mixer.num_heads, mixer.num_heads), dim=1
        )
        gates = beta.sigmoid().float(), self._rates * softplus(a.float() + self._dt_bias)
        output = torch.empty(num_tokens, mixer.num_heads, mixer.value_dim, device=projected.device)
        advance(self, self._convolution, mixed, gates, memory, output)
        return with_rows(self._gated(output.to(projected.dtype), gate), len(projected))

    def of_singles(self, convolved: Tensor, gates: Sequence[Tensor], states: Tensor) -> Tensor:
        """See `Recurrence`; `gates` are strengths and decays [b, heads]."""
        strength, decay = gates
        return delta_step(*self._heads(convolved), strength, decay[..., None], states)

    def of_chunk(self, convolved: Tensor, gates: Sequence[Tensor], state: Tensor) -> Tensor:
        """See `Recurrence`."""
        strength, decay = gates
        return delta_chunk(*self._heads(convolved), strength, decay, state)

    def _heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [n, heads, key_dim] and values [n, heads, value_dim]."""
        mixer = self._mixer
        query, key, value = convolved.split_with_sizes((mixer.q_size, mixer.q_size, mixer.o_size), dim=1)
        units = [
            self._of_values(unit_length(torch.unflatten(x, 1, (mixer.num_key_heads, -1))))
            for x in (query, key)
        ]
        return units[0] * mixer.key_dim**-0.5, units[1], torch.unflatten(value, 1, (mixer.num_heads, -1))

    def _of_values(self, unit: Tensor) -> Tensor:
        """[n, heads, key_dim] of [n, key_heads, key_dim], see `DeltaLayout.is_tiled`."""
        shared = self._mixer.num_heads // self._mixer.num_key_heads
        return unit.repeat(1, shared, 1) if self._is_tiled else unit.repeat_interleave(shared, dim=1)

    def _gated(self, output: Tensor, gate: Tensor) -> Tensor:
        """The normed `output` [n, heads, value_dim] times a function of `gate`, [n, heads * value_dim]."""
        normed = self._norm(output).flatten(1)
        return (normed.float() * self._gate(gate.float())).to(output.dtype)


def unit_length(x: Tensor) -> Tensor:
    """Queries or keys `x` [..., width], scaled."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + UNIT_EPS)


def delta_step(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, decay: Tensor, states: Tensor
) -> Tensor:
    """Output [b, heads, value_dim] of one token after each of `states` [b, heads, key_dim, value_dim], which
    advance.

    `query` and `key` are [b, heads, key_dim], `value` [b, heads, value_dim], `strength` (beta) [b, heads];
    `decay` (g, a logarithm) [b, heads, key_dim], or [b, heads, 1] of all channels; all float32.
    """
    states.mul_(decay.exp()[..., None])
    predicted = (key[:, :, None] @ states)[:, :, 0]
    update = (value - predicted).mul_(strength[..., None])
    states.addcmul_(key[..., None], update[:, :, None])
    return (query[:, :, None] @ states)[:, :, 0]


def delta_chunk(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, decay: Tensor, state: Tensor
) -> Tensor:
    """Output [n, heads, value_dim] of n tokens after `state` [heads, key_dim, value_dim], which advances.

    `query` and `key` are [n, heads, key_dim], `value` [n, heads, value_dim], `strength` (beta) and `decay`
    (g, a logarithm) [n, heads]; all float32. With G the sum of decays up to a token, the values that tokens
    add to the state solve (1 + tril(beta K K^T exp(G_i - G_j), -1)) U = beta (V - exp(G) K S).
    """
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    beta, total = strength.t()[..., None], decay.t().cumsum(dim=1)
    between = (total[:, :, None] - total[:, None]).tril_()
    between = between.exp().tril()
    weakened = total.exp()[..., None]
    system = (beta * key) @ key.transpose(1, 2) * between
    wanted = beta * (value - weakened * (key @ state))
    added: Tensor = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    output: Tensor = weakened * (query @ state) + (query @ key.transpose(1, 2) * between) @ added
    left = (total[:, -1:] - total).exp()[..., None]
    state.mul_(weakened[:, -1:]).add_((left * key).transpose(1, 2) @ added)
    return output.transpose(0, 1)
