"""The actions of the cluster are valid for any order of events."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.cluster.actions import (
    Action,
    AssignStage,
    BeginEpoch,
    Disconnect,
    DismissWorker,
    FinishRunning,
    StartServing,
    StopServing,
)
from coordinator.cluster.membership import WorkerIdentity, WorkerRecord, WorkerState
from coordinator.cluster.transitions import ClusterPhase
from coordinator.recovery.policy import DEFAULT_POLICY
from coordinator.recovery.rejoin import GraceExpired, StartTimer, Timer
from tests.properties import examples
from tests.unit.coordinator.cluster.cluster_driver import ClusterDriver

names = st.sampled_from(["a", "b", "c", "d", "gpu-2", "gpu-10"])
places = st.integers(0, 63)

ACTIVE = (ClusterPhase.STARTING_EPOCH, ClusterPhase.SERVING)
WITHOUT_PLAN = (ClusterPhase.WAITING_FOR_WORKERS, ClusterPhase.BLOCKED)


class ClusterEvents(RuleBasedStateMachine):
    """Workers that join, load, fail and leave at random, and a check of every decision."""

    @initialize(
        num_stages=st.integers(1, 4),
        max_stages=st.integers(1, 6),
        needed_bytes=st.sampled_from([0, 0, 250]),
        num_joined=st.integers(0, 4),
    )
    def start(self, num_stages: int, max_stages: int, needed_bytes: int, num_joined: int) -> None:
        self.cluster = ClusterDriver(num_stages=num_stages, max_stages=max_stages, needed_bytes=needed_bytes)
        self.state = self.cluster.state
        self.num_stages, self.most_stages = num_stages, max(num_stages, max_stages)
        self.epochs: list[int] = []
        self.in_force: int | None = None
        self.served: set[int] = set()
        self.serving: int | None = None
        self.num_without_result = 0
        self.last_delay_s = 0.0
        self.num_incarnations = 0
        self.plan_id = 0
        self.assigned: list[AssignStage] = []
        self.timers: list[Timer] = []
        self.dismissed: set[WorkerIdentity] = set()
        self.finishing: list[WorkerIdentity] = []
        for name in "abcd"[:num_joined]:
            self.join(name, 100, 0)
        self.serve()

    # Events

    @rule(name=names, memory_bytes=st.sampled_from([50, 100, 200]), last_epoch=st.integers(0, 9))
    def join(self, name: str, memory_bytes: int, last_epoch: int) -> None:
        self.num_incarnations += 1
        actions = self.cluster.join(
            name,
            incarnation=self.num_incarnations,
            memory_bytes=memory_bytes,
            last_epoch=max(0, self.state.epoch + last_epoch - 8),
        )
        self.check(actions)

    @rule(name=names)
    def lose(self, name: str) -> None:
        if name in self.state.workers:
            self.check(self.cluster.lose(name))

    @rule(name=names, is_silent=st.booleans())
    def set_silent(self, name: str, is_silent: bool) -> None:
        record = self.state.workers.find_live(name)
        if record is not None:
            self.state.workers.set_silent(name, record.identity.incarnation, is_silent=is_silent)
            assert record.is_silent == is_silent

    @rule()
    def on_steady(self) -> None:
        self.state.on_steady()

    @rule(name=names)
    def drain(self, name: str) -> None:
        self.check(self.state.drain(name))

    @precondition(lambda self: self.finishing)
    @rule(place=places)
    def drained(self, place: int) -> None:
        """Including workers lost meanwhile."""
        worker = self.finishing.pop(place % len(self.finishing))
        self.check(self.state.drained(worker.name, worker.incarnation))

    @precondition(lambda self: self.timers)
    @rule(place=places, is_kept=st.booleans())
    def elapsed(self, place: int, is_kept: bool) -> None:
        """Includes stale timers, sometimes twice."""
        timer = self.timers[place % len(self.timers)]
        if not is_kept:
            self.timers.remove(timer)
        self.check(self.state.elapsed(timer))

    @rule()
    def load_all(self) -> None:
        self.check(self.cluster.load_all())

    @rule(kind=st.sampled_from(["loaded", "load_failed", "epoch_ready"]), name=names, age=st.integers(0, 1))
    def report_of_a_worker(self, kind: str, name: str, age: int) -> None:
        """Including late reports, and reports of workers without a stage."""
        match kind:
            case "loaded":
                self.check(self.state.loaded(name, self.plan_id - age))
            case "load_failed":
                self.check(self.state.load_failed(name, self.plan_id - age, "no such file"))
            case _:
                self.check(self.state.epoch_ready(name, self.state.epoch - age))

    @rule(age=st.integers(0, 1), is_link=st.booleans())
    def report_of_a_stream(self, age: int, is_link: bool) -> None:
        opened = self.state.link_open if is_link else self.state.results_open
        self.check(opened(self.state.epoch - age))

    @rule(place=places)
    def stage_fails_to_load(self, place: int) -> None:
        if stage_names := self.cluster.stage_names:
            name = stage_names[place % len(stage_names)]
            self.check(self.state.load_failed(name, self.plan_id, "no such file"))

    @rule(place=places)
    def lose_a_stage(self, place: int) -> None:
        if stage_names := self.cluster.stage_names:
            self.check(self.cluster.lose(stage_names[place % len(stage_names)]))

    @rule()
    def serve(self) -> None:
        self.check(self.cluster.load_all())
        self.check(self.cluster.get_ready())

    @rule(age=st.sampled_from([0, 0, 0, 1]))
    def epoch_failed(self, age: int) -> None:
        actions = self.state.epoch_failed(self.state.epoch - age, "fault")
        assert not (age and actions)
        self.check(actions)

    @rule(age=st.sampled_from([0, 0, 0, 1]), stage=st.integers(0, 3))
    def hop_failed(self, age: int, stage: int) -> None:
        actions = self.state.hop_failed(self.state.epoch - age, stage, "cannot reach the next stage")
        assert not (age and actions)
        self.check(actions)

    @rule(age=st.sampled_from([0, 0, 0, 1]))
    def epoch_late(self, age: int) -> None:
        actions = self.state.epoch_late(self.state.epoch - age, "late")
        assert not (age and actions)
        disconnected = [action for action in actions if isinstance(action, Disconnect)]
        staged = {worker.identity for worker in self.state.stage_workers}
        assert {action.worker for action in disconnected} < staged or not disconnected
        self.check(actions)
        for action in disconnected:
            self.check(self.state.lose(action.worker.name, action.worker.incarnation, action.reason))

    @rule()
    def result_arrives(self) -> None:
        if self.serving is not None:
            self.state.result_arrived()
            self.num_without_result = 0
            self.last_delay_s = 0.0

    # Invariants

    def check(self, actions: list[Action]) -> None:
        self.assigned = []
        for action in actions:
            match action:
                case AssignStage():
                    self.check_assign(action)
                case BeginEpoch():
                    self.check_begin(action)
                case StopServing():
                    assert action.epoch == self.in_force, "stopped what is not in force"
                    assert action.reason
                    self.serving = self.in_force = None
                case StartServing():
                    assert action.epoch == self.in_force
                    assert action.epoch not in self.served, "served twice"
                    self.served.add(action.epoch)
                    self.serving = action.epoch
                case StartTimer():
                    assert action.delay_s > 0
                    self.timers.append(action.timer)
                case DismissWorker():
                    assert action.worker not in self.dismissed, "dismissed twice"
                    record = self.state.workers[action.worker.name]
                    assert record.is_draining and record.stage is None
                    self.dismissed.add(action.worker)
                case FinishRunning():
                    assert self.state.workers[action.worker.name].stage is not None
                    self.finishing.append(action.worker)
                case Disconnect():
                    assert action.reason
        assert len({action.plan_id for action in self.assigned}) <= 1, "two plans at once"
        if self.assigned:
            plan = self.assigned[0].plan
            assert tuple(action.stage for action in self.assigned) == plan.stages
            assert self.state.plan is plan

    def check_assign(self, assign: AssignStage) -> None:
        assert self.in_force is None, "assigned while an epoch is in force"
        assert assign.plan_id > self.plan_id or self.assigned, "an old plan"
        record = self.state.workers[assign.worker.name]
        assert record.identity is assign.worker
        assert not record.is_draining and not record.is_avoided
        assert record.state is WorkerState.LOADING
        self.assigned.append(assign)
        self.num_without_result, self.last_delay_s = 0, 0.0
        self.plan_id = assign.plan_id

    def check_begin(self, begin: BeginEpoch) -> None:
        assert self.in_force is None, "a new epoch while another is in force"
        assert begin.epoch > max(self.epochs, default=0)
        assert all(begin.epoch > worker.last_epoch for worker in begin.workers)
        assert [worker.name for worker in begin.workers] == [stage.worker for stage in begin.plan.stages]
        assert begin.plan_id == self.plan_id
        self.epochs.append(begin.epoch)
        self.in_force = begin.epoch
        if self.num_without_result == 0:
            assert begin.delay_s == 0
        else:
            assert self.last_delay_s < begin.delay_s or begin.delay_s == DEFAULT_POLICY.max_epoch_delay_s
        self.num_without_result += 1
        self.last_delay_s = begin.delay_s

    @property
    def usable(self) -> list[WorkerRecord]:
        return [worker for worker in self.state.workers if worker.is_usable]

    @invariant()
    def an_epoch_is_in_force_while_its_workers_are_live(self) -> None:
        state = self.state
        assert (state.phase in ACTIVE) == (self.in_force is not None)
        assert (state.phase is ClusterPhase.SERVING) == (self.serving is not None)
        if self.in_force is not None:
            assert self.in_force == state.epoch
            assert all(worker.state is WorkerState.READY for worker in state.stage_workers)

    @invariant()
    def the_plan_is_no_longer_than_asked_for_and_everybody_of_it_is_live(self) -> None:
        assert all(worker.is_live for worker in self.state.stage_workers)
        if self.state.plan is not None:
            assert 1 <= len(self.state.stage_workers) <= self.most_stages
        assert self.num_stages <= self.state.num_stages <= self.most_stages

    @invariant()
    def a_plan_is_there_unless_workers_are_missing(self) -> None:
        state = self.state
        assert (state.plan is None) == (state.phase in WITHOUT_PLAN)
        least = state.num_stages if state.has_served else self.num_stages
        if state.plan is None and len(self.usable) >= least:
            assert "needed" in state.detail, "a full set of workers waits"

    @invariant()
    def waiting_for_workers_has_a_timer_or_no_usable_worker(self) -> None:
        """After the first serving epoch, a timer bounds the wait for missing workers."""
        state = self.state
        if not state.has_served or state.plan is not None or not self.usable:
            return
        has_timer = GraceExpired(state._rejoin_timer._num_losses) in self.timers
        assert has_timer or "needed" in state.detail, "waits endlessly"

    @invariant()
    def a_plan_that_could_be_longer_is_made_longer(self) -> None:
        """Memory is not a limit here."""
        state = self.state
        if state.plan is not None and self.cluster.needed_bytes == 0:
            assert len(state.plan.stages) >= min(self.most_stages, len(self.usable))

    @invariant()
    def each_worker_has_one_place(self) -> None:
        stage_names = self.cluster.stage_names
        assert len(set(stage_names)) == len(stage_names)
        for record in self.state.workers:
            name = record.identity.name
            assert self.state.workers[name] is record
            assert record.is_live, "a lost worker is kept"
            assert (record.stage is not None) == (name in stage_names)
            assert (record.state in (WorkerState.LOADING, WorkerState.READY)) == (name in stage_names)

    @invariant()
    def draining_workers_are_dismissed_or_finish(self) -> None:
        for record in self.state.workers:
            if record.is_draining:
                is_dismissed = record.identity in self.dismissed
                assert is_dismissed == (record.stage is None), "a worker that drains is stuck"


TestClusterEvents = ClusterEvents.TestCase
TestClusterEvents.settings = settings(max_examples=examples(1.5), stateful_step_count=50)
