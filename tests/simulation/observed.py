"""Which decisions of ClusterState a run has taken: (phase, event, phase after it); what became of states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

from coordinator.cluster.state_machine import ClusterState
from coordinator.cluster.transitions import ClusterEvent
from kvcache import CopyState, FreeState, SavedState, SlotChange, StatePool, StateSignal, TakeState

EVENTS = tuple(event.value for event in ClusterEvent)
Transition = tuple[str, str, str]

TAKEN: Counter[Transition] = Counter()
"""Since the last `clear`; one run at a time in a process."""
STATES: Counter[str] = Counter()
"""What became of recurrent states, on the coordinator and on stages, as `TAKEN`."""


_apply = StatePool.apply


def observed_apply(pool: StatePool, signal: StateSignal) -> SlotChange | None:
    """In the place of `StatePool.apply`: counts in `STATES`."""
    is_full = not pool.num_free
    change = _apply(pool, signal)
    match signal:
        case TakeState():
            STATES["taken"] += 1
        case CopyState(target=SavedState()):
            STATES["saved"] += 1
        case CopyState():
            STATES["restored"] += 1
        case FreeState():
            STATES["freed"] += 1
    STATES["evicted"] += is_full and change is not None
    return change


def _observed(event: str) -> Callable[..., Any]:
    @wraps(getattr(ClusterState, event))
    def method(self: ClusterState, *args: Any, **named: Any) -> Any:
        before, epoch = self.phase.name, self.epoch
        actions = getattr(ClusterState, event)(self, *args, **named)
        assert self.epoch >= epoch, "epochs only grow"
        if actions or self.phase.name != before:
            TAKEN[before, event, self.phase.name] += 1
        else:
            TAKEN[before, event, "-"] += 1
        return actions

    return method


ObservedState: type[ClusterState] = type(
    "ObservedState",
    (ClusterState,),
    # Its stages are checked as real ones are.
    {**{event: _observed(event) for event in EVENTS}, "has_mock_stages": False},
)
"""A ClusterState that notes what it decides; "-" stands for nothing."""
