"""Mamba2: a state space model whose memory of a sequence is one state, see `checkpoint.Mamba2`.

* One-token slices are computed together: each reads and writes its whole state.
* Longer slices are computed one after the other, in parts of `CHUNK_TOKENS`: within a part, tokens act on
  each other by a triangular matrix of each head, and the state enters and leaves by one product of each
  group (state space duality).

A prompt token by token would take eight times as long (128 heads of 64, a state of 128: 1.1 ms a token and
layer on one core, 0.14 ms in parts of 64, and no less in parts of 16 to 256).

Both compute the same sums in another order. Everything from the inputs after the convolution to the normed
output is float32, as is the state; the normed output is rounded once. transformers rounds time steps to
bfloat16, too, and raises those of Nemotron-H's prompts to time_step_min, but not those of its decodes; here
no time step has a limit. Where slices begin decides on the order of the sums: a sequence that is recomputed
in other slices differs by rounding (with wide random weights, logits by up to 1e-4 of their spread in
float32).

Source: Dao and Gu 2024, arXiv:2405.21060, section 6; transformers' mamba2_chunk_scan.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from checkpoint import Mamba2
from checkpoint.recurrent import GateNorm
from checkpoint.step_sizes import CHUNK_TOKENS
from stage_worker.model.causal_convolution import CausalConvolution
from stage_worker.model.kernels import Kernels
from stage_worker.model.layer_weights import MambaWeights
from stage_worker.model.norms import unit_norm
from stage_worker.model.operations import Operations, StateFunction
from stage_worker.model.projections import project
from stage_worker.model.step_layout import LayerMemory, LayerStates


class StateSpaceModel:
    """See `Mamba2`."""

    def __init__(
        self, mixer: Mamba2, weights: MambaWeights, operations: Operations, kernels: Kernels
    ) -> None:
        """Packed weights replace the given ones."""
        self._input = project(weights.input, weights.input_bias, kernels.layer_products)
        fused = operations.scan_function(mixer, weights)
        self._mix: StateFunction = fused or SeparateScan(mixer, weights)

    def __call__(self, normed: Tensor, memory: LayerMemory) -> Tensor:
        """Gated output [m, heads * head_dim] of `normed` [m, hidden_size], with zeros after the step's
        tokens.
        """
        assert isinstance(memory, LayerStates), "memory of another kind"
        return self._mix(self._input(normed), memory)


class SeparateScan:
    """A `StateFunction` by torch's operators."""

    def __init__(self, mixer: Mamba2, weights: MambaWeights) -> None:
        self._mixer = mixer
        self._convolution = CausalConvolution(weights.conv, weights.conv_bias)
        self._decay = weights.decay if mixer.has_rates else -weights.decay.exp()
        self._dt_bias = weights.dt_bias
        self._skip = weights.skip.repeat_interleave(mixer.head_dim)
        self._unit_norm = unit_norm(mixer.norm_eps)
        self._norm_weight = None if weights.norm is None else weights.norm.float()

    def __call__(self, projected: Tensor, memory: LayerStates) -> Tensor:
        mixer, rows = self._mixer, memory.rows
        num_tokens = memory.step.num_tokens
        gate, mixed, dt = projected[:num_tokens].split_with_sizes(
            (mixer.o_size, mixer.conv_size, mixer.num_heads), dim=1
        )
        time_step = softplus(dt.float() + self._dt_bias)
        output = torch.empty(num_tokens, mixer.o_size, device=projected.device)
        if rows.singles is not None:
            self._decode(mixed, time_step, output, memory)
        for begin, end, slot in rows.longer:
            part = slice(begin, end)
            convolved = self._convolution.of_chunk(mixed[part], memory.conv[slot]).float()
            steps, state = time_step[part], memory.recurrent[slot]
            for first in range(0, end - begin, CHUNK_TOKENS):
                at = slice(first, first + CHUNK_TOKENS)
                output[part][at] = self._scanned(convolved[at], steps[at], state)
        gated = self._gated(output, gate).to(projected.dtype)
        missing = len(projected) - num_tokens
        return pad(gated, (0, 0, 0, missing)) if missing else gated

    def _decode(self, mixed: Tensor, time_step: Tensor, output: Tensor, memory: LayerStates) -> None:
        """Fill the rows of one-token slices in `output`."""
        rows, slots = memory.rows.singles, memory.rows.single_slots
        assert rows is not None and slots is not None
        fresh, steps = mixed.index_select(0, rows), time_step.index_select(0, rows)
        x, b, c = self._parts(self._convolution.of_singles(fresh, memory.conv, slots).float())
        state = memory.recurrent.index_select(0, slots)
        state *= self._by_group((steps * self._decay).exp())[:, :, None]
        state.addcmul_(b[..., None], (x * self._by_group(steps))[:, :, None])
        memory.recurrent.index_copy_(0, slots, state)
        found = (c[:, :, None] @ state).flatten(1)
        output.index_copy_(0, rows, found.addcmul_(x.flatten(1), self._skip))

    def _scanned(self, convolved: Tensor, time_step: Tensor, state: Tensor) -> Tensor:
        """Output [n, heads * head_dim] of one chunk after `state`, which advances."""
        x, b, c = self._parts(convolved)
        weighted = x * self._by_group(time_step)
        found = scan_chunk(weighted, b, c, time_step * self._decay, state)
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
