"""Kimi Delta Attention: the gated delta rule with a decay per channel, see `checkpoint.KimiDelta`.

Slices are computed as in `stage_worker.model.gated_delta`, and rounded alike: decays, strengths, and all from
the unit queries and keys to the normed and gated output are float32.

Decays between two tokens differ by channel, so that they are no factors of a product of keys and queries, but
of their elements: exp(G_i - G_j), of which neither exp(G_i) nor exp(-G_j) alone need be finite. So a chunk is
halved again and again. Each pair of a token in a later half and one in the half before has a factor on either
side of the boundary, and neither is above 1; sums of decays are those within the halves, so that a small
difference of large sums loses no bits. (32 heads of 128 on one core: a third of the time that a prompt
takes token by token, and half of that with the decays of all pairs in blocks of 8 or 16.)

Source: Kimi Team 2025, arXiv:2510.26692, section 3; flash-linear-attention's chunk_kda.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from checkpoint import KimiDelta
from stage_worker.model.causal_convolution import CausalConvolution
from stage_worker.model.gated_delta import delta_step, unit_length
from stage_worker.model.kernels import Kernels
from stage_worker.model.layer_weights import KimiDeltaWeights
from stage_worker.model.norms import unit_norm
from stage_worker.model.operations import GateProjection, Operations
from stage_worker.model.projections import project, with_rows
from stage_worker.model.recurrence import RecurrentMixer, advance, decay_rates
from stage_worker.model.step_layout import LayerStates


def kimi_delta_attention(
    mixer: KimiDelta, weights: KimiDeltaWeights, operations: Operations, kernels: Kernels
) -> RecurrentMixer:
    """See `KimiDelta`. Packed weights replace the given ones."""
    expand = _gate_projection(weights, kernels)
    fused = operations.channel_delta_function(mixer, weights, expand)
    projection = project(weights.input, None, kernels.layer_products)
    return RecurrentMixer(projection, fused or SeparateChannelDelta(mixer, weights, expand))


def _gate_projection(weights: KimiDeltaWeights, kernels: Kernels) -> GateProjection:
    """On GPUs one launch, of plain weights."""
    decay, gate = weights.decay_up, weights.gate_up
    if kernels.are_triton and isinstance(decay, Tensor) and isinstance(gate, Tensor):
        return BatchedGates(decay, gate)
    return SeparateGates(weights, kernels)


class BatchedGates:
    """A `GateProjection` by one batched product, with copies of both weights [heads * head_dim, rank]."""

    def __init__(self, decay: Tensor, gate: Tensor) -> None:
        self._weights = torch.stack((decay, gate)).transpose(1, 2)

    def __call__(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        both = latents.view(len(latents), 2, -1).transpose(0, 1)
        of_decays, of_gates = torch.bmm(both, self._weights)
        return of_decays, of_gates


class SeparateGates:
    """A `GateProjection` by two products. Packed weights replace the given ones."""

    def __init__(self, weights: KimiDeltaWeights, kernels: Kernels) -> None:
        self._decay, self._gate = (
            project(weight, None, kernels.layer_products) for weight in (weights.decay_up, weights.gate_up)
        )

    def __call__(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        of_decays, of_gates = latents.chunk(2, dim=1)
        return self._decay(of_decays.contiguous()), self._gate(of_gates.contiguous())


class SeparateChannelDelta:
    """A `StateFunction` by torch's operators."""

    def __init__(self, mixer: KimiDelta, weights: KimiDeltaWeights, expand: GateProjection) -> None:
        self._mixer, self._expand = mixer, expand
        self._convolution = CausalConvolution(weights.conv)
        self._rates = decay_rates(weights.decay, has_rates=mixer.has_rates).view(mixer.num_heads, 1)
        self._dt_bias = weights.dt_bias
        self._unit_norm = unit_norm(mixer.norm_eps)
        self._norm_weight = weights.norm.float()

    def __call__(self, projected: Tensor, memory: LayerStates) -> Tensor:
        mixer, num_tokens = self._mixer, memory.step.num_tokens
        mixed, beta, latents = projected.split_with_sizes(
            (mixer.conv_size, mixer.num_heads, 2 * mixer.rank), dim=1
        )
        decay, gate = (x[:num_tokens] for x in self._expand(latents))
        gates = beta[:num_tokens].sigmoid().float(), self._decays(decay)
        output = torch.empty(num_tokens, mixer.num_heads, mixer.head_dim, device=projected.device)
        advance(self, self._convolution, mixed, gates, memory, output)
        return with_rows(self._gated(output, gate).to(projected.dtype), len(projected))

    def of_singles(self, convolved: Tensor, gates: Sequence[Tensor], states: Tensor) -> Tensor:
        """See `Recurrence`; `gates` are strengths [b, heads] and decays [b, heads, head_dim]."""
        strength, decay = gates
        return delta_step(*self._heads(convolved), strength, decay, states)

    def of_chunk(self, convolved: Tensor, gates: Sequence[Tensor], state: Tensor) -> Tensor:
        """See `Recurrence`."""
        strength, decay = gates
        return channel_delta_chunk(*self._heads(convolved), strength, decay, state)

    def _decays(self, projected: Tensor) -> Tensor:
        """Logarithms [n, heads, head_dim] of decays."""
        heads = softplus(projected.float() + self._dt_bias)
        return torch.unflatten(heads, 1, (self._mixer.num_heads, -1)).mul_(self._rates)

    def _heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [n, heads, head_dim]."""
        query, key, value = convolved.view(len(convolved), 3, self._mixer.num_heads, -1).unbind(1)
        return unit_length(query) * self._mixer.head_dim**-0.5, unit_length(key), value

    def _gated(self, output: Tensor, gate: Tensor) -> Tensor:
        """The normed `output` [n, heads, head_dim] times the sigmoid of `gate`, [n, heads * head_dim]."""
        return (self._unit_norm(output) * self._norm_weight).flatten(1).mul_(gate.float().sigmoid())


def channel_delta_chunk(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, decay: Tensor, state: Tensor
) -> Tensor:
    """Output [n, heads, value_dim] of n tokens after `state` [heads, key_dim, value_dim], which advances.

    `query`, `key` and `decay` (g, a logarithm) are [n, heads, key_dim], `value` is [n, heads, value_dim],
    `strength` (beta) [n, heads]; all float32. As `gated_delta.delta_chunk`, with G the sum of decays up to a
    token: the values that tokens add to the state solve
    (1 + tril(beta sum_c K_ic K_jc exp(G_ic - G_jc), -1)) U = beta (V - (exp(G) * K) S).
    """
    query, key, value, decay = (x.transpose(0, 1) for x in (query, key, value, decay))
    beta, weakened = strength.t()[..., None], decay.cumsum(dim=1).exp_()
    of_keys, of_queries = _decayed_products(torch.stack((key, query)), key, decay)
    wanted = beta * (value - (weakened * key) @ state)
    added: Tensor = torch.linalg.solve_triangular(beta * of_keys, wanted, upper=False, unitriangular=True)
    output: Tensor = (weakened * query) @ state + of_queries @ added
    later = decay.flip(1).cumsum(dim=1).flip(1).sub_(decay)
    state.mul_(weakened[:, -1, :, None]).add_((later.exp_() * key).transpose(1, 2) @ added)
    return output.transpose(0, 1)


def _decayed_products(rows: Tensor, key: Tensor, decay: Tensor) -> Tensor:
    """sum_c R_ic K_jc exp(G_ic - G_jc) for j up to i, else 0: [k, heads, n, n].

    `rows` (R) are [k, heads, n, key_dim], `key` (K) and `decay`, of which G is the sum, [heads, n, key_dim].
    """
    num_tokens = key.shape[1]
    size = 1 << (num_tokens - 1).bit_length()
    missing = (0, 0, 0, size - num_tokens)
    rows, key = pad(rows, missing), pad(key, missing)
    sums = pad(decay, missing).clone(memory_format=torch.contiguous_format)
    products = rows.new_zeros(*rows.shape[:2], size, size)
    products.diagonal(dim1=2, dim2=3).copy_((rows * key).sum(dim=-1))
    half = 1
    while half < size:  # `sums` are those of decays since the beginning of each half
        blocks = (size // (2 * half), 2, half)
        earlier, later = torch.unflatten(sums, 1, blocks).unbind(2)
        whole = earlier[:, :, -1:]
        keys = (whole - earlier).exp_().mul_(torch.unflatten(key, 1, blocks)[:, :, 0])
        found = torch.unflatten(rows, 2, blocks)[:, :, :, 1] * later.exp()
        places = torch.unflatten(torch.unflatten(products, 3, blocks), 2, blocks)[:, :, :, 1, :, :, 0]
        of_blocks = places.diagonal(dim1=2, dim2=4)  # [k, heads, half, half, blocks]
        of_blocks.copy_((found @ keys.transpose(2, 3)).permute(0, 1, 3, 4, 2))
        later += whole
        half *= 2
    return products[:, :, :num_tokens, :num_tokens]
