"""A seeded walk of random events over a cluster state, long enough to take every row of the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from coordinator.cluster.actions import Action, FinishRunning
from coordinator.cluster.membership import WorkerIdentity
from coordinator.cluster.transitions import TRANSITIONS, ClusterEvent, ClusterPhase
from coordinator.recovery.rejoin import StartTimer, Timer
from tests.unit.coordinator.cluster.cluster_driver import ClusterDriver
from wire.errors import StepFaultKind
from wire.ids import RequestId
from wire.steps import FaultReport

Taken = tuple[ClusterPhase, ClusterEvent, ClusterPhase]

NAMES = "abcde"
NUM_EVENTS = 150
"""Events on one cluster; then another begins."""


class RandomWalk:
    """One cluster; `taken` counts (phase, event, next phase)."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._cluster = ClusterDriver(
            num_stages=self._random.randint(1, 3),
            needed_bytes=self._random.choice([0, 0, 0, 200]),
            needs_check=self._random.random() < 0.5,
            has_served=self._random.random() < 0.5,
        )
        self._state = self._cluster.state
        self._timers: list[Timer] = []
        self._finishing: list[WorkerIdentity] = []
        self._num_incarnations = 0
        self._choices: dict[ClusterEvent, Callable[[], list[Action]]] = {
            event: getattr(self, f"_{event.value}") for event in ClusterEvent
        }
        self.taken = Counter[Taken]()
        self._note(self._state.start())

    def run(self, num_events: int = NUM_EVENTS) -> None:
        for _ in range(num_events):
            self._forward() if self._random.random() < 0.5 else self._take(
                self._random.choice(list(ClusterEvent))
            )

    def _forward(self) -> None:
        """The event that advances the cluster, so that late phases are reached."""
        match self._state.phase:
            case ClusterPhase.LOADING:
                self._take(ClusterEvent.LOADED)
            case ClusterPhase.STARTING_EPOCH:
                signs = (ClusterEvent.EPOCH_READY, ClusterEvent.LINK_OPEN, ClusterEvent.RESULTS_OPEN)
                self._take(self._random.choice(signs))
            case ClusterPhase.CHECKING:
                if self._random.random() < 0.2:
                    self._take(ClusterEvent.CHECKED)
            case ClusterPhase.WAITING_FOR_WORKERS | ClusterPhase.BLOCKED:
                self._take(ClusterEvent.JOIN)
            case ClusterPhase.SERVING:
                self._state.result_arrived()

    def _take(self, event: ClusterEvent) -> None:
        before = self._state.phase
        actions = self._choices[event]()
        self._note(actions)
        if event in TRANSITIONS[before]:
            self.taken[before, event, self._state.phase] += 1
        else:
            assert not actions and self._state.phase is before, "a stale event counts"

    def _note(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case StartTimer():
                    self._timers.append(action.timer)
                case FinishRunning():
                    self._finishing.append(action.worker)
                case _:
                    pass

    def _name(self) -> str:
        """A stage of the plan, mostly."""
        return self._random.choice([*NAMES, *4 * self._cluster.stage_names])

    def _identity(self) -> WorkerIdentity | None:
        record = self._state.workers.find_live(self._name())
        return None if record is None else record.identity

    def _epoch(self) -> int:
        return self._state.epoch - (self._random.random() < 0.1)

    def _join(self) -> list[Action]:
        self._num_incarnations += 1
        memory_bytes = self._random.choice([50, 100, 200])
        return self._cluster.join(
            self._random.choice(NAMES), incarnation=self._num_incarnations, memory_bytes=memory_bytes
        )

    def _lose(self) -> list[Action]:
        worker = self._identity()
        return [] if worker is None else self._state.lose(worker.name, worker.incarnation, "gone")

    def _elapsed(self) -> list[Action]:
        if not self._timers:
            return []
        return self._state.elapsed(self._timers.pop(self._random.randrange(len(self._timers))))

    def _drain(self) -> list[Action]:
        return self._state.drain(self._name()) if self._random.random() < 0.3 else []

    def _drained(self) -> list[Action]:
        if not self._finishing:
            return []
        worker = self._finishing.pop()
        return self._state.drained(worker.name, worker.incarnation)

    def _loaded(self) -> list[Action]:
        return self._state.loaded(self._name(), self._state.plan_id)

    def _load_failed(self) -> list[Action]:
        return self._state.load_failed(self._name(), self._state.plan_id, "no such file")

    def _weights_differ(self) -> list[Action]:
        return self._state.weights_differ(self._name(), "w.0") if self._random.random() < 0.3 else []

    def _epoch_ready(self) -> list[Action]:
        return self._state.epoch_ready(self._name(), self._epoch())

    def _link_open(self) -> list[Action]:
        return self._state.link_open(self._epoch())

    def _results_open(self) -> list[Action]:
        return self._state.results_open(self._epoch())

    def _epoch_late(self) -> list[Action]:
        return self._state.epoch_late(self._epoch(), "late")

    def _epoch_failed(self) -> list[Action]:
        return self._state.epoch_failed(self._epoch(), "broken")

    def _hop_failed(self) -> list[Action]:
        return self._state.hop_failed(self._epoch(), self._random.randrange(3), "unreachable")

    def _stage_failed(self) -> list[Action]:
        fault = FaultReport(
            epoch=self._epoch(),
            step_id=0,
            stage=self._random.randrange(3),
            kind=StepFaultKind.NON_FINITE,
            message="not finite",
            request_ids=(RequestId(self._random.randbytes(16)),),
        )
        return self._state.stage_failed(fault)

    def _checked(self) -> list[Action]:
        problem = self._random.choice([None, None, "failed"])
        stage = self._random.choice([None, 0]) if problem else None
        return self._state.checked(self._epoch(), problem, stage=stage, source=self._name())

    def _reference_dropped(self) -> list[Action]:
        return self._state.reference_dropped(self._name())

    def _doubted(self) -> list[Action]:
        return self._state.doubted(self._epoch(), "wrong")


SEEDS = (
    11,
    22,
    224,
    252,
    289,
    335,
    387,
    462,
    679,
    910,
    1025,
    1137,
    1344,
    1359,
    1448,
    1929,
    2614,
    2916,
    2975,
    6146,
    6840,
    10961,
    12756,
    15800,
    16281,
    16308,
    18115,
    25663,
    40142,
)
"""Clusters that take every row of the table between them, found by a search over 41,000."""


def walk() -> Counter[Taken]:
    """Transitions of the events of `SEEDS` that have a row in the table."""
    taken = Counter[Taken]()
    for seed in SEEDS:
        cluster = RandomWalk(seed)
        cluster.run()
        taken += cluster.taken
    return taken
