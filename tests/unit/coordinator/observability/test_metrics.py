"""Metrics of stages, bubbles and recoveries, from steps."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.resources import Resource

from coordinator.cluster.membership import Members, WorkerState
from coordinator.engine.observer import EndCause
from coordinator.observability.activity import ActivityRecorder, pipeline_load
from coordinator.observability.metrics import (
    KEPT_S,
    LAG_INTERVAL_S,
    LAG_WINDOW_S,
    MAX_BYTES,
    LoopLag,
    WorkerMetricsStore,
    request_state,
    worker_states,
)
from coordinator.observability.steps import WINDOW_S, BubbleWindow
from coordinator.planner.plan import WorkerCapacity
from coordinator.recovery.policy import DEFAULT_POLICY
from telemetry.metrics import definitions
from telemetry.metrics.definitions import Process
from telemetry.metrics.otlp import export_request
from telemetry.metrics.registry import Registry
from tests.metric_points import Buckets, exported_values, values_of
from tests.unit.coordinator.cluster.cluster_driver import identity_of, plan_of
from tests.unit.coordinator.observability.watched_engine import WatchedEngine
from tests.unit.telemetry.metrics.snapshots import worker_snapshot
from wire.errors import ClusterUnavailable, InvalidRequest, Overloaded, RequestExists
from wire.steps import StageTime

FAST = StageTime(wait_us=1_000, compute_us=100_000, hop_us=2_000, receive_us=500)
SLOW = StageTime(wait_us=3_000, compute_us=300_000, hop_us=4_000, receive_us=700)


def test_parts_of_steps_add_up_by_stage() -> None:
    watched = WatchedEngine()
    watched.start_epoch()
    watched.submit(max_tokens=3)
    watched.answer(FAST, SLOW, after_s=0.5)
    watched.answer(FAST, SLOW, after_s=0.5)
    expected = {
        ("0", "hop"): 0.004,
        ("0", "receive"): 0.001,
        ("0", "wait"): 0.002,
        ("0", "compute"): 0.2,
        ("1", "hop"): 0.008,
        ("1", "receive"): 0.0014,
        ("1", "wait"): 0.006,
        ("1", "compute"): 0.6,
    }
    for labels, seconds in expected.items():
        assert watched.value(definitions.STEP_PART_TIME, *labels) == pytest.approx(seconds), labels
    assert watched.times(definitions.STEP_TIME) == (2, 1.0)


@dataclass
class LateLoop:
    """Runs the timer of `lag` as late as it is told."""

    registry: Registry = field(default_factory=lambda: Registry(start_ns=0))
    now_s: float = 10.0
    timers: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lag = LoopLag(self.registry, clock=lambda: self.now_s)
        self.lag.start()

    def run(self, *lates_s: float) -> None:
        for late_s in lates_s:
            ((delay_s, measure),) = self.timers
            self.timers.clear()
            assert delay_s == LAG_INTERVAL_S
            self.now_s += delay_s + late_s
            measure()


@pytest.fixture
async def late_loop(monkeypatch: pytest.MonkeyPatch) -> LateLoop:
    timers: list[tuple[float, Callable[[], None]]] = []
    monkeypatch.setattr(
        asyncio.get_running_loop(), "call_later", lambda delay_s, measure: timers.append((delay_s, measure))
    )
    return LateLoop(timers=timers)


async def test_the_lag_of_the_loop_is_how_late_a_timer_runs(late_loop: LateLoop) -> None:
    late_loop.run(0.0, 0.003, -0.0005, 0.6)
    registry = late_loop.registry
    buckets = values_of(registry.snapshot(0), definitions.LOOP_LAG)[()]
    assert isinstance(buckets, Buckets)
    assert (buckets.count, buckets.sum) == (4, pytest.approx(0.603))


async def test_the_lag_in_the_status_is_that_of_the_last_seconds(late_loop: LateLoop) -> None:
    assert late_loop.lag.recent() is None
    late_loop.run(0.003)
    assert late_loop.lag.recent() == (pytest.approx(0.003), pytest.approx(0.003))
    late_loop.run(*[0.001] * 97, 0.5, 0.6)
    assert late_loop.lag.recent() == (pytest.approx(0.001), pytest.approx(0.6))
    late_loop.run(*[0.002] * round(LAG_WINDOW_S / LAG_INTERVAL_S))
    assert late_loop.lag.recent() == (pytest.approx(0.002), pytest.approx(0.002))


async def test_the_lag_of_the_loop_is_measured_until_it_is_stopped() -> None:
    registry = Registry(start_ns=0)
    lag = LoopLag(registry)
    lag.start()
    async with asyncio.timeout(10):
        while not count_of(registry):
            await asyncio.sleep(LAG_INTERVAL_S)
    lag.stop()
    count = count_of(registry)
    await asyncio.sleep(3 * LAG_INTERVAL_S)
    assert count_of(registry) == count


def count_of(registry: Registry) -> int:
    buckets = values_of(registry.snapshot(0), definitions.LOOP_LAG)[()]
    assert isinstance(buckets, Buckets)
    return buckets.count


def test_a_negative_hop_time_counts_as_zero() -> None:
    watched = WatchedEngine()
    watched.start_epoch()
    watched.submit(max_tokens=3)
    watched.answer(FAST, after_s=0.5)
    watched.answer(StageTime(0, 0, -300, 0), after_s=0.5)
    assert watched.value(definitions.STEP_PART_TIME, "0", "hop") == 0.002


def test_only_time_with_steps_in_flight_is_active() -> None:
    watched = WatchedEngine()
    watched.start_epoch()
    watched.now_s += 50.0
    watched.submit(max_tokens=2)
    watched.answer(FAST, SLOW, after_s=0.5)
    watched.now_s += 0.25
    # Also before the result has arrived.
    assert watched.value(definitions.ACTIVE_TIME) == 0.75
    watched.answer(FAST, SLOW, after_s=0.25)
    watched.answer(FAST, SLOW, after_s=0.0)  # frees only
    watched.now_s += 50.0
    assert watched.value(definitions.ACTIVE_TIME) == 1.0


def test_the_bubble_is_the_idle_share_of_the_mean_stage() -> None:
    watched = WatchedEngine()
    watched.start_epoch()
    assert watched.value(definitions.BUBBLE) == 0  # no result yet
    watched.submit(max_tokens=8)
    watched.answer(FAST, SLOW, after_s=0.5)
    watched.answer(FAST, SLOW, after_s=0.5)
    # Both stages have computed 0.8 s together, in 1 s of two stages.
    assert watched.value(definitions.BUBBLE) == pytest.approx(0.6)
    watched.now_s += WINDOW_S - 0.5
    watched.answer(FAST, SLOW, after_s=0.5)
    assert watched.value(definitions.BUBBLE) > 0.9


def test_the_dashboard_has_the_bubble_of_the_metric() -> None:
    watched = WatchedEngine()
    recorder = ActivityRecorder(watched.now_s, bubble_share=watched.pipeline.bubble_share)

    def shown() -> float | None:
        return pipeline_load(recorder.snapshot(watched.now_s, now_unix_s=0.0)).bubble_share

    watched.start_epoch()
    assert shown() is None
    watched.submit(max_tokens=8)
    watched.answer(FAST, SLOW, after_s=0.5)
    watched.now_s += 0.3
    assert shown() == pytest.approx(0.75)
    assert watched.value(definitions.BUBBLE) == shown()


def test_a_bubble_stays_a_share() -> None:
    window = BubbleWindow()
    assert window.share(5.0) is None
    window.add(5.0, active_s=0.1, computed_s=4.0)
    assert window.share(5.5) == 0.0
    window.add(7.0, active_s=40.0)
    assert window.share(7.0) == pytest.approx(1 - 4 / 40.1)
    assert window.share(16.0) == 1.0
    assert window.share(17.5) is None
    for second in range(100):
        window.add(20.0 + second, active_s=1.0, computed_s=0.25)
    assert window.share(119.5) == 0.75
    assert len(window._seconds) <= WINDOW_S + 1


def test_recoveries_are_counted_with_their_cause_and_how_long_they_took() -> None:
    watched = WatchedEngine()
    watched.start_epoch()
    assert watched.times(definitions.RECOVERY_TIME, "death") == (0, 0.0)
    watched.submit(max_tokens=20)
    watched.now_s += 1.0
    watched.stop_epoch(EndCause.DEATH)
    assert watched.value(definitions.RECOVERIES, "death") == 1
    # A new epoch that fails before serving is part of the same recovery.
    watched.now_s += 3.0
    watched.start_epoch()
    assert watched.times(definitions.RECOVERY_TIME, "death") == (1, 3.0)
    assert watched.value(definitions.ACTIVE_TIME) == 1.0
    watched.stop_epoch(EndCause.FAULT)
    watched.now_s += 0.5
    watched.start_epoch()
    assert watched.times(definitions.RECOVERY_TIME, "fault") == (1, 0.5)
    assert watched.times(definitions.RECOVERY_TIME, "death") == (1, 3.0)
    counts = {reason: watched.value(definitions.RECOVERIES, reason) for reason in definitions.REASON.values}
    assert {reason for reason, count in counts.items() if count} == {"death", "fault"}
    assert sum(counts.values()) == 2


def test_an_end_without_a_cause_is_the_end_of_the_coordinator() -> None:
    watched = WatchedEngine()
    watched.start_epoch()
    for cause in (EndCause.BROKEN, None):
        watched.stop_epoch(cause)
        watched.now_s += 1.0
        watched.start_epoch()
    assert watched.times(definitions.RECOVERY_TIME, "broken") == (1, 1.0)
    assert sum(watched.value(definitions.RECOVERIES, reason) for reason in definitions.REASON.values) == 1


def test_every_cause_has_its_label() -> None:
    assert tuple(cause.name.lower() for cause in EndCause) == definitions.REASON.values


def test_a_request_waits_gets_its_tokens_and_ends() -> None:
    watched = WatchedEngine()
    watched.submit(max_tokens=3)
    watched.now_s += 2.0
    watched.start_epoch()
    assert watched.times(definitions.QUEUE_TIME) == (1, 2.0)
    watched.answer(after_s=0.5)
    assert watched.times(definitions.FIRST_TOKEN_TIME) == (1, 2.5)
    assert watched.times(definitions.INTER_TOKEN_TIME) == (0, 0.0)
    watched.answer(after_s=0.25)
    watched.answer(after_s=0.125)
    assert watched.times(definitions.INTER_TOKEN_TIME) == (2, 0.375)
    assert watched.times(definitions.REQUEST_TIME, "finished") == (1, 2.875)
    assert watched.value(definitions.GENERATED_TOKENS) == 3


def test_every_choice_has_its_own_tokens_and_the_request_one_first() -> None:
    watched = WatchedEngine()
    watched.start_epoch()
    watched.submit(max_tokens=3, num_choices=2)
    while watched.sent:
        watched.answer(after_s=0.5)
    assert watched.value(definitions.GENERATED_TOKENS) == 6
    assert watched.times(definitions.FIRST_TOKEN_TIME)[0] == 1
    assert watched.times(definitions.INTER_TOKEN_TIME)[0] == 4
    assert watched.times(definitions.QUEUE_TIME) == (1, 0.0)
    assert watched.times(definitions.REQUEST_TIME, "finished")[0] == 1


def test_a_pause_is_one_long_wait_for_a_token_and_no_second_first_one() -> None:
    watched = WatchedEngine()
    watched.start_epoch()
    watched.submit(max_tokens=3)
    watched.answer(after_s=0.5)
    watched.stop_epoch()
    watched.now_s += 7.0
    watched.start_epoch()
    watched.answer(after_s=0.5)
    assert watched.times(definitions.INTER_TOKEN_TIME) == (1, 7.5)
    assert watched.times(definitions.FIRST_TOKEN_TIME) == (1, 0.5)
    assert watched.times(definitions.QUEUE_TIME) == (1, 0.0)


def test_a_request_that_never_started_records_only_its_end() -> None:
    watched = WatchedEngine()
    request = watched.submit()
    watched.now_s += 3.0
    watched.engine.cancel(request.id)
    assert watched.times(definitions.REQUEST_TIME, "cancelled") == (1, 3.0)
    assert watched.times(definitions.QUEUE_TIME) == watched.times(definitions.FIRST_TOKEN_TIME) == (0, 0.0)
    failing = watched.submit()
    watched.engine.fail_all("no stages")
    assert not failing.is_live
    assert watched.times(definitions.REQUEST_TIME, "failed") == (1, 0.0)


def test_nothing_is_kept_of_ended_requests() -> None:
    watched = WatchedEngine()
    watched.start_epoch()
    for _ in range(5):
        watched.submit(max_tokens=3, num_choices=2)
    leaving = watched.submit(max_tokens=50)
    while not leaving.choices[0].sequence.num_generated_tokens or len(watched.engine.registry.live) > 1:
        watched.answer(after_s=0.1)
    assert len(watched.facts._active) == len(watched.facts._token_s) == 1
    watched.engine.cancel(leaving.id)
    assert not watched.facts._active
    assert not watched.facts._token_s


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Overloaded("64 requests wait"), "overloaded"),
        (InvalidRequest("no prompt"), "invalid"),
        (ClusterUnavailable("1 of 3 workers"), "unavailable"),
        (RequestExists("it lives"), "other"),
        (KeyError("a defect"), "other"),
    ],
)
def test_refusals_are_counted_by_their_reason(error: Exception, reason: str) -> None:
    watched = WatchedEngine()
    watched.requests.count_refusal(error)
    counts = {
        refusal: watched.value(definitions.REQUESTS_REFUSED, refusal)
        for refusal in definitions.REFUSAL.values
    }
    assert counts == {**dict.fromkeys(definitions.REFUSAL.values, 0), reason: 1}


def test_every_state_of_a_worker_has_its_label() -> None:
    assert tuple(state.name.lower() for state in WorkerState) == definitions.WORKER_STATE.values


def test_the_phase_of_a_request_is_that_of_its_slowest_choice() -> None:
    watched = WatchedEngine()
    request = watched.submit(num_prompt_tokens=14, max_tokens=30, num_choices=2)
    seen = [request_state(request)]
    watched.start_epoch()
    while seen[-1] != "decode":
        seen.append(request_state(request))
        watched.answer(after_s=0.1)
    assert list(dict.fromkeys(seen)) == ["queued", "prefill", "decode"]
    watched.stop_epoch()
    assert request_state(request) == "queued"


def test_a_lost_worker_is_counted_until_it_rejoins() -> None:
    members = Members(DEFAULT_POLICY)
    for name in ("a", "b"):
        members.add(identity_of(name))
    (members["b"].stage,) = plan_of([WorkerCapacity(name="b", memory_bytes=1000)], needed_bytes=1).stages
    members["b"].state = WorkerState.LOST
    assert worker_states(members) == {"spare": 1, "lost": 1}
    members.release_stages()
    assert "b" not in members
    assert worker_states(members) == {"spare": 1, "lost": 1}
    members.add(identity_of("b"))
    assert worker_states(members) == {"spare": 2}


NUM_POINTS = 6
"""A worker's export, delivered at once."""


def export(name: str, stage: str = "0", service: str = "stageline-worker") -> ExportMetricsServiceRequest:
    resource = Resource({"service.name": service, "service.instance.id": name})
    return export_request(worker_snapshot(stage), resource)


def busy_stages(workers: WorkerMetricsStore) -> dict[str, list[tuple[str, ...]]]:
    """Labels of the busy time, by worker."""
    return {
        worker: list(exported_values(message, Process.WORKER)[definitions.BUSY_TIME.name])
        for worker, message in workers.last().items()
    }


def test_the_last_of_each_worker_counts() -> None:
    workers = WorkerMetricsStore(lambda: {"w0", "w1"})
    for name, stage in (("w1", "1"), ("w0", "0"), ("w0", "2")):
        assert workers.take(export(name, stage), 0.0) == 0
    found = busy_stages(workers)
    assert list(found) == ["w0", "w1"]
    assert found == {"w0": [("2",)], "w1": [("1",)]}


@pytest.mark.parametrize(
    "request_",
    [export("stranger"), export(""), export("w0", service="stageline-coordinator")],
    ids=["unknown", "nameless", "another service"],
)
def test_unknown_workers_are_rejected(request_: ExportMetricsServiceRequest) -> None:
    workers = WorkerMetricsStore(lambda: {"w0"})
    assert workers.take(request_, 0.0) == NUM_POINTS
    assert workers.last() == {}


def test_oversized_snapshots_are_rejected() -> None:
    workers = WorkerMetricsStore(lambda: {"w0"})
    request = export("w0")
    request.resource_metrics[0].schema_url = "x" * MAX_BYTES
    assert workers.take(request, 0.0) == NUM_POINTS


def test_the_number_of_workers_is_bounded() -> None:
    names = {f"w{index}" for index in range(definitions.WORKER.num_values + 1)}
    workers = WorkerMetricsStore(lambda: names)
    refused = [workers.take(export(name), 0.0) for name in sorted(names)]
    assert refused == [0] * definitions.WORKER.num_values + [NUM_POINTS]
    assert workers.take(export("w0"), 0.0) == 0


def test_a_worker_that_left_is_shown_for_a_while() -> None:
    here = {"w0", "w1"}
    workers = WorkerMetricsStore(lambda: here)
    for name in ("w0", "w1"):
        workers.take(export(name), 0.0)
    workers.forget_old(1000.0)
    assert list(workers.last()) == ["w0", "w1"]
    here.remove("w1")
    workers.forget_old(1000.0 + KEPT_S)
    assert list(workers.last()) == ["w0", "w1"]
    workers.forget_old(1000.1 + KEPT_S)
    assert list(workers.last()) == ["w0"]
