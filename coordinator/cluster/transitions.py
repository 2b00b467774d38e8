"""The transition table of cluster phases: phase x event -> possible next phases. Pure.

`ClusterState` executes it. An event without a row is stale and ignored. A row lists all possible next phases,
including the same one if the event may leave it unchanged.
"""

from collections.abc import Callable, Mapping, Set
from enum import Enum, auto
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol

from coordinator.cluster.actions import Action


class ClusterPhase(Enum):
    """Phases of the cluster. BLOCKED: there are enough workers, but no plan fits them."""

    WAITING_FOR_WORKERS = auto()
    LOADING = auto()
    STARTING_EPOCH = auto()
    CHECKING = auto()
    SERVING = auto()
    BLOCKED = auto()


class ClusterEvent(Enum):
    """Events of the cluster; the value is the handler's name in `ClusterState`."""

    JOIN = "join"
    LOSE = "lose"
    ELAPSED = "elapsed"
    DRAIN = "drain"
    DRAINED = "drained"
    LOADED = "loaded"
    LOAD_FAILED = "load_failed"
    WEIGHTS_DIFFER = "weights_differ"
    EPOCH_READY = "epoch_ready"
    LINK_OPEN = "link_open"
    RESULTS_OPEN = "results_open"
    EPOCH_LATE = "epoch_late"
    EPOCH_FAILED = "epoch_failed"
    HOP_FAILED = "hop_failed"
    STAGE_FAILED = "stage_failed"
    CHECKED = "checked"
    REFERENCE_DROPPED = "reference_dropped"
    DOUBTED = "doubted"


_WAITING, _BLOCKED = ClusterPhase.WAITING_FOR_WORKERS, ClusterPhase.BLOCKED
_LOADING, _STARTING = ClusterPhase.LOADING, ClusterPhase.STARTING_EPOCH
_CHECKING, _SERVING = ClusterPhase.CHECKING, ClusterPhase.SERVING

TRANSITIONS: Mapping[ClusterPhase, Mapping[ClusterEvent, Set[ClusterPhase]]] = {
    _WAITING: {
        ClusterEvent.JOIN: {_WAITING, _LOADING, _BLOCKED},
        ClusterEvent.LOSE: {_WAITING, _LOADING, _BLOCKED},
        ClusterEvent.ELAPSED: {_WAITING, _LOADING, _BLOCKED},
        ClusterEvent.DRAIN: {_WAITING},
        ClusterEvent.WEIGHTS_DIFFER: {_WAITING, _LOADING, _BLOCKED},
        ClusterEvent.REFERENCE_DROPPED: {_WAITING},
    },
    _LOADING: {
        ClusterEvent.JOIN: {_WAITING, _LOADING, _BLOCKED},
        ClusterEvent.LOSE: {_WAITING, _LOADING, _BLOCKED},
        ClusterEvent.ELAPSED: {_LOADING},
        ClusterEvent.DRAIN: {_LOADING},
        ClusterEvent.DRAINED: {_WAITING, _LOADING, _BLOCKED},
        ClusterEvent.LOADED: {_LOADING, _STARTING},
        ClusterEvent.LOAD_FAILED: {_WAITING, _LOADING, _BLOCKED},
        ClusterEvent.WEIGHTS_DIFFER: {_LOADING, _BLOCKED},
        ClusterEvent.REFERENCE_DROPPED: {_LOADING},
    },
    _STARTING: {
        ClusterEvent.JOIN: {_WAITING, _LOADING, _STARTING, _BLOCKED},
        ClusterEvent.LOSE: {_WAITING, _LOADING, _STARTING, _BLOCKED},
        ClusterEvent.ELAPSED: {_LOADING, _STARTING},
        ClusterEvent.DRAIN: {_LOADING, _STARTING},
        ClusterEvent.DRAINED: {_WAITING, _LOADING, _STARTING, _BLOCKED},
        ClusterEvent.WEIGHTS_DIFFER: {_LOADING, _STARTING, _BLOCKED},
        ClusterEvent.EPOCH_READY: {_STARTING, _CHECKING, _SERVING},
        ClusterEvent.LINK_OPEN: {_STARTING, _CHECKING, _SERVING},
        ClusterEvent.RESULTS_OPEN: {_STARTING, _CHECKING, _SERVING},
        ClusterEvent.EPOCH_LATE: {_STARTING},
        ClusterEvent.EPOCH_FAILED: {_STARTING},
        ClusterEvent.HOP_FAILED: {_LOADING, _STARTING},
        ClusterEvent.STAGE_FAILED: {_LOADING, _STARTING},
        ClusterEvent.REFERENCE_DROPPED: {_STARTING},
    },
    _CHECKING: {
        ClusterEvent.JOIN: {_WAITING, _LOADING, _CHECKING, _BLOCKED},
        ClusterEvent.LOSE: {_WAITING, _LOADING, _CHECKING, _BLOCKED},
        ClusterEvent.ELAPSED: {_LOADING, _CHECKING},
        ClusterEvent.DRAIN: {_LOADING, _CHECKING},
        ClusterEvent.DRAINED: {_WAITING, _LOADING, _CHECKING, _BLOCKED},
        ClusterEvent.WEIGHTS_DIFFER: {_LOADING, _CHECKING, _BLOCKED},
        ClusterEvent.EPOCH_FAILED: {_STARTING, _CHECKING},
        ClusterEvent.HOP_FAILED: {_LOADING, _STARTING, _CHECKING},
        ClusterEvent.STAGE_FAILED: {_LOADING, _STARTING, _CHECKING},
        ClusterEvent.CHECKED: {_WAITING, _LOADING, _STARTING, _CHECKING, _BLOCKED},
        ClusterEvent.REFERENCE_DROPPED: {_CHECKING},
    },
    _SERVING: {
        ClusterEvent.JOIN: {_WAITING, _LOADING, _SERVING, _BLOCKED},
        ClusterEvent.LOSE: {_WAITING, _LOADING, _SERVING, _BLOCKED},
        ClusterEvent.ELAPSED: {_LOADING, _SERVING},
        ClusterEvent.DRAIN: {_LOADING, _SERVING},
        ClusterEvent.DRAINED: {_WAITING, _LOADING, _SERVING, _BLOCKED},
        ClusterEvent.WEIGHTS_DIFFER: {_LOADING, _SERVING, _BLOCKED},
        ClusterEvent.EPOCH_FAILED: {_STARTING, _SERVING},
        ClusterEvent.HOP_FAILED: {_LOADING, _STARTING, _SERVING},
        ClusterEvent.STAGE_FAILED: {_LOADING, _STARTING, _SERVING},
        ClusterEvent.REFERENCE_DROPPED: {_SERVING},
        ClusterEvent.DOUBTED: {_STARTING, _SERVING},
    },
    _BLOCKED: {
        ClusterEvent.JOIN: {_WAITING, _LOADING, _BLOCKED},
        ClusterEvent.LOSE: {_WAITING, _LOADING, _BLOCKED},
        ClusterEvent.ELAPSED: {_WAITING, _LOADING, _BLOCKED},
        ClusterEvent.DRAIN: {_BLOCKED},
        ClusterEvent.WEIGHTS_DIFFER: {_LOADING, _BLOCKED},
        ClusterEvent.REFERENCE_DROPPED: {_WAITING, _LOADING, _BLOCKED},
    },
}


class IllegalPhase(RuntimeError):
    """An event led to a phase that its row does not list: a defect."""


class _HasPhase(Protocol):
    phase: ClusterPhase


_Parameters = ParamSpec("_Parameters")
_Handler = Callable[Concatenate[Any, _Parameters], list[Action]]


def handles(event: ClusterEvent) -> Callable[[_Handler[_Parameters]], _Handler[_Parameters]]:
    """Decorate the handler of `event`: skip it without a row, and check the next phase."""

    def decorate(handler: _Handler[_Parameters]) -> _Handler[_Parameters]:
        @wraps(handler)
        def handle(state: _HasPhase, /, *args: _Parameters.args, **named: _Parameters.kwargs) -> list[Action]:
            before = state.phase
            if event not in TRANSITIONS[before]:
                return []
            actions = handler(state, *args, **named)
            check_transition(before, event, state.phase)
            return actions

        return handle

    return decorate


def check_transition(before: ClusterPhase, event: ClusterEvent, after: ClusterPhase) -> None:
    """Raise IllegalPhase unless the row of `before` and `event` lists `after`."""
    if after not in TRANSITIONS[before].get(event, ()):
        raise IllegalPhase(f"{event.value} in phase {before.name} led to {after.name}")
