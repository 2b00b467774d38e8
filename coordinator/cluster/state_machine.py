"""Cluster phases, members and plan: events in, actions out. Pure.

`coordinator.cluster.transitions` has the table of phases that it executes.
"""

from collections.abc import Collection, Mapping, Sequence

from coordinator.cluster.actions import (
    Action,
    AssignStage,
    BeginEpoch,
    CheckPlan,
    Disconnect,
    DismissWorker,
    FinishRunning,
    StartServing,
    StopServing,
)
from coordinator.cluster.membership import Members, WorkerIdentity, WorkerRecord, WorkerState
from coordinator.cluster.plan_choice import MakePlan, PlanChoice, TooFewWorkers, name_key
from coordinator.cluster.transitions import ClusterEvent, ClusterPhase, handles
from coordinator.cluster.worker_order import WorkerOrder
from coordinator.engine.observer import EndCause
from coordinator.planner.links import Link, LinkTable
from coordinator.planner.plan import Plan, PlanImpossible, StagePlan
from coordinator.recovery.policy import RecoveryPolicy
from coordinator.recovery.rejoin import (
    FailureCounters,
    GraceExpired,
    HoldExpired,
    LinksOverdue,
    RejoinTimer,
    StartTimer,
    Timer,
)
from wire.ids import Incarnation
from wire.steps import FaultReport

ACTIVE = (ClusterPhase.STARTING_EPOCH, ClusterPhase.CHECKING, ClusterPhase.SERVING)
"""Phases with a current epoch."""


class EpochReadiness:
    """Readiness of the current epoch.

    It is complete when every stage is ready, FIRST has accepted the step stream, and LAST has opened the
    result stream.
    """

    def __init__(self) -> None:
        self._ready: set[str] = set()
        self._is_link_open = False
        self._are_results_open = False

    def clear(self) -> None:
        """Reset for a new epoch."""
        self._ready.clear()
        self._is_link_open = self._are_results_open = False

    def set_ready(self, worker: str) -> None:
        self._ready.add(worker)

    def set_link_open(self) -> None:
        self._is_link_open = True

    def set_results_open(self) -> None:
        self._are_results_open = True

    def is_ready(self, worker: str) -> bool:
        """Whether the stage has empty pools and is connected to the next one."""
        return worker in self._ready

    def are_complete(self, workers: Collection[str]) -> bool:
        return self._ready.issuperset(workers) and self._is_link_open and self._are_results_open


class ClusterState:
    """State machine of the cluster. Its owner passes it events and carries out the returned actions in order.

    Until the cluster has served or a worker has drained, a plan has at least `num_stages` stages. Later plans
    have fewer stages while there are fewer workers. More workers are more stages, up to the policy's
    `max_stages`.
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
        order: WorkerOrder | None = None,
    ) -> None:
        """
        Args:
            make_plan: receives workers in stage order; may raise PlanImpossible.
            last_epoch: new epochs are above it, and above those that workers have seen.
            has_served: the cluster served before a restart; its workers have time to rejoin.
            needs_check: plans serve only after a self-check.
            order: of workers, by default by name; the first plan waits until they have measured links.
        """
        self.phase = ClusterPhase.WAITING_FOR_WORKERS
        self.detail = f"0 of {num_stages} workers joined"
        self._reason = ""  # for which the last plan ended, as part of `detail`
        self.epoch = last_epoch
        self.end_cause: EndCause | None = None  # of the last epoch that ended
        self.plan: Plan | None = None
        self.workers = Members(policy)
        self.has_served = has_served
        self._order = order or WorkerOrder(by_links=False)
        self._choice = PlanChoice(num_stages, make_plan, policy, self._in_order)
        self._policy = policy
        self._needs_check = needs_check
        self._checked_plan_id = 0
        self._is_mock_model = is_mock_model  # without weights: only mock stages can serve it
        self._rejoin_timer = RejoinTimer(policy)
        self._has_drained = False
        self._plan_id = 0
        self._readiness = EpochReadiness()
        self._failures = FailureCounters(policy)

    @property
    def num_stages(self) -> int:
        """Stages of a complete plan: as configured, of the largest one that served, or of the present one."""
        return max(self._choice.num_stages, 0 if self.plan is None else len(self.plan.stages))

    @property
    def stage_workers(self) -> tuple[WorkerRecord, ...]:
        """The workers of the current plan, in stage order; empty without a plan."""
        return () if self.plan is None else tuple(self.workers[stage.worker] for stage in self.plan.stages)

    def stage_of(self, worker: str) -> StagePlan | None:
        """The stage of a live worker in the current plan."""
        record = self.workers.find_live(worker)
        return None if record is None else record.stage

    def stages_after_loss(self, lost: str) -> list[StagePlan]:
        """Stages that workers without one would get by the loss of this worker, which takes a plan."""
        try:
            plan = self._choice.best(self.workers.without(lost), may_shrink=self._may_shrink)
        except (PlanImpossible, TooFewWorkers):
            return []
        return [stage for stage in plan.stages if self.workers[stage.worker].stage is None]

    def _in_order(self, names: Sequence[str]) -> list[str]:
        hosts = {name: self.workers[name].identity.hosts for name in names if name in self.workers}
        return self._order.of(names, hosts)

    def links_measured(self, name: str, measured: Mapping[str, Link]) -> list[Action]:
        """A worker measured its ways to others: make the first plan, or while it loads put it into order."""
        if self._order.measured(name, measured) and self.plan is None:
            return self._advance()
        if self.plan is None or self.has_served or self.phase is not ClusterPhase.LOADING:
            return []
        names = [stage.worker for stage in self.plan.stages]
        if self._in_order(sorted(names, key=name_key)) == names:
            return []
        self._choice.forget_places()
        return self._replan("the links between workers were measured")

    def start(self) -> list[Action]:
        """Actions before the first event."""
        return [self._rejoin_timer.await_all()] if self.has_served else []

    @property
    def links(self) -> LinkTable:
        """Measured links between workers."""
        return self._order.links

    @property
    def plan_id(self) -> int:
        """Number of the current plan, or of the last one."""
        return self._plan_id

    @property
    def has_mock_stages(self) -> bool:
        """Whether the plan has mock stages."""
        return any(record.identity.is_mock for record in self.stage_workers)

    # Membership

    @handles(ClusterEvent.JOIN)
    def join(self, identity: WorkerIdentity) -> list[Action]:
        """A worker joined; it replaces a worker of the same name.

        Raises:
            HandshakeMismatch: a mock stage among real ones, or a real one among mocks.
        """
        self.workers.check_may_join(identity, is_mock_model=self._is_mock_model)
        known = self.workers.find_live(identity.name)
        had_stage = known is not None and known.stage is not None
        actions: list[Action] = []
        if known is not None:
            known.is_silent = False
            actions = self._remove_lost(known, "replaced by a new process", EndCause.DEATH)
        hold_s = self.workers.add(identity)
        self._choice.forget(identity.name, self.workers)
        if not self.has_served:
            present = (other.identity for other in self.workers if other.is_live)
            actions += self._order.joined(identity, present)
        if hold_s:
            actions.append(StartTimer(hold_s, HoldExpired(identity.name, identity.incarnation)))
        actions += self._advance() if hold_s else self._improve()
        return actions + (self._start_rejoin_timer() if had_stage else [])

    @handles(ClusterEvent.ELAPSED)
    def elapsed(self, timer: Timer) -> list[Action]:
        """A timer expired; outdated timers are ignored."""
        match timer:
            case HoldExpired(name, incarnation):
                return self._improve() if self.workers.release(name, incarnation) else []
            case GraceExpired():
                return self._advance(self._reason) if self._rejoin_timer.end(timer) else []
            case LinksOverdue(name, incarnation):
                return self._advance() if self._order.overdue(name, incarnation) else []

    @handles(ClusterEvent.LOSE)
    def lose(
        self, name: str, incarnation: Incarnation, reason: str, cause: EndCause = EndCause.DEATH
    ) -> list[Action]:
        """A worker's stream broke, its lease expired, or its device failed.

        Events of an older incarnation are ignored.
        """
        record = self.workers.find_process(name, incarnation)
        if record is None:
            return []
        had_stage = record.stage is not None
        actions = self._remove_lost(record, reason, cause)
        # A plan without it may be possible; otherwise `detail` has a new number of workers.
        actions += self._advance(f"worker {name} is lost: {reason}" if had_stage else "")
        return actions + (self._start_rejoin_timer() if had_stage else [])

    def _remove_lost(self, record: WorkerRecord, reason: str, cause: EndCause) -> list[Action]:
        """Remove a lost worker, and the plan if it had a stage."""
        name = record.identity.name
        self._order.lost(name)
        record.state, record.detail = WorkerState.LOST, reason
        if record.stage is None:
            self.workers.remove(name)
            return []
        self.workers.record_loss(name)
        self.workers.readmit_avoided()
        # A worker that was silent for its whole lease will not rejoin within the grace.
        self._rejoin_timer.record_loss(is_granted=self._may_shrink and not record.is_silent)
        actions = self._stop(f"worker {name} is lost: {reason}", cause)
        self.plan = None
        return actions

    def _start_rejoin_timer(self) -> list[Action]:
        return [self._rejoin_timer.timer()] if self.plan is None and self._rejoin_timer.is_running else []

    @handles(ClusterEvent.DRAIN)
    def drain(self, name: str) -> list[Action]:
        """Drain a worker: move its layers, or finish running requests if no worker can take them."""
        record = self.workers.find_live(name)
        if record is None or record.is_draining:
            return []
        record.is_draining = True
        if record.stage is None:
            return self._dismiss()
        self._has_drained = True
        self._choice.record_drained()
        return self._replan(f"worker {name} is drained") or [FinishRunning(record.identity)]

    @handles(ClusterEvent.DRAINED)
    def drained(self, name: str, incarnation: Incarnation) -> list[Action]:
        """The running requests have finished for which a draining worker waited."""
        record = self.workers.find_process(name, incarnation)
        if record is None or not record.is_draining or record.stage is None:
            return []
        return self._abandon_plan(f"worker {name} is drained", EndCause.REPLANNED)

    def on_window(self) -> None:
        """A steady window passed, with or without losses."""
        self.workers.halve_losses()

    def on_steady(self) -> None:
        """A steady window passed without a loss or an ended epoch."""
        self.workers.on_steady()
        self._failures.on_steady()

    # Loading and starting

    @handles(ClusterEvent.LOADED)
    def loaded(self, name: str, plan_id: int) -> list[Action]:
        """A worker has loaded and warmed up its stage."""
        record = self.workers.find_live(name)
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
        record = self.workers.find_live(name)
        if record is None or plan_id != self._plan_id or record.state is not WorkerState.LOADING:
            return []
        is_out = record.fail_to_load(reason, max_failures=1 if is_final else self._policy.max_failed_loads)
        return self._abandon_plan("" if is_out else f"worker {name} {record.detail}", EndCause.FAULT)

    @handles(ClusterEvent.WEIGHTS_DIFFER)
    def weights_differ(self, name: str, reason: str) -> list[Action]:
        """The weights of a worker differ from the coordinator's checkpoint: quarantine it until it rejoins.

        A report about an older plan counts too, because the worker's results may be wrong. Plans that failed
        because of the worker or its reference may be tried again.
        """
        record = self.workers.find_live(name)
        if record is None or record.has_wrong_weights:
            return []
        record.quarantine(f"its weights differ: {reason}")
        record.has_wrong_weights, record.is_culprit = True, False
        self._choice.forget(name, self.workers)
        self._choice.forget_source(name, self.workers)
        if record.stage is None:
            return self._improve()
        return self._abandon_plan(f"worker {name}: {record.detail}", EndCause.FAULT)

    @handles(ClusterEvent.EPOCH_READY)
    def epoch_ready(self, name: str, epoch: int) -> list[Action]:
        """A stage has empty pools and is connected to the next one."""
        if epoch != self.epoch:
            return []
        self._readiness.set_ready(name)
        return self._serve_if_ready()

    @handles(ClusterEvent.LINK_OPEN)
    def link_open(self, epoch: int) -> list[Action]:
        """FIRST accepted the step stream."""
        if epoch != self.epoch:
            return []
        self._readiness.set_link_open()
        return self._serve_if_ready()

    @handles(ClusterEvent.RESULTS_OPEN)
    def results_open(self, epoch: int) -> list[Action]:
        """LAST opened the result stream."""
        if epoch != self.epoch:
            return []
        self._readiness.set_results_open()
        return self._serve_if_ready()

    @handles(ClusterEvent.EPOCH_LATE)
    def epoch_late(self, epoch: int, reason: str) -> list[Action]:
        """The epoch did not start in time: disconnect the stages that are not ready."""
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
        """A step was refused, a stream broke, or the epoch started late; older epochs are ignored."""
        return self._fail_epoch(epoch, reason, cause)

    def _fail_epoch(self, epoch: int, reason: str, cause: EndCause = EndCause.BROKEN) -> list[Action]:
        if epoch != self.epoch:
            return []
        if cause is EndCause.BROKEN and self._failures.record_break(reason):
            cause = EndCause.NO_PROGRESS
        return self._stop(reason, cause) + self._begin_epoch(reason)

    @handles(ClusterEvent.HOP_FAILED)
    def hop_failed(self, epoch: int, stage: int, reason: str) -> list[Action]:
        """`stage` cannot reach the next one; after repeated failures, plans avoid that one."""
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
        """A stage computed non-finite values; after repeated failures, plans avoid its worker if possible."""
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
        """Replan without `record`; no actions if that is impossible."""
        record.is_avoided, record.detail = True, reason
        actions = self._replan(reason, cause)
        if not actions:
            record.is_avoided, record.detail = False, ""
        return actions

    @handles(ClusterEvent.CHECKED)
    def checked(
        self, epoch: int, problem: str | None, *, stage: int | None = None, source: str = ""
    ) -> list[Action]:
        """The self-check in `epoch` ended.

        A plan without a `problem` serves in a new epoch with empty pools. Otherwise it is refused and the
        next best plan is tried. `stage` is the cause, if known; `source` is the worker whose reference was
        used.
        """
        if epoch != self.epoch or self.plan is None:
            return []
        if problem is None:
            self._checked_plan_id = self._plan_id
            self._choice.record_passed(self.plan, self.workers)
            self._failures.on_progress()
            return self._begin_epoch()
        worker = None if stage is None else self.plan.stages[stage].worker
        self._choice.record_failed(self.plan, problem, self.workers, cause=worker, source=source)
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
        return self._stop(reason, EndCause.FAULT) + self._begin_epoch(reason)

    # Plans

    def _abandon_plan(self, reason: str, cause: EndCause) -> list[Action]:
        actions = self._stop(reason, cause)
        self.plan = None
        return actions + self._advance(reason)

    def _stop(self, reason: str, cause: EndCause) -> list[Action]:
        if self.phase not in ACTIVE:
            return []
        self.end_cause = cause
        return [StopServing(self.epoch, reason, cause)]

    def _advance(self, reason: str = "") -> list[Action]:
        """Make and assign a plan if there is none."""
        if self.plan is not None:
            return []
        self._reason = reason
        try:
            plan = self._next_plan()
        except TooFewWorkers as error:
            is_blocked, text = bool(self.workers.quarantine_text), str(error)
        except PlanImpossible as error:
            is_blocked, text = True, str(error)
        else:
            if not self._order.awaited:
                return self._assign(plan)
            is_blocked, text = False, f"links to others are measured by {self._order.awaited}"
        self.phase = ClusterPhase.BLOCKED if is_blocked else ClusterPhase.WAITING_FOR_WORKERS
        self.detail = text if text.startswith(reason) else f"{reason}; {text}"
        self.workers.release_stages()
        return self._dismiss()

    def _improve(self) -> list[Action]:
        """Use a worker that became usable: for a first plan, for a draining worker, or as another stage."""
        if self.plan is None:
            return self._advance()
        for record in self.stage_workers:
            reason = f"worker {record.identity.name} is drained"
            if record.is_draining and (actions := self._replan(reason)):
                return actions
        if len(self.plan.stages) == self._choice.max_stages:
            return []
        try:
            plan = self._new_plan(may_shrink=True)
        except (PlanImpossible, TooFewWorkers):
            return []
        if len(plan.stages) <= len(self.plan.stages):
            return []
        reason = f"{len(plan.stages)} workers instead of {len(self.plan.stages)}"
        return self._stop(reason, EndCause.REPLANNED) + self._assign(plan)

    def _replan(self, reason: str, cause: EndCause = EndCause.REPLANNED) -> list[Action]:
        """Replan with the usable workers; no actions if that is impossible."""
        try:
            plan = self._new_plan(may_shrink=True)
        except (PlanImpossible, TooFewWorkers):
            return []
        return self._stop(reason, cause) + self._assign(plan)

    def _next_plan(self) -> Plan:
        """The next plan, with held workers only if needed. Raises TooFewWorkers or PlanImpossible."""
        try:
            return self._new_plan(
                may_shrink=not self._rejoin_timer.is_running, awaits_all=self._rejoin_timer.awaits_all
            )
        except (PlanImpossible, TooFewWorkers):
            if not any(record.is_held for record in self.workers) or self._can_replan_without_held():
                raise
        return self._choice.best(self.workers, may_shrink=self._may_shrink, uses_held=True)

    def _can_replan_without_held(self) -> bool:
        """Whether a plan without held workers will be possible after the rejoin grace."""
        try:
            self._new_plan(may_shrink=True)
        except (PlanImpossible, TooFewWorkers):
            return False
        return True

    def _new_plan(self, *, may_shrink: bool, awaits_all: bool = False) -> Plan:
        return self._choice.best(
            self.workers, may_shrink=may_shrink and self._may_shrink, awaits_all=awaits_all
        )

    @property
    def _may_shrink(self) -> bool:
        return self.has_served or self._has_drained

    def _assign(self, plan: Plan) -> list[Action]:
        self.workers.release_stages()
        self.plan = plan
        self._choice.keep_places(plan)
        self._rejoin_timer.is_running = False
        self._plan_id += 1
        self._failures.reset_plan()
        self.phase, self.detail = ClusterPhase.LOADING, "workers are loading their layers"
        actions: list[Action] = []
        for stage in plan.stages:
            record = self.workers[stage.worker]
            record.state, record.stage = WorkerState.LOADING, stage
            force_reload = bool(record.doubts) or record.produced_non_finite
            actions.append(AssignStage(record.identity, self._plan_id, plan, stage, force_reload))
        return actions + self._dismiss()

    def _dismiss(self) -> list[Action]:
        """Dismiss draining workers without a stage, once each."""
        return [DismissWorker(record.identity, "drained") for record in self.workers.dismiss()]

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
        """Whether the plan must pass a self-check before it serves."""
        return self._needs_check and self._checked_plan_id != self._plan_id and not self.has_mock_stages

    def _serve_if_ready(self) -> list[Action]:
        """Serve or check the plan if the epoch is ready; otherwise no actions."""
        assert self.plan is not None
        if not self._readiness.are_complete({stage.worker for stage in self.plan.stages}):
            return []
        if self._is_unchecked:
            self.phase, self.detail = ClusterPhase.CHECKING, "the self-check is running"
            return [CheckPlan(self.epoch, self.plan)]
        self.phase, self.has_served = ClusterPhase.SERVING, True
        self._choice.record_served(self.plan)
        self.detail = ""
        if len(self.plan.stages) == self.num_stages:
            self.workers.forget_lost()
        else:
            shrunk = f"with {len(self.plan.stages)} of {self.num_stages} stages"
            self.detail = f"{shrunk}{self.workers.lost_text}{self.workers.quarantine_text}"
        return [StartServing(self.epoch, self.plan)]
