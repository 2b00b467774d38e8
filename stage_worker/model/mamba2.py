"""Mamba2: a state space model whose memory of a sequence is one state, see `checkpoint.Mamba2`.

Within a part of a longer slice, tokens act on each other by a triangular matrix of each head, and the state
enters and leaves by one product of each group (state space duality). A prompt token by token would take eight
times as long (128 heads of 64, a state of 128: 1.1 ms a token and layer on one core, 0.14 ms in parts of 64,
and no less in parts of 16 to 256).

Both compute the same sums in another order. Everything from the inputs after the convolution to the normed
output is float32, as is the state; the normed output is rounded once. transformers rounds time steps to
bfloat16, too, and raises those of Nemotron-H's prompts to time_step_min, but not those of its decodes; here
no time step has a limit. Where slices begin decides on the order of the sums: a sequence that is recomputed
in other slices differs by rounding (with wide random weights, logits by up to 1e-4 of their spread in
float32).

Source: Dao and Gu 2024, arXiv:2405.21060, section 6; transformers' mamba2_chunk_scan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from checkpoint import Mamba2
from checkpoint.recurrent import GateNorm
from stage_worker.model.causal_convolution import CausalConvolution
from stage_worker.model.kernels import Kernels
from stage_worker.model.layer_weights import MambaWeights
from stage_worker.model.norms import unit_norm
from stage_worker.model.operations import Operations
from stage_worker.model.projections import project, with_rows
from stage_worker.model.recurrence import RecurrentMixer, advance, decay_rates
from stage_worker.model.step_layout import LayerStates


def state_space_model(
    mixer: Mamba2, weights: MambaWeights, operations: Operations, kernels: Kernels
) -> RecurrentMixer:
    """See `Mamba2`. Packed weights replace the given ones."""
    fused = operations.scan_function(mixer, weights)
    projection = project(weights.input, weights.input_bias, kernels.layer_products)
    return RecurrentMixer(projection, fused or SeparateScan(mixer, weights))


class SeparateScan:
    """A `StateFunction` by torch's operators."""

    def __init__(self, mixer: Mamba2, weights: MambaWeights) -> None:
        self._mixer = mixer
        self._convolution = CausalConvolution(weights.conv, weights.conv_bias)
        self._rates = decay_rates(weights.decay, has_rates=mixer.has_rates)
        self._dt_bias = weights.dt_bias
        self._skip = weights.skip.repeat_interleave(mixer.head_dim)
        self._unit_norm = unit_norm(mixer.norm_eps)
        self._norm_weight = None if weights.norm is None else weights.norm.float()

    def __call__(self, projected: Tensor, memory: LayerStates) -> Tensor:
        mixer, num_tokens = self._mixer, memory.step.num_tokens
        gate, mixed, dt = projected[:num_tokens].split_with_sizes(
            (mixer.o_size, mixer.conv_size, mixer.num_heads), dim=1
        )
        time_step = softplus(dt.float() + self._dt_bias)
        output = torch.empty(num_tokens, mixer.o_size, device=projected.device)
        advance(self, self._convolution, mixed, (time_step,), memory, output)
        return with_rows(self._gated(output, gate).to(projected.dtype), len(projected))

    def of_singles(self, convolved: Tensor, gates: Sequence[Tensor], states: Tensor) -> Tensor:
        """See `Recurrence`; the gate is time steps [b, heads]."""
        (steps,), (x, b, c) = gates, self._parts(convolved)
        states *= self._by_group((steps * self._rates).exp())[:, :, None]
        states.addcmul_(b[..., None], (x * self._by_group(steps))[:, :, None])
        return (c[:, :, None] @ states).flatten(1).addcmul_(x.flatten(1), self._skip)

    def of_chunk(self, convolved: Tensor, gates: Sequence[Tensor], state: Tensor) -> Tensor:
        """See `Recurrence`."""
        (steps,), (x, b, c) = gates, self._parts(convolved)
        found = scan_chunk(x * self._by_group(steps), b, c, steps * self._rates, state)
        return found.flatten(1).addcmul_(x.flatten(1), self._skip)

    def _parts(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs [n, groups, group_width], B and C [n, groups, state_size]."""
        mixer = self._mixer
        sizes = (mixer.o_size, mixer.q_size, mixer.q_size)
        x, b, c = (
            torch.unflatten(part, 1, (mixer.num_head_groups, -1))
            for part in convolved.split_with_sizes(sizes, dim=1)
        )
        return x, b, c

    def _by_group(self, of_heads: Tensor) -> Tensor:
        """A number of each head [n, heads] for each of its elements, [n, groups, group_width]."""
        mixer = self._mixer
        of_elements = of_heads.repeat_interleave(mixer.head_dim, dim=1)
        return of_elements.view(-1, mixer.num_head_groups, mixer.group_width)

    def _gated(self, output: Tensor, gate: Tensor) -> Tensor:
        """`output` times SiLU of `gate`, both [n, heads * head_dim], normed by group, see `GateNorm`."""
        gates = silu(gate.float())
        if self._mixer.gate_norm is GateNorm.BEFORE:
            return self._normed(output).mul_(gates)
        return self._normed(output * gates)

    def _normed(self, output: Tensor) -> Tensor:
        if self._norm_weight is None:
            return output
        groups = output.view(-1, self._mixer.num_head_groups, self._mixer.group_width)
        return self._unit_norm(groups).flatten(1).mul_(self._norm_weight)


def scan_chunk(x: Tensor, b: Tensor, c: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """Output [n, groups, group_width] of n tokens after `state` [groups, state_size, group_width].

    The state advances. `x` is [n, groups, group_width], times its time steps; `b` and `c` are
    [n, groups, state_size]; `decay` (a logarithm) is [n, heads]; all float32. With L the sum of decays up to
    a token, token i gets exp(L_i) C_i S, and exp(L_i - L_j) (C_i B_j) x_j of each token j up to i.
    """
    num_groups = x.shape[1]
    x, b, c = (part.transpose(0, 1) for part in (x, b, c))
    total = decay.t().cumsum(dim=1)
    by_head = total.view(num_groups, -1, len(decay))  # [groups, heads of a group, n]
    between = (by_head[..., :, None] - by_head[..., None, :]).tril_().exp_().tril_()
    between *= (c @ b.transpose(1, 2))[:, None]
    heads = torch.unflatten(x, 2, (by_head.shape[1], -1)).transpose(1, 2)  # and head_dim
    weakened = by_head.exp()[..., None]
    width = heads.shape[-1]
    of_state = torch.unflatten(c @ state, 2, (-1, width)).transpose(1, 2)
    output = (between @ heads).addcmul_(weakened, of_state)
    left = (by_head[..., -1:] - by_head).exp()[..., None]
    kept = (left * heads).transpose(1, 2).flatten(2)
    state.mul_(weakened[:, :, -1].repeat_interleave(width, dim=1).transpose(1, 2))
    state += b.transpose(1, 2) @ kept
    return output.permute(2, 0, 1, 3).flatten(2)
