"""What mixers with a state share: projections around them, and by torch's operators, the loop over a step.

* One-token slices are computed together: each reads and writes its whole state.
* Longer slices are computed one after the other, in parts of `CHUNK_TOKENS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from checkpoint.step_sizes import CHUNK_TOKENS
from stage_worker.model.causal_convolution import CausalConvolution
from stage_worker.model.operations import StateFunction
from stage_worker.model.projections import Projection
from stage_worker.model.step_layout import LayerMemory, LayerStates


class RecurrentMixer:
    """A mixer with a state: the projection of its input, and what is computed of that."""

    def __init__(self, projection: Projection, mix: StateFunction) -> None:
        self._input, self._mix = projection, mix

    def __call__(self, normed: Tensor, memory: LayerMemory) -> Tensor:
        """Gated output [m, o_size] of `normed` [m, hidden_size], with zeros after the step's tokens."""
        assert isinstance(memory, LayerStates), "memory of another kind"
        return self._mix(self._input(normed), memory)


class Recurrence(Protocol):
    """How tokens and states act on each other, all in float32; `gates` have a row of each token."""

    def of_singles(self, convolved: Tensor, gates: Sequence[Tensor], states: Tensor) -> Tensor:
        """Output [b, ...] of `convolved` [b, channels], one token of each of `states` [b, ...], which
        advance.
        """

    def of_chunk(self, convolved: Tensor, gates: Sequence[Tensor], state: Tensor) -> Tensor:
        """Output [n, ...] of `convolved` [n, channels], tokens of one sequence after its `state`, which
        advances.
        """


def advance(
    recurrence: Recurrence,
    convolution: CausalConvolution,
    fresh: Tensor,
    gates: Sequence[Tensor],
    memory: LayerStates,
    output: Tensor,
) -> None:
    """Fill `output` [n, ...] float32, by the `convolution` of `fresh` [m, channels] and by `gates` [n, ...];
    states of `memory` advance.
    """
    rows, states = memory.rows, memory.recurrent
    if rows.singles is not None:
        assert rows.single_slots is not None, "one-token slices without slots"
        own, *own_gates = (x.index_select(0, rows.singles) for x in (fresh, *gates))
        convolved = convolution.of_singles(own, memory.conv, rows.single_slots).float()
        advanced = states.index_select(0, rows.single_slots)
        output.index_copy_(0, rows.singles, recurrence.of_singles(convolved, own_gates, advanced))
        states.index_copy_(0, rows.single_slots, advanced)
    for begin, end, slot in rows.longer:
        convolved = convolution.of_chunk(fresh[begin:end], memory.conv[slot])
        for first in range(begin, end, CHUNK_TOKENS):
            chunk = slice(first, min(first + CHUNK_TOKENS, end))
            inputs = convolved[first - begin : chunk.stop - begin].float()
            own_gates = [x[chunk] for x in gates]
            output[chunk] = recurrence.of_chunk(inputs, own_gates, states[slot])


def decay_rates(decay: Tensor, *, has_rates: bool) -> Tensor:
    """Rates of decays, -exp(A_log): `decay` are these, if files have rates, or else A_log."""
    return decay if has_rates else -decay.exp()
