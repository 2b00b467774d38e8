"""Every pair of states: what the design allows is legal, everything else raises."""

from __future__ import annotations

from itertools import product

import pytest

from coordinator.scheduling.lifecycle import IllegalTransition, SequenceState, check_transition
from wire.ids import RequestId, SequenceKey

KEY = SequenceKey(RequestId(bytes(range(16))), 2)

W, P, D, R = SequenceState.WAITING, SequenceState.PREFILL, SequenceState.DECODE, SequenceState.PREEMPTED
F, C, X = SequenceState.FINISHED, SequenceState.CANCELLED, SequenceState.FAILED

LEGAL = {
    *((W, P), (P, D), (D, F)),
    (P, F),  # scoring, or max_tokens reached by the first token
    *((P, R), (D, R), (R, P)),
    (R, F),  # it made way for a suspect with the token whose text ends it
    *((W, C), (P, C), (D, C), (R, C)),
    *((W, X), (P, X), (D, X), (R, X)),
}


def test_the_design_names_all_states() -> None:
    assert set(SequenceState) == {W, P, D, R, F, C, X}


@pytest.mark.parametrize(("current", "wanted"), sorted(product(SequenceState, repeat=2), key=str))
def test_exactly_the_transitions_of_the_design_are_legal(
    current: SequenceState, wanted: SequenceState
) -> None:
    if (current, wanted) in LEGAL:
        check_transition(KEY, current, wanted)
        return
    with pytest.raises(IllegalTransition) as caught:
        check_transition(KEY, current, wanted)
    error = caught.value
    assert (error.sequence, error.current, error.wanted) == (KEY, current, wanted)
    assert str(error) == f"sequence {KEY} cannot go from {current.name} to {wanted.name}"
    assert "00010203-0405-0607-0809-0a0b0c0d0e0f/2" in str(error)


def test_live_and_queued_states() -> None:
    assert {state for state in SequenceState if state.is_live} == {W, P, D, R}
    assert {state for state in SequenceState if state.is_queued} == {W, R}
    assert {current for current, _ in LEGAL} == {state for state in SequenceState if state.is_live}
