"""Who is in the cluster, what the plan is, and what has to happen next. Pure: events in, actions out.

```
WAITING_FOR_WORKERS -> LOADING -> STARTING_EPOCH -> SERVING
         ^                ^              ^             |
         `----------------+--------------+-------------'   a worker is lost, a step is faulty, a stream breaks
```

Where a self-check is wanted, the first epoch of a plan goes to CHECKING in the place of SERVING.
`BLOCKED` stands for WAITING_FOR_WORKERS with enough workers but no plan that fits them.
"""

from collections import Counter
from enum import Enum, auto

from coordinator.cluster.actions import (
    Action,
    AssignStage,
    BeginEpoch,
    CheckPlan,
    Disconnect,
    EndCause,
    FinishRunning,
    LetGo,
    Release,
    Shrink,
    StartServing,
    StartTimer,
    StopServing,
)
from coordinator.cluster.membership import (
    MAX_FAILED_LOADS,
    MakePlan,
    Members,
    TooFewWorkers,
    WorkerIdentity,
    WorkerRecord,
    WorkerState,
)
from coordinator.cluster.self_check_refusals import PlanRefusals
from coordinator.planning.plan import Plan, PlanImpossible
from wire.ids import Incarnation

MAX_EPOCH_DELAY_S = 2.0
"""Longest pause before another try when epoch after epoch ends without a single result."""
RETURN_GRACE_S = 1.0
"""How long a lost worker may take to come back before its layers are shared out among the others."""
MAX_HOP_FAILURES = 2
"""Epochs in a row in which a stage does not reach the next one, before the plan does without that one."""


class ClusterPhase(Enum):
    """What the cluster is doing as a whole."""

    WAITING_FOR_WORKERS = auto()
    LOADING = auto()
    STARTING_EPOCH = auto()
    CHECKING = auto()
    SERVING = auto()
    BLOCKED = auto()


_ACTIVE = (ClusterPhase.STARTING_EPOCH, ClusterPhase.CHECKING, ClusterPhase.SERVING)


class ClusterState:
    """One owner feeds it events and carries out the actions it returns, in order.

    Until it has served, or a worker was told to leave, a plan has `num_stages` stages. Later ones have fewer
    while there are fewer workers, and as many again when workers come back.
    """

    def __init__(
        self,
        *,
        num_stages: int,
        make_plan: MakePlan,
        is_mock_model: bool = False,
        return_grace_s: float = RETURN_GRACE_S,
        first_epoch: int = 1,
        needs_check: bool = False,
    ) -> None:
        """`make_plan` may raise PlanImpossible; it is given workers in the order in which to use them. A mock
        model has no weights, so real stages have nothing to load. Epochs count from `first_epoch` on, or from
        above what the workers have seen. `needs_check`: only checked plans serve.
        """
        self.num_stages = num_stages
        self.phase = ClusterPhase.WAITING_FOR_WORKERS
        self.detail = f"waiting for {num_stages} workers"
        self.epoch = first_epoch - 1
        self.plan: Plan | None = None
        self.workers = Members()
        self.has_served = False
        self._refusals = PlanRefusals()
        self._make_plan = self._refusals.guard(make_plan)
        self._needs_check = needs_check
        self._checked_plan_id = 0
        self._is_mock_model = is_mock_model
        self._return_grace_s = return_grace_s
        self._template: Plan | None = None
        self._waits_for_return = False
        self._may_shrink = False
        self._num_losses = 0
        self._plan_id = 0
        self._ready: set[str] = set()
        self._is_link_open = False
        self._are_results_open = False
        self._num_fruitless_epochs = 0
        self._hop_failures = Counter[str]()

    @property
    def stage_workers(self) -> tuple[WorkerRecord, ...]:
        """The workers of the present plan, in stage order; empty without a plan."""
        return () if self.plan is None else tuple(self.workers[stage.worker] for stage in self.plan.stages)

    @property
    def has_mock_stages(self) -> bool:
        """The stages of the plan compute nothing."""
        return any(each.identity.is_mock for each in self.stage_workers)

    # Membership

    def join(self, identity: WorkerIdentity) -> list[Action]:
        """A worker has joined. Raises NameInUse when a live worker elsewhere has this name, and
        HandshakeMismatch for a mock stage among real ones, or a real one among mocks."""
        self.workers.check_may_join(identity, is_mock_model=self._is_mock_model)
        known = self.workers.find(identity.name)
        actions: list[Action] = []
        if known is not None:
            actions = self.lose(identity.name, known.identity.incarnation, "replaced by a new process")
        self._refusals.forget(identity.name)
        hold_s = self.workers.add(identity)
        if hold_s:
            return [*actions, StartTimer(hold_s, Release(identity.name, identity.incarnation))]
        return actions + self._improve()

    def elapsed(self, timer: Release | Shrink) -> list[Action]:
        """The time of a StartTimer is over. One that is out of date changes nothing."""
        match timer:
            case Release(name, incarnation):
                record = self.workers.live(name, incarnation)
                if record is None or record.state is not WorkerState.JOINING:
                    return []
                record.state, record.detail = WorkerState.SPARE, ""
                return self._improve()
            case Shrink(num_losses):
                if num_losses != self._num_losses or self.plan is not None:
                    return []
                self._waits_for_return = False
                return self._advance(self.detail)

    def note_silence(self, name: str, incarnation: Incarnation, *, is_silent: bool) -> None:
        """Heartbeats of a worker are missing, or are there again; it is not lost yet."""
        record = self.workers.live(name, incarnation)
        if record is not None:
            record.is_silent = is_silent

    def lose(self, name: str, incarnation: Incarnation, reason: str) -> list[Action]:
        """A worker's stream is broken, or its lease has expired. An older incarnation changes nothing."""
        record = self.workers.live(name, incarnation)
        if record is None:
            return []
        record.state, record.detail = WorkerState.LOST, reason
        if record.stage is None:
            # Those who are left may be fewer than was said, or have a plan without it.
            self.workers.remove(name)
            return self._advance()
        self.workers.note_loss(name)
        self.workers.try_all_again()
        self._num_losses += 1
        self._waits_for_return = self._may_shrink
        actions = self._give_up_plan(f"worker {name} is lost: {reason}", EndCause.DEATH)
        if self.plan is None and self._waits_for_return:
            actions.append(StartTimer(self._return_grace_s, Shrink(self._num_losses)))
        return actions

    def drain(self, name: str) -> list[Action]:
        """A worker is to leave. Its layers move first; where nobody can take them, what runs is finished."""
        record = self.workers.find(name)
        if record is None or record.is_draining:
            return []
        record.is_draining = True
        if record.stage is None:
            return self._dismiss()
        self._may_shrink = True
        return self._move_from(record) or [FinishRunning(record.identity)]

    def drained(self, name: str, incarnation: Incarnation) -> list[Action]:
        """Nothing runs any more that a worker has to finish before it leaves."""
        record = self.workers.live(name, incarnation)
        if record is None or not record.is_draining or record.stage is None:
            return []
        return self._give_up_plan(f"worker {name} is drained", EndCause.REPLANNED)

    def note_steady(self) -> None:
        """The cluster has served for a while without a break."""
        self.workers.note_steady()

    # Loading and starting

    def loaded(self, name: str, plan_id: int) -> list[Action]:
        """A worker holds its stage and is warm."""
        record = self.workers.find(name)
        if record is None or plan_id != self._plan_id or record.state is not WorkerState.LOADING:
            return []
        record.state, record.detail, record.num_failed_loads = WorkerState.READY, "", 0
        if all(each.state is WorkerState.READY for each in self.stage_workers):
            return self._begin_epoch()
        return []

    def load_failed(self, name: str, plan_id: int, reason: str) -> list[Action]:
        """A worker could not load its stage. The second time, it is not tried again before it joins anew."""
        record = self.workers.find(name)
        if record is None or plan_id != self._plan_id or record.state is not WorkerState.LOADING:
            return []
        record.num_failed_loads += 1
        record.detail = reason
        if record.num_failed_loads >= MAX_FAILED_LOADS:
            record.state = WorkerState.QUARANTINED
        return self._give_up_plan(f"worker {name} could not load its stage: {reason}", EndCause.FAULT)

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

    def epoch_late(self, epoch: int, reason: str) -> list[Action]:
        """The epoch has not started in time: stages that are not ready are as good as lost."""
        if epoch != self.epoch or self.phase is not ClusterPhase.STARTING_EPOCH:
            return []
        late = [each for each in self.stage_workers if each.identity.name not in self._ready]
        if 0 < len(late) < len(self.stage_workers):
            return [Disconnect(each.identity, reason) for each in late]
        return self.epoch_failed(epoch, reason)

    # Serving

    def result_arrived(self) -> None:
        """The present epoch bears fruit."""
        self._num_fruitless_epochs = 0
        if self._hop_failures:
            self._hop_failures.clear()

    def epoch_failed(self, epoch: int, reason: str, cause: EndCause = EndCause.BROKEN) -> list[Action]:
        """A step was faulty, a stream broke, or the epoch was not ready in time. Old ones change nothing."""
        if epoch != self.epoch or self.phase not in _ACTIVE:
            return []
        return [StopServing(epoch, reason, cause), *self._begin_epoch(reason)]

    def hop_failed(self, epoch: int, stage: int, reason: str) -> list[Action]:
        """`stage` does not reach the next one. When that happens again, the plan does without the next one,
        if it can.
        """
        if epoch != self.epoch or self.phase not in _ACTIVE or self.plan is None:
            return []
        if stage + 1 < len(self.plan.stages):
            receiver = self.stage_workers[stage + 1]
            self._hop_failures[receiver.identity.name] += 1
            if self._hop_failures[receiver.identity.name] >= MAX_HOP_FAILURES:
                receiver.is_unreachable, receiver.detail = True, reason
                if actions := self._move_from(receiver, reason):
                    return actions
                receiver.is_unreachable, receiver.detail = False, ""
        return self.epoch_failed(epoch, reason)

    def checked(self, epoch: int, problem: str | None) -> list[Action]:
        """The plan was checked in `epoch`. A good one serves, in an epoch of its own with empty pools; one
        with a problem is refused until one of its workers joins anew."""
        if epoch != self.epoch or self.phase is not ClusterPhase.CHECKING or self.plan is None:
            return []
        if problem is None:
            self._checked_plan_id, self._num_fruitless_epochs = self._plan_id, 0
            return self._begin_epoch()
        self._refusals.add(self.plan, problem)
        return self._give_up_plan("", EndCause.FAULT)

    # Plans

    def _give_up_plan(self, reason: str, cause: EndCause) -> list[Action]:
        actions = self._stop(reason, cause)
        self.plan = None
        return actions + self._advance(reason)

    def _stop(self, reason: str, cause: EndCause) -> list[Action]:
        return [StopServing(self.epoch, reason, cause)] if self.phase in _ACTIVE else []

    def _advance(self, reason: str = "") -> list[Action]:
        """A new plan, if there is none and one is possible."""
        if self.plan is not None:
            return []
        prefix = f"{reason}; " if reason else ""
        try:
            plan = self._new_plan(may_shrink=not self._waits_for_return)
        except TooFewWorkers as error:
            is_blocked, text = bool(self.workers.quarantine), str(error)
        except PlanImpossible as error:
            is_blocked, text = True, str(error)
        else:
            return self._assign(plan)
        self.phase = ClusterPhase.BLOCKED if is_blocked else ClusterPhase.WAITING_FOR_WORKERS
        self.detail = f"{prefix}{text}"
        self.workers.release_stages()
        return self._dismiss()

    def _improve(self) -> list[Action]:
        """A worker can be used that could not before: for the first plan, in the place of one that has to
        leave, or for a stage more.
        """
        if self.plan is None:
            return self._advance()
        for record in self.stage_workers:
            if record.is_draining and (actions := self._move_from(record)):
                return actions
        if len(self.plan.stages) == self.num_stages:
            return []
        try:
            plan = self._new_plan(may_shrink=True)
        except (PlanImpossible, TooFewWorkers):
            return []
        if len(plan.stages) <= len(self.plan.stages):
            return []
        reason = f"{len(plan.stages)} workers in the place of {len(self.plan.stages)}"
        return self._stop(reason, EndCause.REPLANNED) + self._assign(plan)

    def _move_from(self, record: WorkerRecord, reason: str = "") -> list[Action]:
        """A plan without this worker, which is not usable any more; nothing if there is none."""
        try:
            plan = self._new_plan(may_shrink=True)
        except (PlanImpossible, TooFewWorkers):
            return []
        reason = reason or f"worker {record.identity.name} is drained"
        return self._stop(reason, EndCause.REPLANNED) + self._assign(plan)

    def _new_plan(self, *, may_shrink: bool) -> Plan:
        may_shrink = may_shrink and self._may_shrink
        return self.workers.plan(self._template, self.num_stages, self._make_plan, may_shrink=may_shrink)

    def _assign(self, plan: Plan) -> list[Action]:
        self.workers.release_stages()
        self.plan = plan
        if len(plan.stages) == self.num_stages:
            self._template = plan
        self._waits_for_return = False
        self._plan_id += 1
        self._hop_failures.clear()
        self.phase, self.detail = ClusterPhase.LOADING, "workers are loading their layers"
        actions: list[Action] = []
        for stage in plan.stages:
            record = self.workers[stage.worker]
            record.state, record.stage = WorkerState.LOADING, stage
            actions.append(AssignStage(record.identity, self._plan_id, plan, stage))
        return actions + self._dismiss()

    def _dismiss(self) -> list[Action]:
        """Who is to leave, and has no stage any more, goes. Once."""
        leaving = [each for each in self.workers if each.is_live and each.is_draining and not each.stage]
        dismissed = [each for each in leaving if not each.is_dismissed]
        for record in dismissed:
            record.is_dismissed = True
        return [LetGo(record.identity, "drained") for record in dismissed]

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
            self.has_served = self._may_shrink = True
            return [StartServing(epoch, self.plan)]
        return []
