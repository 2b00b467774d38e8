"""Gated DeltaNet: linear attention whose memory of a sequence is one state, see `checkpoint.GatedDelta`.

* One-token slices are computed together, token by token: each reads and writes its whole state.
* Longer slices are computed one after the other, in parts of `CHUNK_TOKENS`: within a part, the updates are
  one triangular system (the UT transform), so the work is matrix products.

Both compute the same sums in another order. Everything from the unit queries and keys to the output before
its norm is float32, as is the state. Where slices begin decides on the order of the sums: a sequence that is
recomputed in other slices differs by rounding, which adds up over the tokens of a state (with wide random
weights, logits by up to 1.5e-4 of their spread in float32).

Source: Yang et al. 2024, arXiv:2412.06464, section 3; transformers' torch_chunk_gated_delta_rule.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from checkpoint import GatedDelta, Norm
from checkpoint.step_sizes import CHUNK_TOKENS
from stage_worker.model.causal_convolution import CausalConvolution
from stage_worker.model.kernels import Kernels
from stage_worker.model.layer_weights import DeltaWeights
from stage_worker.model.norms import NormWeights, row_norm
from stage_worker.model.operations import Operations, StateFunction
from stage_worker.model.projections import project
from stage_worker.model.step_layout import LayerMemory, LayerStates

_UNIT_EPS = 1e-6
"""Added to the squared length of queries and keys."""


class GatedDeltaNet:
    """See `GatedDelta`."""

    def __init__(
        self, mixer: GatedDelta, weights: DeltaWeights, operations: Operations, kernels: Kernels
    ) -> None:
        """Packed weights replace the given ones."""
        self._input = project(weights.input, None, kernels.layer_products)
        fused = operations.delta_function(mixer, weights)
        self._mix: StateFunction = fused or SeparateDelta(mixer, weights)

    def __call__(self, normed: Tensor, memory: LayerMemory) -> Tensor:
        """Gated output [m, heads * value_dim] of `normed` [m, hidden_size], with zeros after the step's
        tokens.
        """
        assert isinstance(memory, LayerStates), "memory of another kind"
        return self._mix(self._input(normed), memory)


class SeparateDelta:
    """A `StateFunction` by torch's operators."""

    def __init__(self, mixer: GatedDelta, weights: DeltaWeights) -> None:
        self._mixer = mixer
        self._is_tiled = mixer.layout.is_tiled
        self._convolution = CausalConvolution(weights.conv)
        self._decay = weights.decay if mixer.layout.has_rates else -weights.decay.exp()
        self._dt_bias = weights.dt_bias
        self._norm = row_norm(Norm(eps=mixer.norm_eps), NormWeights(weights.norm, None))
        self._gate = torch.sigmoid if mixer.has_sigmoid_gate else silu

    def __call__(self, projected: Tensor, memory: LayerStates) -> Tensor:
        mixer, rows = self._mixer, memory.rows
        num_tokens = memory.step.num_tokens
        mixed, gate, beta, a = projected[:num_tokens].split_with_sizes(
            (mixer.conv_size, mixer.o_size, mixer.num_heads, mixer.num_heads), dim=1
        )
        strength = beta.sigmoid().float()
        decay = self._decay * softplus(a.float() + self._dt_bias)
        output = torch.empty(num_tokens, mixer.num_heads, mixer.value_dim, device=projected.device)
        if rows.singles is not None:
            self._decode(mixed, strength, decay, output, memory)
        for begin, end, slot in rows.longer:
            part = slice(begin, end)
            query, key, value = self._heads(self._convolution.of_chunk(mixed[part], memory.conv[slot]))
            state = memory.recurrent[slot]
            for first in range(0, end - begin, CHUNK_TOKENS):
                at = slice(first, first + CHUNK_TOKENS)
                output[part][at] = delta_chunk(
                    query[at], key[at], value[at], strength[part][at], decay[part][at], state
                )
        gated = self._gated(output.to(projected.dtype), gate)
        missing = len(projected) - num_tokens
        return pad(gated, (0, 0, 0, missing)) if missing else gated

    def _decode(
        self, mixed: Tensor, strength: Tensor, decay: Tensor, output: Tensor, memory: LayerStates
    ) -> None:
        """Fill the rows of one-token slices in `output`."""
        rows, slots = memory.rows.singles, memory.rows.single_slots
        assert rows is not None and slots is not None
        fresh, strength, decay = (x.index_select(0, rows) for x in (mixed, strength, decay))
        query, key, value = self._heads(self._convolution.of_singles(fresh, memory.conv, slots))
        state = memory.recurrent.index_select(0, slots).mul_(decay.exp()[..., None, None])
        predicted = (key[:, :, None] @ state)[:, :, 0]
        update = (value - predicted) * strength[..., None]
        state += key[..., None] * update[:, :, None]
        output.index_copy_(0, rows, (query[:, :, None] @ state)[:, :, 0])
        memory.recurrent.index_copy_(0, slots, state)

    def _heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [n, heads, key_dim] and values [n, heads, value_dim] in float32."""
        mixer = self._mixer
        query, key, value = convolved.float().split_with_sizes(
            (mixer.q_size, mixer.q_size, mixer.o_size), dim=1
        )
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
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _UNIT_EPS)


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
