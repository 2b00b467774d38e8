"""Recurrent mixers between their projections, in three launches: convolution, state, and gated norm."""

from __future__ import annotations

from torch import Tensor

from checkpoint import GatedDelta, Mamba2
from checkpoint.recurrent import GateNorm
from stage_worker.model.layer_weights import DeltaWeights, MambaWeights
from stage_worker.model.step_layout import LayerStates
from stage_worker.model.triton_kernels.convolution import convolved
from stage_worker.model.triton_kernels.delta_rule import DeltaGates, delta_rule
from stage_worker.model.triton_kernels.gated_norms import GatedNorm, gated_norm
from stage_worker.model.triton_kernels.state_scan import ScanGates, state_scan


class FusedDelta:
    """A `StateFunction`, see `GatedDelta`."""

    def __init__(self, mixer: GatedDelta, weights: DeltaWeights) -> None:
        self._mixer = mixer
        self._conv = weights.conv
        self._rates = weights.decay if mixer.layout.has_rates else -weights.decay.exp()
        self._dt_bias = weights.dt_bias
        self._norm = GatedNorm(
            weight=weights.norm,
            width=mixer.value_dim,
            eps=mixer.norm_eps,
            order=GateNorm.BEFORE,
            rounds=True,
        )

    def __call__(self, projected: Tensor, memory: LayerStates) -> Tensor:
        mixer, rows = self._mixer, memory.rows
        mixed, gate, strength, decay = projected.split_with_sizes(
            (mixer.conv_size, mixer.o_size, mixer.num_heads, mixer.num_heads), dim=1
        )
        heads = convolved(mixed, self._conv, None, memory.conv, rows)
        gates = DeltaGates(strength=strength, decay=decay, rates=self._rates, bias=self._dt_bias)
        output = delta_rule(heads, gates, memory.recurrent, rows, mixer)
        return gated_norm(output, gate, self._norm, rows)


class FusedScan:
    """A `StateFunction`, see `Mamba2`."""

    def __init__(self, mixer: Mamba2, weights: MambaWeights) -> None:
        self._mixer = mixer
        self._conv, self._conv_bias = weights.conv, weights.conv_bias
        self._rates = weights.decay if mixer.has_rates else -weights.decay.exp()
        self._dt_bias, self._skip = weights.dt_bias, weights.skip
        self._norm = GatedNorm(
            weight=weights.norm,
            width=mixer.group_width,
            eps=mixer.norm_eps,
            order=mixer.gate_norm,
            rounds=False,
        )

    def __call__(self, projected: Tensor, memory: LayerStates) -> Tensor:
        mixer, rows = self._mixer, memory.rows
        gate, mixed, step = projected.split_with_sizes(
            (mixer.o_size, mixer.conv_size, mixer.num_heads), dim=1
        )
        parts = convolved(mixed, self._conv, self._conv_bias, memory.conv, rows)
        gates = ScanGates(step=step, rates=self._rates, bias=self._dt_bias, skip=self._skip)
        output = state_scan(parts, gates, memory.recurrent, rows, mixer)
        return gated_norm(output, gate, self._norm, rows)
