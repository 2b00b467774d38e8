"""Step history: recorded values and retention."""

from __future__ import annotations

import pytest

from coordinator.observability import steps
from coordinator.observability.activity import describe_pipeline, find_bottleneck
from coordinator.observability.facts import FactRecorder, StepKind
from coordinator.observability.steps import KEPT_S, StageLoad, StepHistory, stage_loads
from telemetry.trace_view.explain import STANDS_OUT
from tests.unit.coordinator.observability.makers import new_request, result, sequence_of, step
from wire.steps import StageTime, Step, StepResult


class Watched(StepHistory):
    """A step history with its recorder."""

    def __init__(self) -> None:
        super().__init__()
        self._facts = FactRecorder((self,))

    def send(self, sent: Step, now_s: float) -> None:
        self._facts.step_sent(sent, now_s)

    def answer(self, answer: StepResult, now_s: float) -> None:
        self._facts.step_completed(answer, (), 0.0, now_s)

    def void(self) -> None:
        self._facts.epoch_stopped(None, "the test says so", 0.0)


FIRST, SECOND = sequence_of(new_request()), sequence_of(new_request())


def test_computation_follows_hops_receiving_and_waiting_from_stage_to_stage() -> None:
    history = Watched()
    history.send(step(5, decodes=[FIRST]), 100.0)
    history.answer(result(5, 20, 40, wait_ms=3, hop_ms=1), 100.075)
    (answered,) = history.answered(100.1)
    flat = [time_s for interval in answered.computed() for time_s in interval]
    assert flat == pytest.approx([100.004, 100.024, 100.028, 100.068])
    assert (answered.number, answered.sent.step_id, answered.answered_s) == (1, 5, 100.075)


@pytest.mark.parametrize(
    ("decodes", "chunks", "kind", "num_tokens"),
    [
        ([FIRST, SECOND], [], StepKind.DECODE, 2),
        ([], [FIRST], StepKind.PREFILL, 3),
        ([FIRST], [SECOND], StepKind.MIXED, 4),
        ([], [], StepKind.EMPTY, 0),
    ],
)
def test_the_kind_of_a_step_follows_from_its_slices(
    decodes: list[object], chunks: list[object], kind: StepKind, num_tokens: int
) -> None:
    history = Watched()
    history.send(step(decodes=decodes, chunks=chunks), 1.0)  # type: ignore[arg-type]
    (sent,) = history.in_flight()
    assert (sent.kind, sent.num_tokens, sent.num_sequences) == (kind, num_tokens, len(decodes) + len(chunks))


def test_answers_belong_to_the_oldest_step_in_flight() -> None:
    history = Watched()
    for step_id in range(3):
        history.send(step(step_id), 1.0 + step_id)
    history.answer(result(0), 4.0)
    assert [step.step_id for step in history.in_flight()] == [1, 2]
    assert [step.sent.step_id for step in history.answered(4.0)] == [0]
    history.void()
    assert history.in_flight() == ()
    history.send(step(3), 5.0)
    history.answer(result(3), 6.0)
    assert [step.sent.step_id for step in history.answered(6.0)] == [0, 3]


def test_steps_are_forgotten_after_their_time() -> None:
    history = Watched()
    for step_id in range(3):
        history.send(step(step_id), 10.0 + step_id)
        history.answer(result(step_id, 1.0), 10.0 + step_id)
    assert len(history.answered(10.0 + KEPT_S)) == 3
    assert [step.sent.step_id for step in history.answered(10.5 + KEPT_S)] == [1, 2]
    assert history.answered(100.0) == ()
    assert history.num_answered == 3


def test_however_fast_steps_are_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "MAX_STEPS", 5)
    monkeypatch.setattr(steps, "MAX_STAGE_TIMES", 12)
    history = Watched()
    for step_id in range(20):
        history.send(step(step_id), 1.0)
        history.answer(result(step_id), 1.0)
    assert len(history.answered(1.0)) == 5
    for step_id in range(20, 40):
        history.send(step(step_id), 1.0)
        history.answer(result(step_id, 1, 1, 1, 1), 1.0)
    assert [step.sent.step_id for step in history.answered(1.0)] == [37, 38, 39]


SEQUENCE = sequence_of(new_request())


def run(history: Watched, *compute_ms: float, begin_s: float, end_s: float, every_s: float) -> None:
    """One step after the other, each alone in the pipeline."""
    count = round((end_s - begin_s) / every_s)
    for index in range(count):
        at_s = begin_s + index * every_s
        history.send(step(index, decodes=[SEQUENCE]), at_s)
        history.answer(result(index, *compute_ms), at_s + every_s)


def loads_at(history: Watched, now_s: float, *, began_s: float = 0.0) -> list[StageLoad]:
    return stage_loads(history.answered(now_s), now_s, began_s=began_s, is_idle=not history.in_flight())


def test_busy_is_a_share_of_all_time() -> None:
    history = Watched()
    run(history, 20, 40, 20, begin_s=105.0, end_s=110.0, every_s=0.1)
    loads = loads_at(history, 110.0)
    assert [stage_load.busy_share for stage_load in loads] == pytest.approx([0.1, 0.2, 0.1])
    assert [stage_load.compute_s for stage_load in loads] == pytest.approx([0.02, 0.04, 0.02])


def test_computation_before_the_window_does_not_count() -> None:
    history = Watched()
    history.send(step(0, decodes=[SEQUENCE]), 95.0)
    history.answer(result(0, 10_000), 105.0)
    (load,) = loads_at(history, 110.0)
    assert load.busy_share == pytest.approx(0.5)
    (load,) = loads_at(history, 110.0, began_s=104.0)
    assert load.busy_share == pytest.approx(1 / 6)


def test_steps_in_flight_make_no_stage_look_idle() -> None:
    history = Watched()
    run(history, 50, 50, begin_s=100.0, end_s=105.0, every_s=0.1)
    history.send(step(99, decodes=[SEQUENCE]), 105.0)
    loads = loads_at(history, 109.0, began_s=100.0)
    assert [stage_load.busy_share for stage_load in loads] == pytest.approx([0.5, 0.5], rel=0.03)


def test_steps_without_times_or_slices_give_no_load() -> None:
    history = Watched()
    history.send(step(0), 1.0)
    history.answer(result(0, 1, 1), 1.1)
    history.send(step(1, decodes=[SEQUENCE]), 1.0)
    history.answer(result(1), 1.1)
    assert loads_at(history, 2.0) == []


def test_steps_of_another_number_of_stages_are_left_out() -> None:
    history = Watched()
    run(history, 10, 10, 10, begin_s=100.0, end_s=101.0, every_s=0.1)
    run(history, 10, 10, begin_s=101.0, end_s=102.0, every_s=0.1)
    assert [stage_load.num_steps for stage_load in loads_at(history, 102.0)] == [10, 10]


def test_a_hop_ends_with_the_first_byte_as_in_traces() -> None:
    history = Watched()
    history.send(step(0, decodes=[SEQUENCE]), 100.0)
    times = (StageTime(4_000, 1_000, hop_us=2_000, receive_us=500), StageTime(0, 1_000, -300, 900))
    history.answer(StepResult.of(1, 0, (), times), 100.1)
    assert [stage_load.hop_s for stage_load in loads_at(history, 100.2)] == pytest.approx([0.002, -0.0003])


def load(compute_ms: float, *, busy: float = 0.5, num_steps: int = 9) -> StageLoad:
    return StageLoad(
        num_steps=num_steps,
        busy_share=busy,
        compute_s=compute_ms / 1000,
        wait_s=0.0,
        hop_s=0.0,
    )


@pytest.mark.parametrize("times", [(20, 20, 40), (20, 40), (19, 21, 20, 40)])
def test_a_stage_that_takes_twice_as_long_is_named(times: tuple[float, ...]) -> None:
    loads = [load(seconds, busy=seconds / 41.67) for seconds in times]
    found = find_bottleneck(loads)
    assert found is not None
    assert (found.stage, found.ratio, found.is_notable) == (len(times) - 1, pytest.approx(2.0), True)
    workers = [f"worker-{number}" for number in range(len(times))]
    last = len(times) - 1
    assert describe_pipeline(loads, workers, window_s=10, bubble_share=0.25) == (
        f"Stage {last} (worker-{last}) is the slowest: 96 % busy, 2.0 x the median step time."
    )


def test_similar_stages_are_not_named_slow() -> None:
    loads = [load(20), load(21), load(20)]
    found = find_bottleneck(loads)
    assert found is not None
    assert not found.is_notable
    summary = "No stage stands out: Stage 1 (b) takes longest, 1.05 x the median step time, and is 50 % busy"
    for share, more in ((0.25, "; 25 % of the stages' time is bubbles."), (None, ".")):
        assert describe_pipeline(loads, ["a", "b", "c"], window_s=10, bubble_share=share) == summary + more


def test_slow_stages_agree_with_traces() -> None:
    def is_notable(ratio: float) -> bool:
        found = find_bottleneck([load(20), load(20), load(20 * ratio)])
        assert found is not None
        return found.is_notable

    assert (is_notable(STANDS_OUT - 0.01), is_notable(STANDS_OUT + 0.01)) == (False, True)


def test_without_load_no_stage_is_named_slow() -> None:
    """The slowest stage limits nothing while it is idle most of the time."""
    loads = [load(20, busy=0.02), load(60, busy=0.06)]
    found = find_bottleneck(loads)
    assert found is not None and not found.is_notable
    summary = describe_pipeline(loads, ["a", "b"], window_s=10, bubble_share=0.9)
    assert summary == "Hardly any load: Stage 1 (b) takes longest, and is 6 % busy."


def test_a_single_stage_is_never_slow() -> None:
    assert find_bottleneck([load(20)]) is None
    assert describe_pipeline([load(20)], ["w"], window_s=10, bubble_share=None) == "Stage 0 (w) is 50 % busy."
    assert describe_pipeline([], [], window_s=10, bubble_share=None) == "Idle: no step in the last 10 s."


def test_two_steps_are_too_few_to_name_a_slow_stage() -> None:
    assert find_bottleneck([load(20, num_steps=2), load(40, num_steps=2)]) is None
