"""How a stage's time is cut, step by step, on a clock that the test sets."""

from dataclasses import dataclass

import pytest

from checkpoint import DType
from kvcache import CopyState, LiveState, SavedState, TakeState
from stage_worker.assignment import Assignment
from stage_worker.backends.backend import LoadedStage
from stage_worker.backends.contract import (
    EagerReason,
    GraphCounts,
    GraphSize,
    HandedOn,
    StepTiming,
    TimedOutput,
)
from stage_worker.backends.mock_compute import MockCompute
from stage_worker.executor import StepExecutor
from stage_worker.metrics import StageMetrics, WorkerMetrics
from telemetry.metrics import definitions
from telemetry.metrics.definitions import Metric
from telemetry.metrics.registry import Registry
from telemetry.settings import NO_SETTINGS
from tests.metric_points import Buckets, Values, values_of
from tests.unit.stage_worker.backends.mock_stages import mock_assignment
from wire.frames import Frame
from wire.gpu import DeviceMemory
from wire.steps import Step, StepResult
from wire.tensors import TensorView


@dataclass
class Stage:
    """What the worker would show."""

    loaded: LoadedStage | None = None
    is_idle: bool = True
    payload_fallback: str = ""


class Watched:
    """Stage 1 of 3, in an epoch since 100 s."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.stage = Stage()
        self.registry = Registry(start_ns=0)
        self.metrics = StageMetrics(self.registry, clock=lambda: self.now_s)
        self.metrics.watch(self.stage)
        self.metrics.epoch_began(mock_assignment(stage=1), 1)

    def step(
        self,
        *,
        received_s: float,
        started_s: float,
        ready_s: float,
        sent_s: float,
        num_tokens: int = 2,
        is_last: bool = False,
    ) -> None:
        hidden = (TensorView(DType.BF16, (num_tokens, 6), bytes(num_tokens * 12)),)
        output = StepResult.of(1, 0) if is_last else HandedOn(0, 0, hidden)
        timing = StepTiming(received_s, received_s, started_s, ready_s, None)
        frame = Frame(Step(epoch=1, step_id=0), hidden)
        self.now_s = max(self.now_s, sent_s)
        self.metrics.step_done(frame, TimedOutput(output, (), 0, timing), sent_s)

    def values(self, metric: Metric) -> Values:
        return values_of(self.registry.snapshot(0), metric)

    def seconds(self, metric: Metric, stage: str = "1") -> float:
        found = self.values(metric)[(stage,)]
        assert not isinstance(found, Buckets)
        return round(found, 6)


def loaded_stage(assignment: Assignment, compute: type[MockCompute] = MockCompute) -> LoadedStage:
    return LoadedStage(
        assignment=assignment,
        executor=StepExecutor(assignment, compute(assignment)),
        weight_bytes=1000,
        kv_bytes=2000,
        read_bytes=0,
        load_ms=1500,
        warmup_ms=250,
        device="cuda:1",
        kernels="plain",
    )


def test_a_step_after_another_waits_from_one_to_the_other() -> None:
    watched = Watched()
    watched.step(received_s=101.0, started_s=101.1, ready_s=103.0, sent_s=103.5)
    # This one was there before the first was computed: the stage has not waited for it.
    watched.step(received_s=102.0, started_s=103.0, ready_s=104.0, sent_s=104.25)
    watched.step(received_s=106.0, started_s=106.0, ready_s=107.0, sent_s=107.0)
    assert watched.seconds(definitions.WAIT_TIME) == 1.0 + 2.0
    assert watched.seconds(definitions.BUSY_TIME) == 1.9 + 1.0 + 1.0
    assert watched.seconds(definitions.SEND_TIME) == 0.5 + 0.25
    assert watched.seconds(definitions.SERVING_TIME) == 7.0
    found = watched.values(definitions.STAGE_STEP_TIME)[("1",)]
    assert isinstance(found, Buckets)
    assert (found.count, round(found.sum, 6)) == (3, 3.9)


def test_idle_time_counts_as_waiting_before_the_next_step() -> None:
    watched = Watched()
    watched.now_s = 104.0
    assert watched.seconds(definitions.WAIT_TIME) == 4.0
    watched.step(received_s=105.0, started_s=105.0, ready_s=106.0, sent_s=106.0)
    watched.now_s = 108.0
    assert watched.seconds(definitions.WAIT_TIME) == 5.0 + 2.0


def test_computing_time_does_not_count_as_waiting() -> None:
    watched = Watched()
    watched.stage.is_idle = False
    watched.now_s = 104.0
    assert watched.seconds(definitions.WAIT_TIME) == 0.0
    watched.stage.is_idle = True
    watched.step(received_s=101.0, started_s=101.0, ready_s=104.0, sent_s=104.0)
    assert watched.seconds(definitions.WAIT_TIME) == 1.0


def test_a_reported_wait_never_decreases() -> None:
    watched = Watched()
    watched.now_s = 104.0
    assert watched.seconds(definitions.WAIT_TIME) == 4.0
    # The step was computed already, and only its output was on its way.
    watched.step(received_s=103.0, started_s=103.0, ready_s=103.9, sent_s=104.1)
    assert watched.seconds(definitions.WAIT_TIME) == 4.0
    watched.now_s = 110.0
    assert watched.seconds(definitions.WAIT_TIME) == 3.0 + 6.1


def test_time_counts_while_an_epoch_serves() -> None:
    watched = Watched()
    watched.now_s = 102.0
    watched.metrics.epoch_over()
    watched.now_s = 200.0
    assert watched.seconds(definitions.SERVING_TIME) == watched.seconds(definitions.WAIT_TIME) == 2.0
    watched.metrics.epoch_began(mock_assignment(stage=2), 2)
    watched.now_s = 203.0
    assert watched.seconds(definitions.SERVING_TIME) == 2.0
    assert watched.seconds(definitions.SERVING_TIME, "2") == 3.0
    watched.metrics.epoch_over()
    watched.metrics.epoch_over()
    watched.step(received_s=203.0, started_s=203.0, ready_s=204.0, sent_s=204.0)
    assert watched.seconds(definitions.BUSY_TIME, "2") == 0.0


@pytest.mark.parametrize(("is_last", "expected"), [(False, 60), (True, 0)])
def test_hidden_states_are_counted_in_and_out(is_last: bool, expected: int) -> None:
    watched = Watched()
    for num_tokens in (2, 3):
        watched.step(
            received_s=101.0,
            started_s=101.0,
            ready_s=101.0,
            sent_s=101.0,
            num_tokens=num_tokens,
            is_last=is_last,
        )
    assert watched.values(definitions.ACTIVATION_BYTES) == {
        ("1", "receive"): 60,
        ("1", "transmit"): expected,
    }
    assert watched.values(definitions.FRAMES) == {("1", "receive"): 2, ("1", "transmit"): 2}


def test_only_the_present_stage_is_reported() -> None:
    watched = Watched()
    assert watched.values(definitions.KV_BLOCKS) == {}
    for stage in (1, 2):
        assignment = mock_assignment(stage=stage)
        watched.stage.loaded = loaded_stage(assignment)
        text = str(stage)
        assert watched.values(definitions.KV_BLOCKS) == {
            (text, "active"): 0,
            (text, "inactive"): 0,
            (text, "free"): 32,
        }
        assert watched.values(definitions.LOAD_TIME) == {(text, "load"): 1.5, (text, "warmup"): 0.25}
        assert watched.values(definitions.STAGE_MEMORY) == {(text, "weights"): 1000, (text, "kv"): 2000}
        assert watched.values(definitions.STAGE_COMPUTE) == {("cuda:1", assignment.dtype.value, "plain"): 1}
        watched.stage.payload_fallback = "refused" if stage == 2 else ""
        assert watched.values(definitions.PAYLOAD_FALLBACK) == {(text,): stage == 2}
    watched.stage.loaded = None
    assert watched.values(definitions.PAYLOAD_FALLBACK) == {}
    assert watched.values(definitions.STAGE_MEMORY) == {}
    assert watched.values(definitions.STAGE_COMPUTE) == {}


def test_recurrent_states_are_reported_by_use() -> None:
    watched = Watched()
    watched.stage.loaded = loaded_stage(mock_assignment(stage=1))
    assert watched.values(definitions.KV_STATES) == {}, "no such layers"
    loaded = watched.stage.loaded = loaded_stage(mock_assignment(stage=1, num_states=5))
    states = loaded.executor._states
    assert states is not None
    for number in (1, 2):
        states.apply(number, TakeState(LiveState(number)))
    states.apply(1, CopyState(LiveState(1), SavedState(7), 0))
    assert watched.values(definitions.KV_STATES) == {("1", "live"): 2, ("1", "saved"): 1, ("1", "free"): 2}


def test_the_memory_of_a_gpu_is_reported_by_kind() -> None:
    metrics = WorkerMetrics(NO_SETTINGS)
    assert values_of(metrics.snapshot(), definitions.DEVICE_MEMORY) == {}
    memory = DeviceMemory(allocated_bytes=1, reserved_bytes=2, free_bytes=3, peak_bytes=4, pinned_bytes=5)
    metrics.watch_device(lambda: memory)
    assert values_of(metrics.snapshot(), definitions.DEVICE_MEMORY) == {
        ("allocated",): 1,
        ("reserved",): 2,
        ("free",): 3,
        ("peak",): 4,
        ("pinned",): 5,
    }


class RecordedCompute(MockCompute):
    @property
    def graphs(self) -> GraphCounts:
        return GraphCounts(
            num_replayed=7,
            eager={EagerReason.FIRST: 2, EagerReason.NO_SIZE: 1},
            sizes=(
                GraphSize(num_tokens=4, has_prompts=False, num_graphs=1),
                GraphSize(num_tokens=64, has_prompts=True, num_graphs=1),
            ),
            num_failed=1,
            pool_bytes=5000,
        )


def test_graphs_are_reported_for_stages_that_have_them() -> None:
    watched, assignment = Watched(), mock_assignment(stage=1)
    watched.stage.loaded = loaded_stage(assignment, RecordedCompute)
    assert watched.values(definitions.GRAPH_STEPS) == {("1", "replayed"): 7, ("1", "eager"): 3}
    assert watched.values(definitions.GRAPHS) == {("1", "recorded"): 2, ("1", "failed"): 1}
    assert watched.values(definitions.GRAPH_EAGER_STEPS) == {("1", "first"): 2, ("1", "no_size"): 1}
    assert watched.values(definitions.GRAPH_MEMORY) == {("1",): 5000}
    watched.stage.loaded = loaded_stage(assignment)
    assert watched.values(definitions.GRAPH_STEPS) == {}
    assert watched.values(definitions.GRAPHS) == {}
    assert watched.values(definitions.GRAPH_EAGER_STEPS) == {}
    assert watched.values(definitions.GRAPH_MEMORY) == {}


def test_every_reason_of_an_eager_step_has_a_series() -> None:
    assert definitions.EAGER_REASON.values == tuple(reason.value for reason in EagerReason)
