"""Whatever order events come in, the actions of the cluster make sense."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coordinator.cluster.actions import Action, AssignStage, BeginEpoch, StartServing, StopServing
from coordinator.cluster.cluster_state import MAX_EPOCH_DELAY_S, ClusterPhase
from coordinator.cluster.membership import WorkerState
from tests.unit.coordinator.cluster.cluster_driver import ClusterDriver
from wire.errors import NameInUse

names = st.sampled_from(["a", "b", "c", "d", "gpu-2", "gpu-10"])


class ClusterEvents(RuleBasedStateMachine):
    """Workers that come, load, fault and go at random, and a witness of what is decided."""

    @initialize(num_stages=st.integers(1, 4), needed_bytes=st.sampled_from([0, 250]))
    def start(self, num_stages: int, needed_bytes: int) -> None:
        self.cluster = ClusterDriver(num_stages=num_stages, needed_bytes=needed_bytes)
        self.epochs: list[int] = []
        self.served: set[int] = set()
        self.serving: int | None = None
        self.num_fruitless = 0
        self.last_delay_s = 0.0
        self.num_incarnations = 0
        self.plan_id = 0

    # Events

    @rule(name=names, memory_bytes=st.sampled_from([50, 100, 200]), last_epoch=st.integers(0, 9))
    def join(self, name: str, memory_bytes: int, last_epoch: int) -> None:
        self.num_incarnations += 1
        actions = self.cluster.join(
            name,
            incarnation=self.num_incarnations,
            memory_bytes=memory_bytes,
            last_epoch=max(0, self.cluster.state.epoch + last_epoch - 8),
        )
        self.check(actions)

    @rule(name=names)
    def join_from_elsewhere(self, name: str) -> None:
        if name in self.cluster.state.workers:
            phase = self.cluster.state.phase
            with pytest.raises(NameInUse):
                self.cluster.join(name, address="elsewhere:1", incarnation=0)
            assert self.cluster.state.phase is phase

    @rule(name=names)
    def lose(self, name: str) -> None:
        if name in self.cluster.state.workers:
            self.check(self.cluster.lose(name))

    @rule(name=names, is_late=st.booleans())
    def loaded(self, name: str, is_late: bool) -> None:
        self.check(self.cluster.state.loaded(name, self.plan_id - is_late))

    @rule()
    def load_all(self) -> None:
        self.check(self.cluster.load_all())

    @rule(name=names, is_late=st.booleans())
    def load_failed(self, name: str, is_late: bool) -> None:
        self.check(self.cluster.state.load_failed(name, self.plan_id - is_late, "no such file"))

    @rule(name=names, age=st.integers(0, 1))
    def epoch_ready(self, name: str, age: int) -> None:
        self.check(self.cluster.state.epoch_ready(name, self.cluster.state.epoch - age))

    @rule()
    def get_ready(self) -> None:
        self.check(self.cluster.get_ready())

    @rule(age=st.integers(0, 1))
    def link_open(self, age: int) -> None:
        self.check(self.cluster.state.link_open(self.cluster.state.epoch - age))

    @rule(age=st.integers(0, 1))
    def results_open(self, age: int) -> None:
        self.check(self.cluster.state.results_open(self.cluster.state.epoch - age))

    @rule(age=st.sampled_from([0, 0, 0, 1]))
    def epoch_failed(self, age: int) -> None:
        actions = self.cluster.state.epoch_failed(self.cluster.state.epoch - age, "fault")
        assert not (age and actions)
        self.check(actions)

    @rule()
    def result_arrives(self) -> None:
        if self.serving is not None:
            self.cluster.state.result_arrived()
            self.num_fruitless = 0
            self.last_delay_s = 0.0

    # What follows

    def check(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case AssignStage():
                    assert self.serving is None, "assigned while serving"
                    assert action.plan_id >= self.plan_id
                    self.plan_id = action.plan_id
                case BeginEpoch():
                    self.check_begin(action)
                case StopServing():
                    assert action.epoch == self.epochs[-1]
                    assert action.reason
                    self.serving = None
                case StartServing():
                    assert action.epoch == self.epochs[-1]
                    assert action.epoch not in self.served, "served twice"
                    self.served.add(action.epoch)
                    self.serving = action.epoch

    def check_begin(self, begin: BeginEpoch) -> None:
        assert self.serving is None, "a new epoch while another serves"
        assert begin.epoch > max(self.epochs, default=0)
        assert all(begin.epoch > worker.last_epoch for worker in begin.workers)
        assert [worker.name for worker in begin.workers] == [stage.worker for stage in begin.plan.stages]
        assert begin.plan_id == self.plan_id
        self.epochs.append(begin.epoch)
        if self.num_fruitless == 0:
            assert begin.delay_s == 0
        else:
            assert self.last_delay_s < begin.delay_s or begin.delay_s == MAX_EPOCH_DELAY_S
        self.num_fruitless += 1
        self.last_delay_s = begin.delay_s

    @invariant()
    def serving_means_that_every_worker_is_live(self) -> None:
        state = self.cluster.state
        assert (state.phase is ClusterPhase.SERVING) == (self.serving is not None)
        if self.serving is not None:
            assert self.serving == state.epoch
        if state.phase in (ClusterPhase.STARTING_EPOCH, ClusterPhase.SERVING):
            assert len(state.stage_workers) == state.num_stages
            assert all(each.state is WorkerState.READY for each in state.stage_workers)

    @invariant()
    def a_plan_is_there_unless_workers_are_missing(self) -> None:
        state = self.cluster.state
        usable = [each for each in state.workers.values() if each.is_usable]
        waiting = (ClusterPhase.WAITING_FOR_WORKERS, ClusterPhase.BLOCKED)
        assert (state.plan is None) == (state.phase in waiting)
        if state.plan is None and len(usable) >= state.num_stages:
            assert "needed" in state.detail
        if state.phase is ClusterPhase.WAITING_FOR_WORKERS and state.workers:
            assert f"{len(usable)} of {state.num_stages} workers" in state.detail

    @invariant()
    def each_worker_has_one_place(self) -> None:
        state = self.cluster.state
        names = self.cluster.stage_names
        assert len(set(names)) == len(names)
        for name, record in state.workers.items():
            assert record.identity.name == name
            assert record.is_live, "a lost worker is kept"
            assert (record.stage is not None) == (name in names)
            assert (record.state in (WorkerState.LOADING, WorkerState.READY)) == (name in names)


TestClusterEvents = ClusterEvents.TestCase
TestClusterEvents.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
