"""Cluster phases, members and plan: events in, actions out. Pure.

`coordinator.cluster.transitions` has the table of phases that it executes.
"""

from collections.abc import Collection

from coordinator.cluster.actions import (
    Action,
    AssignStage,
    BeginEpoch,
    CheckPlan,
    Disconnect,
    EndCause,
    FinishRunning,
    LetGo,
    StartServing,
    StopServing,
)
from coordinator.cluster.membership import Members, WorkerIdentity, WorkerRecord, WorkerState
from coordinator.cluster.plan_choice import MakePlan, PlanChoice, TooFewWorkers
from coordinator.cluster.transitions import ClusterEvent, ClusterPhase, handles
from coordinator.planner.plan import Plan, PlanImpossible, StagePlan
from coordinator.recovery.policy import RecoveryPolicy
from coordinator.recovery.rejoin import (
    FailureCounters,
    GraceExpired,
    HoldExpired,
    RejoinTimer,
    StartTimer,
    Timer,
)
from wire.ids import Incarnation
from wire.steps import FaultReport

ACTIVE = (ClusterPhase.STARTING_EPOCH, ClusterPhase.CHECKING, ClusterPhase.SERVING)
"""An epoch has begun and is not over."""


class EpochReadiness:
    """Readiness of the current epoch: every stage is ready, FIRST has accepted the stream of steps, and LAST
    has opened the stream of results.
    """

    def __init__(self) -> None:
        self._ready: set[str] = set()
        self._is_link_open = False
        self._are_results_open = False

    def clear(self) -> None:
        """A new epoch begins."""
        self._ready.clear()
        self._is_link_open = self._are_results_open = False

    def note_ready(self, worker: str) -> None:
        self._ready.add(worker)

    def note_link(self) -> None:
        self._is_link_open = True

    def note_results(self) -> None:
        self._are_results_open = True

    def is_ready(self, worker: str) -> bool:
        """The stage has empty pools and is connected to the next one."""
        return worker in self._ready

    def are_complete(self, workers: Collection[str]) -> bool:
        return self._ready.issuperset(workers) and self._is_link_open and self._are_results_open


class ClusterState:
    """One owner feeds it events and carries out the actions it returns, in order.

    Until the cluster has served, or a worker has drained, a plan has `num_stages` stages. Later plans have
    fewer while there are fewer workers, and as many again when workers rejoin.
    """

    def __init__(
        self,
        *,
        num_stages: int,
        make_plan: MakePlan,
        policy: RecoveryPolicy,
        is_mock_model: bool = False,
        last_epoch: int = 0,
        has_served: bool = False,
        needs_check: bool = False,
    ) -> None:
        """
        Args:
            make_plan: Receives workers in the order in which to use them; may raise PlanImpossible.
            is_mock_model: The model has no weights, so real stages have nothing to load.
            last_epoch: Epochs count from above it, and from above those that workers have seen.
            has_served: A former coordinator has served; its workers have time to rejoin.
            needs_check: Plans serve only after a self-check.
        """
        self.num_stages = num_stages
        self.phase = ClusterPhase.WAITING_FOR_WORKERS
        self.detail = f"waiting for {num_stages} workers"
        self.epoch = last_epoch
        self.plan: Plan | None = None
        self.workers = Members(policy)
        self.has_served = has_served
        self._choice = PlanChoice(num_stages, make_plan, policy)
        self._policy = policy
        self._needs_check = needs_check
        self._checked_plan_id = 0
        self._is_mock_model = is_mock_model
        self._rejoin_timer = RejoinTimer(policy)
        self._has_drained = False
        self._plan_id = 0
        self._readiness = EpochReadiness()
        self._failures = FailureCounters(policy)

    @property
    def stage_workers(self) -> tuple[WorkerRecord, ...]:
        """The workers of the present plan, in stage order; empty without a plan."""
        return () if self.plan is None else tuple(self.workers[stage.worker] for stage in self.plan.stages)

    def stage_of(self, worker: str) -> StagePlan | None:
        """The stage of a live worker in the present plan."""
        record = self.workers.find(worker)
        return None if record is None else record.stage

    def start(self) -> list[Action]:
        """Called once, before the first event."""
        return [self._rejoin_timer.await_all()] if self.has_served else []

    @property
    def plan_id(self) -> int:
        """Number of the current plan, or of the last one."""
        return self._plan_id

    @property
    def has_mock_stages(self) -> bool:
        """The plan has stages that compute nothing."""
        return any(record.identity.is_mock for record in self.stage_workers)

    # Membership

    @handles(ClusterEvent.JOIN)
    def join(self, identity: WorkerIdentity) -> list[Action]:
        """A worker has joined; it replaces one of the same name.

        Raises:
            HandshakeMismatch: a mock stage among real ones, or a real one among mocks.
        """
        self.workers.check_may_join(identity, is_mock_model=self._is_mock_model)
        known = self.workers.find(identity.name)
        had_stage = known is not None and known.stage is not None
        actions: list[Action] = []
        if known is not None:
            known.is_silent = False
            actions = self._part_with(known, "replaced by a new process", EndCause.DEATH)
        hold_s = self.workers.add(identity)
        self._choice.forget(identity.name, self.workers)
        if hold_s:
            actions.append(StartTimer(hold_s, HoldExpired(identity.name, identity.incarnation)))
        actions += self._advance() if hold_s else self._improve()
        return actions + (self._wait_for_return() if had_stage else [])

    @handles(ClusterEvent.ELAPSED)
    def elapsed(self, timer: Timer) -> list[Action]:
        """A timer has expired; one that is out of date changes nothing."""
        match timer:
            case HoldExpired(name, incarnation):
                return self._improve() if self.workers.release(name, incarnation) else []
            case GraceExpired():
                return self._advance(self.detail) if self._rejoin_timer.end(timer) else []

    @handles(ClusterEvent.LOSE)
    def lose(
        self, name: str, incarnation: Incarnation, reason: str, cause: EndCause = EndCause.DEATH
    ) -> list[Action]:
        """A worker's stream is broken, its lease has expired, or its device has failed. An older incarnation
        changes nothing.
        """
        record = self.workers.live(name, incarnation)
        if record is None:
            return []
        had_stage = record.stage is not None
        actions = self._part_with(record, reason, cause)
        # The others may have a plan without it, or the shown number of workers is out of date.
        actions += self._advance(f"worker {name} is lost: {reason}" if had_stage else "")
        return actions + (self._wait_for_return() if had_stage else [])

    def _part_with(self, record: WorkerRecord, reason: str, cause: EndCause) -> list[Action]:
        """Removes a lost worker, and the plan if it had a stage."""
        name = record.identity.name
        record.state, record.detail = WorkerState.LOST, reason
        if record.stage is None:
            self.workers.remove(name)
            return []
        self.workers.note_loss(name)
        self.workers.try_all_again()
        # A worker that was silent for its whole lease will not rejoin within the grace.
        self._rejoin_timer.note_loss(is_granted=self._may_shrink and not record.is_silent)
        actions = self._stop(f"worker {name} is lost: {reason}", cause)
        self.plan = None
        return actions

    def _wait_for_return(self) -> list[Action]:
        return [self._rejoin_timer.timer()] if self.plan is None and self._rejoin_timer.is_running else []

    @handles(ClusterEvent.DRAIN)
    def drain(self, name: str) -> list[Action]:
        """Drains a worker: moves its layers, or finishes running requests where no worker can take them."""
        record = self.workers.find(name)
        if record is None or record.is_draining:
            return []
        record.is_draining = True
        if record.stage is None:
            return self._dismiss()
        self._has_drained = True
        return self._move_from(f"worker {name} is drained") or [FinishRunning(record.identity)]

    @handles(ClusterEvent.DRAINED)
    def drained(self, name: str, incarnation: Incarnation) -> list[Action]:
        """The running requests that a draining worker waited for have finished."""
        record = self.workers.live(name, incarnation)
        if record is None or not record.is_draining or record.stage is None:
            return []
        return self._give_up_plan(f"worker {name} is drained", EndCause.REPLANNED)

    def note_time(self) -> None:
        """A steady window has passed, with losses or without."""
        self.workers.forget_half()

    def note_steady(self) -> None:
        """A steady window has passed without a loss or an ended epoch."""
        self.workers.note_steady()
        self._failures.note_steady()

    # Loading and starting

    @handles(ClusterEvent.LOADED)
    def loaded(self, name: str, plan_id: int) -> list[Action]:
        """A worker holds its stage and is warm."""
        record = self.workers.find(name)
        if record is None or plan_id != self._plan_id or record.state is not WorkerState.LOADING:
            return []
        record.state, record.detail, record.num_failed_loads = WorkerState.READY, "", 0
        if all(record.state is WorkerState.READY for record in self.stage_workers):
            return self._begin_epoch()
        return []

    @handles(ClusterEvent.LOAD_FAILED)
    def load_failed(self, name: str, plan_id: int, reason: str, *, is_final: bool = False) -> list[Action]:
        """A worker could not load its stage; a final failure or repeated ones quarantine it until it
        rejoins.
        """
        record = self.workers.find(name)
        if record is None or plan_id != self._plan_id or record.state is not WorkerState.LOADING:
            return []
        is_out = record.fail_to_load(reason, max_failures=1 if is_final else self._policy.max_failed_loads)
        return self._give_up_plan("" if is_out else f"worker {name} {record.detail}", EndCause.FAULT)

    @handles(ClusterEvent.WEIGHTS_DIFFER)
    def weights_differ(self, name: str, reason: str) -> list[Action]:
        """The files of a worker differ from the coordinator's checkpoint. The report may be about an older
        plan: the results of the worker may be wrong. It is quarantined until it rejoins, and plans that
        failed because of it or against its reference may be made again.
        """
        record = self.workers.find(name)
        if record is None or record.has_wrong_weights:
            return []
        record.quarantine(f"its weights differ: {reason}")
        record.has_wrong_weights, record.is_culprit = True, False
        self._choice.forget(name, self.workers)
        self._choice.forget_source(name, self.workers)
        if record.stage is None:
            return self._improve()
        return self._give_up_plan(f"worker {name}: {record.detail}", EndCause.FAULT)

    @handles(ClusterEvent.EPOCH_READY)
    def epoch_ready(self, name: str, epoch: int) -> list[Action]:
        """A stage has empty pools and is connected to the next one."""
        if epoch != self.epoch:
            return []
        self._readiness.note_ready(name)
        return self._maybe_serve()

    @handles(ClusterEvent.LINK_OPEN)
    def link_open(self, epoch: int) -> list[Action]:
        """FIRST has accepted the coordinator's stream."""
        if epoch != self.epoch:
            return []
        self._readiness.note_link()
        return self._maybe_serve()

    @handles(ClusterEvent.RESULTS_OPEN)
    def results_open(self, epoch: int) -> list[Action]:
        """LAST has opened its stream of results."""
        if epoch != self.epoch:
            return []
        self._readiness.note_results()
        return self._maybe_serve()

    @handles(ClusterEvent.EPOCH_LATE)
    def epoch_late(self, epoch: int, reason: str) -> list[Action]:
        """The epoch has not started in time: disconnects the stages that are not ready."""
        if epoch != self.epoch:
            return []
        late = [record for record in self.stage_workers if not self._readiness.is_ready(record.identity.name)]
        if 0 < len(late) < len(self.stage_workers):
            return [Disconnect(record.identity, reason) for record in late]
        return self._fail_epoch(epoch, reason)

    # Serving

    def result_arrived(self) -> None:
        """A result arrived in the current epoch."""
        self._failures.on_progress()

    def token_arrived(self) -> None:
        """A token arrived in the current epoch."""
        self._failures.on_token()

    @property
    def trouble(self) -> str:
        """Why epochs end without tokens; empty if they do not."""
        return self._failures.text if self.phase in ACTIVE else ""

    @handles(ClusterEvent.EPOCH_FAILED)
    def epoch_failed(self, epoch: int, reason: str, cause: EndCause = EndCause.BROKEN) -> list[Action]:
        """A step was refused, a stream broke, or the epoch started late. Older epochs are ignored."""
        return self._fail_epoch(epoch, reason, cause)

    def _fail_epoch(self, epoch: int, reason: str, cause: EndCause = EndCause.BROKEN) -> list[Action]:
        if epoch != self.epoch:
            return []
        if cause is EndCause.BROKEN and self._failures.record_break(reason):
            cause = EndCause.NO_PROGRESS
        return [StopServing(epoch, reason, cause), *self._begin_epoch(reason)]

    @handles(ClusterEvent.HOP_FAILED)
    def hop_failed(self, epoch: int, stage: int, reason: str) -> list[Action]:
        """`stage` does not reach the next one, which repeated failures exclude from the plan if possible."""
        if epoch != self.epoch:
            return []
        if stage + 1 < len(self.stage_workers):
            receiver = self.stage_workers[stage + 1]
            if self._failures.record_unreached(receiver.identity.name) and (
                actions := self._replan_without(receiver, reason, EndCause.REPLANNED)
            ):
                return actions
        return self._fail_epoch(epoch, reason)

    @handles(ClusterEvent.STAGE_FAILED)
    def stage_failed(self, fault: FaultReport) -> list[Action]:
        """A stage computed non-finite values. Repeated failures replan without it where possible."""
        if fault.epoch != self.epoch:
            return []
        if fault.stage < len(self.stage_workers):
            record = self.stage_workers[fault.stage]
            record.produced_non_finite = True
            if self._failures.record_non_finite(record.identity.name, fault.request_ids) and (
                actions := self._replan_without(record, str(fault), EndCause.FAULT)
            ):
                return actions
        return self._fail_epoch(fault.epoch, str(fault), EndCause.FAULT)

    def _replan_without(self, record: WorkerRecord, reason: str, cause: EndCause) -> list[Action]:
        """A plan without `record`; nothing if there is none."""
        record.is_left_out, record.detail = True, reason
        actions = self._move_from(reason, cause)
        if not actions:
            record.is_left_out, record.detail = False, ""
        return actions

    @handles(ClusterEvent.CHECKED)
    def checked(
        self, epoch: int, problem: str | None, *, stage: int | None = None, source: str = ""
    ) -> list[Action]:
        """The self-check in `epoch` ended. A good plan serves in a new epoch with empty pools; a plan with a
        `problem` is refused and the next best is tried. `stage` is the cause where it is known, and `source`
        the worker with whose reference the plan was compared.
        """
        if epoch != self.epoch or self.plan is None:
            return []
        if problem is None:
            self._checked_plan_id = self._plan_id
            self._choice.note_passed(self.plan, self.workers)
            self._failures.on_progress()
            return self._begin_epoch()
        worker = None if stage is None else self.plan.stages[stage].worker
        self._choice.note_failed(self.plan, problem, self.workers, cause=worker, source=source)
        actions = self._stop(f"the self-check {problem}", EndCause.FAULT)
        self.plan = None
        return actions + self._advance()

    @handles(ClusterEvent.REFERENCE_DROPPED)
    def reference_dropped(self, source: str) -> list[Action]:
        """The reference of a worker may be wrong: plans that failed against it may be made again."""
        self._choice.forget_source(source, self.workers)
        return self._advance() if self.phase is ClusterPhase.BLOCKED else []

    @handles(ClusterEvent.DOUBTED)
    def doubted(self, epoch: int, reason: str) -> list[Action]:
        """An idle check in `epoch` failed: the plan serves only after another self-check."""
        if epoch != self.epoch:
            return []
        self._checked_plan_id = 0
        return [StopServing(epoch, reason, EndCause.FAULT), *self._begin_epoch(reason)]

    # Plans

    def _give_up_plan(self, reason: str, cause: EndCause) -> list[Action]:
        actions = self._stop(reason, cause)
        self.plan = None
        return actions + self._advance(reason)

    def _stop(self, reason: str, cause: EndCause) -> list[Action]:
        return [StopServing(self.epoch, reason, cause)] if self.phase in ACTIVE else []

    def _advance(self, reason: str = "") -> list[Action]:
        """Makes a plan if there is none and one is possible."""
        if self.plan is not None:
            return []
        try:
            plan = self._next_plan()
        except TooFewWorkers as error:
            is_blocked, text = bool(self.workers.quarantine), str(error)
        except PlanImpossible as error:
            is_blocked, text = True, str(error)
        else:
            return self._assign(plan)
        self.phase = ClusterPhase.BLOCKED if is_blocked else ClusterPhase.WAITING_FOR_WORKERS
        self.detail = f"{reason}; {text}" if reason else text
        self.workers.release_stages()
        return self._dismiss()

    def _improve(self) -> list[Action]:
        """Uses a worker that has become usable: for a first plan, in place of a draining one, or for an
        additional stage.
        """
        if self.plan is None:
            return self._advance()
        for record in self.stage_workers:
            reason = f"worker {record.identity.name} is drained"
            if record.is_draining and (actions := self._move_from(reason)):
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

    def _move_from(self, reason: str, cause: EndCause = EndCause.REPLANNED) -> list[Action]:
        """Replans without the workers that are no longer usable; nothing if there is no plan."""
        try:
            plan = self._new_plan(may_shrink=True)
        except (PlanImpossible, TooFewWorkers):
            return []
        return self._stop(reason, cause) + self._assign(plan)

    def _next_plan(self) -> Plan:
        """Uses held workers only where needed. Raises TooFewWorkers or PlanImpossible."""
        try:
            return self._new_plan(may_shrink=not self._rejoin_timer.is_running)
        except (PlanImpossible, TooFewWorkers):
            if not any(record.is_held for record in self.workers) or self._can_replan_without_held():
                raise
        return self._choice.best(self.workers, may_shrink=self._may_shrink, uses_held=True)

    def _can_replan_without_held(self) -> bool:
        """Once the grace of lost workers is over."""
        try:
            self._new_plan(may_shrink=True)
        except (PlanImpossible, TooFewWorkers):
            return False
        return True

    def _new_plan(self, *, may_shrink: bool) -> Plan:
        return self._choice.best(self.workers, may_shrink=may_shrink and self._may_shrink)

    @property
    def _may_shrink(self) -> bool:
        return self.has_served or self._has_drained

    def _assign(self, plan: Plan) -> list[Action]:
        self.workers.release_stages()
        self.plan = plan
        self._choice.keep_places(plan)
        self._rejoin_timer.is_running = False
        self._plan_id += 1
        self._failures.start_over()
        self.phase, self.detail = ClusterPhase.LOADING, "workers are loading their layers"
        actions: list[Action] = []
        for stage in plan.stages:
            record = self.workers[stage.worker]
            record.state, record.stage = WorkerState.LOADING, stage
            force_reload = bool(record.doubts) or record.produced_non_finite
            actions.append(AssignStage(record.identity, self._plan_id, plan, stage, force_reload))
        return actions + self._dismiss()

    def _dismiss(self) -> list[Action]:
        """Lets draining workers without a stage exit, once each."""
        return [LetGo(record.identity, "drained") for record in self.workers.dismiss()]

    def _begin_epoch(self, reason: str = "") -> list[Action]:
        assert self.plan is not None
        workers = tuple(record.identity for record in self.stage_workers)
        self.epoch = max(self.epoch, *(worker.last_epoch for worker in workers)) + 1
        self._readiness.clear()
        self.phase = ClusterPhase.STARTING_EPOCH
        self.detail = f"starting epoch {self.epoch}" + (f": {reason}" if reason else "")
        delay_s = self._failures.next_delay_s()
        return [BeginEpoch(self.epoch, self._plan_id, self.plan, workers, delay_s, self._is_unchecked)]

    @property
    def _is_unchecked(self) -> bool:
        """The plan has to pass a self-check before it serves."""
        return self._needs_check and self._checked_plan_id != self._plan_id and not self.has_mock_stages

    def _maybe_serve(self) -> list[Action]:
        """Nothing, until every sign of the epoch is there."""
        assert self.plan is not None
        if not self._readiness.are_complete({stage.worker for stage in self.plan.stages}):
            return []
        if self._is_unchecked:
            self.phase, self.detail = ClusterPhase.CHECKING, "the self-check is under way"
            return [CheckPlan(self.epoch, self.plan)]
        self.phase, self.has_served = ClusterPhase.SERVING, True
        self.detail = ""
        if len(self.plan.stages) == self.num_stages:
            self.workers.forget_lost()
        else:
            shrunk = f"with {len(self.plan.stages)} of {self.num_stages} stages"
            self.detail = f"{shrunk}{self.workers.missed}{self.workers.quarantine}"
        return [StartServing(self.epoch, self.plan)]
