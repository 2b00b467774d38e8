"""Steps are remembered as they were, and no longer than they should be."""

from __future__ import annotations

import pytest

from coordinator.observing import step_history
from coordinator.observing.step_history import KEPT_S, StepHistory, StepKind
from tests.unit.coordinator.observing.makers import new_request, result, sequence_of, step

FIRST, SECOND = sequence_of(new_request()), sequence_of(new_request())


def test_computation_follows_hops_receiving_and_waiting_from_stage_to_stage() -> None:
    history = StepHistory()
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
    history = StepHistory()
    history.send(step(decodes=decodes, chunks=chunks), 1.0)  # type: ignore[arg-type]
    (sent,) = history.in_flight()
    assert (sent.kind, sent.num_tokens, sent.num_sequences) == (kind, num_tokens, len(decodes) + len(chunks))


def test_answers_belong_to_the_oldest_step_in_flight() -> None:
    history = StepHistory()
    for step_id in range(3):
        history.send(step(step_id), 1.0 + step_id)
    assert history.answer(result(0), 4.0) is not None
    assert [each.step_id for each in history.in_flight()] == [1, 2]
    history.void()
    assert history.in_flight() == ()
    assert history.answer(result(1), 5.0) is None


def test_steps_are_forgotten_after_their_time() -> None:
    history = StepHistory()
    for step_id in range(3):
        history.send(step(step_id), 10.0 + step_id)
        history.answer(result(step_id, 1.0), 10.0 + step_id)
    assert len(history.answered(10.0 + KEPT_S)) == 3
    assert [each.sent.step_id for each in history.answered(10.5 + KEPT_S)] == [1, 2]
    assert history.answered(100.0) == ()
    assert history.num_answered == 3


def test_however_fast_steps_are_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_history, "MAX_STEPS", 5)
    monkeypatch.setattr(step_history, "MAX_STAGE_TIMES", 12)
    history = StepHistory()
    for step_id in range(20):
        history.send(step(step_id), 1.0)
        history.answer(result(step_id), 1.0)
    assert len(history.answered(1.0)) == 5
    for step_id in range(20, 40):
        history.send(step(step_id), 1.0)
        history.answer(result(step_id, 1, 1, 1, 1), 1.0)
    assert [each.sent.step_id for each in history.answered(1.0)] == [37, 38, 39]
