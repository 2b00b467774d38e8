"""Who is in the cluster, what the plan is, and what has to happen next. Pure: events in, actions out.

```
WAITING_FOR_WORKERS -> LOADING -> STARTING_EPOCH -> SERVING
         ^                ^              ^             |
         `----------------+--------------+-------------'   a worker is lost, a step is faulty, a stream breaks
```

Where a self-check is wanted, the first epoch of a plan goes to CHECKING in the place of SERVING.
`BLOCKED` stands for WAITING_FOR_WORKERS with enough workers but no plan that fits them.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from coordinator.cluster.self_check_refusals import PlanRefusals
from coordinator.planning.plan import Plan, PlanImpossible, StagePlan, WorkerCapacity
from wire.errors import HandshakeMismatch, NameInUse
from wire.ids import Incarnation


class ClusterPhase(Enum):
    """What the cluster is doing as a whole."""

    WAITING_FOR_WORKERS = auto()
    LOADING = auto()
    STARTING_EPOCH = auto()
    CHECKING = auto()
    SERVING = auto()
    BLOCKED = auto()


_ACTIVE = (ClusterPhase.STARTING_EPOCH, ClusterPhase.CHECKING, ClusterPhase.SERVING)


class WorkerState(Enum):
    """What one worker is doing."""

    SPARE = auto()
    LOADING = auto()
    READY = auto()
    LOST = auto()
    FAILED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """What a worker says of itself when it joins."""

    name: str
    incarnation: Incarnation
    address: str
    device: str
    memory_bytes: int
    last_epoch: int
    pid: int
    is_mock: bool = False


@dataclass(slots=True)
class WorkerRecord:
    """A worker that has joined, live or lost."""

    identity: WorkerIdentity
    state: WorkerState = WorkerState.SPARE
    detail: str = ""
    stage: StagePlan | None = None

    @property
    def is_live(self) -> bool:
        return self.state is not WorkerState.LOST

    @property
    def is_usable(self) -> bool:
        """May be given a stage. A worker that failed to load stays out until it joins anew."""
        return self.state not in (WorkerState.LOST, WorkerState.FAILED)


@dataclass(frozen=True, slots=True)
class AssignStage:
    """Tell `worker` to load `stage` of plan `plan_id`."""

    worker: WorkerIdentity
    plan_id: int
    plan: Plan
    stage: StagePlan


@dataclass(frozen=True, slots=True)
class BeginEpoch:
    """Begin `epoch` on all `workers`, which are in stage order, after `delay_s`."""

    epoch: int
    plan_id: int
    plan: Plan
    workers: tuple[WorkerIdentity, ...]
    delay_s: float


@dataclass(frozen=True, slots=True)
class StopServing:
    """The epoch is over; nothing of it counts any more."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class StartServing:
    """Every stage of `epoch` is ready and connected."""

    epoch: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """Every stage of `epoch` is ready and connected, and this plan has never been checked."""

    epoch: int
    plan: Plan


Action = AssignStage | BeginEpoch | StopServing | StartServing | CheckPlan

MAX_EPOCH_DELAY_S = 2.0
"""Longest pause before another try when epoch after epoch ends without a single result."""


class ClusterState:
    """One owner feeds it events and carries out the actions it returns, in order."""

    def __init__(
        self,
        *,
        num_stages: int,
        make_plan: Callable[[Sequence[WorkerCapacity]], Plan],
        is_mock_model: bool = False,
        needs_check: bool = False,
    ) -> None:
        """`make_plan` may raise PlanImpossible; it is given workers in the order in which to use them. A mock
        model has no weights, so real stages have nothing to load. `needs_check`: only checked plans serve.
        """
        self.num_stages = num_stages
        self.phase = ClusterPhase.WAITING_FOR_WORKERS
        self.detail = f"waiting for {num_stages} workers"
        self.epoch = 0
        self.plan: Plan | None = None
        self.workers: dict[str, WorkerRecord] = {}
        self._refusals = PlanRefusals()
        self._make_plan = self._refusals.guard(make_plan)
        self._needs_check = needs_check
        self._checked_plan_id = 0
        self._is_mock_model = is_mock_model
        self._previous: Plan | None = None
        self._plan_id = 0
        self._ready: set[str] = set()
        self._is_link_open = False
        self._are_results_open = False
        self._num_fruitless_epochs = 0

    @property
    def stage_workers(self) -> tuple[WorkerRecord, ...]:
        """The workers of the present plan, in stage order; empty without a plan."""
        if self.plan is None:
            return ()
        return tuple(self.workers[stage.worker] for stage in self.plan.stages)

    @property
    def has_mock_stages(self) -> bool:
        """The stages of the plan compute nothing."""
        return any(each.identity.is_mock for each in self.stage_workers)

    def join(self, identity: WorkerIdentity) -> list[Action]:
        """A worker has joined. Raises NameInUse when a live worker elsewhere has this name, and
        HandshakeMismatch for a mock stage among real ones, or a real one among mocks."""
        self._check_kind(identity)
        known = self.workers.get(identity.name)
        if known is not None and known.is_live:
            if known.identity.address != identity.address:
                raise NameInUse(
                    f"the name {identity.name!r} is in use by the worker at {known.identity.address}"
                )
            actions = self.lose(identity.name, known.identity.incarnation, "replaced by a new process")
        else:
            actions = []
        self._refusals.forget(identity.name)
        self.workers[identity.name] = WorkerRecord(identity)
        return actions + self._advance()

    def _check_kind(self, identity: WorkerIdentity) -> None:
        """Tokens of a pipeline with a mock stage in it would look like real ones."""
        if self._is_mock_model and not identity.is_mock:
            raise HandshakeMismatch(
                f"kind of worker {identity.name}",
                expected="a mock stage, for a mock model",
                got="a real stage",
            )
        others = (record.identity for record in self.workers.values() if record.is_live)
        for other in others:
            if other.name != identity.name and other.is_mock != identity.is_mock:
                kinds = {True: "a mock stage", False: "a real stage"}
                raise HandshakeMismatch(
                    f"kind of worker {identity.name}",
                    expected=f"{kinds[other.is_mock]}, as worker {other.name} is",
                    got=kinds[identity.is_mock],
                )

    def lose(self, name: str, incarnation: Incarnation, reason: str) -> list[Action]:
        """A worker's stream is broken, or its lease has expired. An older incarnation changes nothing."""
        record = self.workers.get(name)
        if record is None or record.identity.incarnation != incarnation or not record.is_live:
            return []
        had_stage = record.stage is not None
        record.state, record.detail = WorkerState.LOST, reason
        if not had_stage:
            # Those who are left may be fewer than was said, or have a plan without it.
            del self.workers[name]
            return self._advance()
        return self._give_up_plan(f"worker {name} is lost: {reason}")

    def loaded(self, name: str, plan_id: int) -> list[Action]:
        """A worker holds its stage and is warm."""
        record = self.workers.get(name)
        if record is None or plan_id != self._plan_id or record.state is not WorkerState.LOADING:
            return []
        record.state, record.detail = WorkerState.READY, ""
        if all(each.state is WorkerState.READY for each in self.stage_workers):
            return self._begin_epoch()
        return []

    def load_failed(self, name: str, plan_id: int, reason: str) -> list[Action]:
        """A worker could not load its stage; it is not tried again before it joins anew."""
        record = self.workers.get(name)
        if record is None or plan_id != self._plan_id or not record.is_live:
            return []
        record.state, record.detail = WorkerState.FAILED, reason
        return self._give_up_plan(f"worker {name} could not load its stage: {reason}")

    def epoch_ready(self, name: str, epoch: int) -> list[Action]:
        """A stage has empty pools and is connected to the next one."""
        if epoch == self.epoch:
            self._ready.add(name)
        return self._maybe_serve(epoch)

    def link_open(self, epoch: int) -> list[Action]:
        """FIRST has accepted the coordinator's stream."""
        self._is_link_open |= epoch == self.epoch
        return self._maybe_serve(epoch)

    def results_open(self, epoch: int) -> list[Action]:
        """LAST has opened its stream of results."""
        self._are_results_open |= epoch == self.epoch
        return self._maybe_serve(epoch)

    def result_arrived(self) -> None:
        """The present epoch bears fruit."""
        self._num_fruitless_epochs = 0

    def epoch_failed(self, epoch: int, reason: str) -> list[Action]:
        """A step was faulty, a stream broke, or the epoch was not ready in time. Old ones change nothing."""
        if epoch != self.epoch or self.phase not in _ACTIVE:
            return []
        return [StopServing(epoch, reason), *self._begin_epoch(reason)]

    def checked(self, epoch: int, problem: str | None) -> list[Action]:
        """The plan was checked in `epoch`. A good one serves, in an epoch of its own with empty pools; one
        with a problem is refused until one of its workers joins anew."""
        if epoch != self.epoch or self.phase is not ClusterPhase.CHECKING or self.plan is None:
            return []
        if problem is None:
            self._checked_plan_id, self._num_fruitless_epochs = self._plan_id, 0
            return self._begin_epoch()
        self._refusals.add(self.plan, problem)
        return self._give_up_plan("")

    def _give_up_plan(self, reason: str) -> list[Action]:
        actions: list[Action] = []
        if self.phase in _ACTIVE:
            actions.append(StopServing(self.epoch, reason))
        if self.plan is not None:
            self._previous, self.plan = self.plan, None
        return actions + self._advance(reason)

    def _advance(self, reason: str = "") -> list[Action]:
        if self.plan is not None:
            return []
        chosen = self._choose_workers()
        prefix = f"{reason}; " if reason else ""
        if len(chosen) < self.num_stages:
            return self._wait(
                f"{prefix}{len(chosen)} of {self.num_stages} workers are here{self._failures()}"
            )
        try:
            plan = self._plan_with(chosen)
        except PlanImpossible as error:
            self.phase, self.detail = ClusterPhase.BLOCKED, f"{prefix}{error}"
            self._unassign()
            return []
        return self._assign(plan)

    def _plan_with(self, chosen: list[WorkerIdentity]) -> Plan:
        """A plan for the chosen workers, or else for those with the most memory. Raises PlanImpossible."""
        try:
            return self._make_plan(_capacities(chosen))
        except PlanImpossible:
            largest = self._largest_workers()
            if {each.name for each in largest} == {each.name for each in chosen}:
                raise
        return self._make_plan(_capacities(largest))

    def _largest_workers(self) -> list[WorkerIdentity]:
        usable = [each.identity for each in self.workers.values() if each.is_usable]
        usable.sort(key=lambda each: (-each.memory_bytes, _natural_order(each.name)))
        return sorted(usable[: self.num_stages], key=lambda each: _natural_order(each.name))

    def _choose_workers(self) -> list[WorkerIdentity]:
        """As many as the plan has stages. Those with a stage keep their place; a newcomer takes the place of
        a lost one; a first plan goes by name, so that the order of arrival does not matter.
        """
        previous = self._previous
        usable = {name: each.identity for name, each in self.workers.items() if each.is_usable}
        stages = previous.stages if previous else ()
        places = [stage.worker if stage.worker in usable else None for stage in stages]
        newcomers = iter(sorted((name for name in usable if name not in places), key=_natural_order))
        places += [None] * (self.num_stages - len(places))
        chosen = [place or next(newcomers, None) for place in places]
        return [usable[name] for name in chosen if name is not None]

    def _wait(self, detail: str) -> list[Action]:
        failed = any(each.state is WorkerState.FAILED for each in self.workers.values())
        self.phase = ClusterPhase.BLOCKED if failed else ClusterPhase.WAITING_FOR_WORKERS
        self.detail = detail
        self._unassign()
        return []

    def _failures(self) -> str:
        failed = [
            (name, each.detail) for name, each in self.workers.items() if each.state is WorkerState.FAILED
        ]
        return "".join(f"; {name} failed: {detail}" for name, detail in failed)

    def _unassign(self) -> None:
        for name, record in list(self.workers.items()):
            record.stage = None
            if record.state is WorkerState.LOST:
                del self.workers[name]
            elif record.is_usable:
                record.state = WorkerState.SPARE

    def _assign(self, plan: Plan) -> list[Action]:
        self._unassign()
        self.plan = plan
        self._plan_id += 1
        self.phase, self.detail = ClusterPhase.LOADING, "workers are loading their layers"
        actions: list[Action] = []
        for stage in plan.stages:
            record = self.workers[stage.worker]
            record.state, record.stage = WorkerState.LOADING, stage
            actions.append(AssignStage(record.identity, self._plan_id, plan, stage))
        return actions

    def _begin_epoch(self, reason: str = "") -> list[Action]:
        assert self.plan is not None
        workers = tuple(each.identity for each in self.stage_workers)
        self.epoch = max(self.epoch, *(each.last_epoch for each in workers)) + 1
        self._ready.clear()
        self._is_link_open = self._are_results_open = False
        self.phase = ClusterPhase.STARTING_EPOCH
        self.detail = f"starting epoch {self.epoch}" + (f": {reason}" if reason else "")
        delay_s = 0.0
        if self._num_fruitless_epochs:
            # The exponent is bounded: 2**1024 is no float.
            delay_s = min(MAX_EPOCH_DELAY_S, 0.05 * 2 ** min(self._num_fruitless_epochs, 10))
        self._num_fruitless_epochs += 1
        return [BeginEpoch(self.epoch, self._plan_id, self.plan, workers, delay_s)]

    def _maybe_serve(self, epoch: int) -> list[Action]:
        if epoch != self.epoch or self.phase is not ClusterPhase.STARTING_EPOCH or self.plan is None:
            return []
        names = {stage.worker for stage in self.plan.stages}
        if names <= self._ready and self._is_link_open and self._are_results_open:
            if self._needs_check and self._checked_plan_id != self._plan_id and not self.has_mock_stages:
                self.phase, self.detail = ClusterPhase.CHECKING, "the self-check is under way"
                return [CheckPlan(epoch, self.plan)]
            self.phase, self.detail = ClusterPhase.SERVING, ""
            return [StartServing(epoch, self.plan)]
        return []


def _capacities(workers: list[WorkerIdentity]) -> list[WorkerCapacity]:
    return [WorkerCapacity(name=each.name, memory_bytes=each.memory_bytes) for each in workers]


def _natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Sorts "gpu-10" after "gpu-9"."""
    parts = re.split(r"(\d+)", name)
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
