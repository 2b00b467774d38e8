"""What steps say of stages, bubbles and recoveries."""

import pytest

from coordinator.cluster.actions import EndCause
from coordinator.observing.activity import pipeline_load
from coordinator.observing.activity_recorder import ActivityRecorder
from coordinator.observing.bubble import WINDOW_S, BubbleWindow
from telemetry.metrics import definitions
from tests.unit.coordinator.observing.watched_engine import WatchedEngine
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


def test_a_hop_below_zero_takes_nothing_back() -> None:
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
    # Also before the answer has come.
    assert watched.value(definitions.ACTIVE_TIME) == 0.75
    watched.answer(FAST, SLOW, after_s=0.25)
    watched.answer(FAST, SLOW, after_s=0.0)  # frees only
    watched.now_s += 50.0
    assert watched.value(definitions.ACTIVE_TIME) == 1.0


def test_the_bubble_is_what_the_mean_stage_does_not_compute() -> None:
    watched = WatchedEngine()
    watched.start_epoch()
    assert watched.value(definitions.BUBBLE) == 0  # there is none yet
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
    watched.pipeline.note_end(EndCause.DEATH)
    watched.stop_epoch()
    assert watched.value(definitions.RECOVERIES, "death") == 1
    # A new epoch that does not come to serve is part of the same recovery.
    watched.now_s += 3.0
    watched.start_epoch()
    assert watched.times(definitions.RECOVERY_TIME, "death") == (1, 3.0)
    assert watched.value(definitions.ACTIVE_TIME) == 1.0
    watched.pipeline.note_end(EndCause.FAULT)
    watched.stop_epoch()
    watched.now_s += 0.5
    watched.start_epoch()
    assert watched.times(definitions.RECOVERY_TIME, "fault") == (1, 0.5)
    assert watched.times(definitions.RECOVERY_TIME, "death") == (1, 3.0)
    counts = {each: watched.value(definitions.RECOVERIES, each) for each in definitions.REASON.values}
    assert {each for each, count in counts.items() if count} == {"death", "fault"}
    assert sum(counts.values()) == 2


def test_an_end_without_a_cause_is_the_end_of_the_coordinator() -> None:
    watched = WatchedEngine()
    watched.start_epoch()
    watched.pipeline.note_end(EndCause.BROKEN)
    for _ in range(2):
        watched.stop_epoch()
        watched.now_s += 1.0
        watched.start_epoch()
    assert watched.times(definitions.RECOVERY_TIME, "broken") == (1, 1.0)
    assert sum(watched.value(definitions.RECOVERIES, each) for each in definitions.REASON.values) == 1


def test_every_cause_has_its_label() -> None:
    assert tuple(each.name.lower() for each in EndCause) == definitions.REASON.values
