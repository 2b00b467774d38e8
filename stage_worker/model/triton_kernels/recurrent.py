"""Recurrent mixers between their projections, in three launches: convolution, state, and gated norm."""

from __future__ import annotations

from torch import Tensor

from checkpoint import GatedDelta, KimiDelta, Mamba2
from checkpoint.recurrent import GateNorm
from stage_worker.model.layer_weights import DeltaWeights, KimiDeltaWeights, MambaWeights
from stage_worker.model.operations import GateProjection
from stage_worker.model.recurrence import decay_rates
from stage_worker.model.step_layout import LayerStates
from stage_worker.model.triton_kernels.convolution import convolved
from stage_worker.model.triton_kernels.delta_rule import DeltaGates, delta_rule
from stage_worker.model.triton_kernels.gated_norms import GatedNorm, gated_norm
from stage_worker.model.triton_kernels.state_scan import ScanGates, state_scan


class _DeltaLaunches:
    """What Gated DeltaNet and Kimi Delta Attention share."""

    def __init__(
        self,
        mixer: GatedDelta | KimiDelta,
        weights: DeltaWeights | KimiDeltaWeights,
        *,
        has_rates: bool,
        has_sigmoid: bool,
        rounds: bool,
    ) -> None:
        self._mixer = mixer
        self._conv, self._dt_bias = weights.conv, weights.dt_bias
        self._rates = decay_rates(weights.decay, has_rates=has_rates)
        self._norm = GatedNorm(
            weight=weights.norm,
            width=mixer.value_dim,
            eps=mixer.norm_eps,
            order=GateNorm.BEFORE,
            rounds=rounds,
            has_sigmoid=has_sigmoid,
        )

    def __call__(
        self, fresh: Tensor, strength: Tensor, decay: Tensor, gate: Tensor, memory: LayerStates
    ) -> Tensor:
        """Gated output [n, o_size] of `fresh` [n, conv_size]; see `DeltaGates`."""
        rows = memory.rows
        heads = convolved(fresh, self._conv, None, memory.conv, rows)
        gates = DeltaGates(strength=strength, decay=decay, rates=self._rates, bias=self._dt_bias)
        output = delta_rule(heads, gates, memory.recurrent, rows, self._mixer)
        return gated_norm(output, gate, self._norm, rows)


class FusedDelta:
    """A `StateFunction`, see `GatedDelta`."""

    def __init__(self, mixer: GatedDelta, weights: DeltaWeights) -> None:
        self._sizes = (mixer.conv_size, mixer.o_size, mixer.num_heads, mixer.num_heads)
        has_rates, has_sigmoid = mixer.layout.has_rates, mixer.has_sigmoid_gate
        self._mix = _DeltaLaunches(mixer, weights, has_rates=has_rates, has_sigmoid=has_sigmoid, rounds=True)

    def __call__(self, projected: Tensor, memory: LayerStates) -> Tensor:
        fresh, gate, strength, decay = projected.split_with_sizes(self._sizes, dim=1)
        return self._mix(fresh, strength, decay, gate, memory)


class FusedChannelDelta:
    """A `StateFunction`, see `KimiDelta`; `expand` has launches of its own."""

    def __init__(self, mixer: KimiDelta, weights: KimiDeltaWeights, expand: GateProjection) -> None:
        self._sizes = (mixer.conv_size, mixer.num_heads, 2 * mixer.rank)
        self._expand = expand
        has_rates = mixer.has_rates
        self._mix = _DeltaLaunches(mixer, weights, has_rates=has_rates, has_sigmoid=True, rounds=False)

    def __call__(self, projected: Tensor, memory: LayerStates) -> Tensor:
        fresh, strength, latents = projected.split_with_sizes(self._sizes, dim=1)
        decay, gate = self._expand(latents)
        return self._mix(fresh, strength, decay, gate, memory)


class FusedScan:
    """A `StateFunction`, see `Mamba2`."""

    def __init__(self, mixer: Mamba2, weights: MambaWeights) -> None:
        self._mixer = mixer
        self._conv, self._conv_bias = weights.conv, weights.conv_bias
        self._rates = decay_rates(weights.decay, has_rates=mixer.has_rates)
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
