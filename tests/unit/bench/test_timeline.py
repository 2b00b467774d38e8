from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from bench.harness.step_log import LoggedStep
from bench.harness.timeline import timeline, travel_s
from bench.harness.timeline_file import draw
from tests.unit.bench.runs import logged


def simulated(
    compute_s: list[float], *, hop_s: float, num_steps: int, in_flight: int
) -> tuple[list[LoggedStep], list[tuple[int, int, float, float]]]:
    """A pipeline with equal hops: the coordinator's step log and the true compute times of each stage."""
    free_s = [0.0] * len(compute_s)
    results: deque[float] = deque()
    steps, truth = [], []
    for step_id in range(num_steps):
        sent_s = results.popleft() if len(results) == in_flight else 0.0
        now_s, stages = sent_s, []
        for stage, takes_s in enumerate(compute_s):
            arrived_s = now_s + hop_s
            begin_s = max(arrived_s, free_s[stage])
            now_s = free_s[stage] = begin_s + takes_s
            stages.append((round((begin_s - arrived_s) * 1e6), round(takes_s * 1e6)))
            truth.append((stage, step_id, begin_s, now_s))
        results.append(now_s + hop_s)
        steps.append(logged(step_id, sent_s, now_s + hop_s, stages=tuple(stages)))
    return steps, truth


@pytest.mark.parametrize("compute_s", [[0.02, 0.02], [0.01, 0.03, 0.02], [0.02]])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_bars_match_the_compute_times(compute_s: list[float], in_flight: int) -> None:
    steps, truth = simulated(compute_s, hop_s=0.001, num_steps=20, in_flight=in_flight)
    chart = timeline(steps, 0.0, steps[-1].result_s)
    assert [(bar.stage, bar.step_id) for bar in chart.bars] == [entry[:2] for entry in truth]
    assert [time_s for bar in chart.bars for time_s in (bar.begin_s, bar.end_s)] == pytest.approx(
        [time_s for entry in truth for time_s in entry[2:]], abs=1e-5
    )
    assert chart.travel_s == pytest.approx(0.001 * (len(compute_s) + 1), abs=1e-5)


def test_only_the_slowest_stage_is_always_busy() -> None:
    steps, _ = simulated([0.01, 0.02], hop_s=0.0005, num_steps=50, in_flight=3)
    chart = timeline(steps, 0.2, 0.8)
    assert chart.busy == pytest.approx((0.5, 1.0), abs=0.03)
    assert chart.duration_s == pytest.approx(0.6)
    assert all(0 <= bar.begin_s < bar.end_s <= chart.duration_s for bar in chart.bars)


def test_a_stage_never_computes_two_steps_at_once() -> None:
    """The second step arrived early and returned late, which the step log cannot show."""
    steps = [
        logged(0, 0.0, 0.030, stages=((0, 20_000),)),
        logged(1, 0.001, 0.040, stages=((5_000, 20_000),)),
    ]
    first, second = timeline(steps, 0.0, 0.06).bars
    assert second.begin_s >= first.end_s
    assert second.end_s - second.begin_s == pytest.approx(0.02)


def test_a_frame_that_waited_is_computed_later_by_its_wait() -> None:
    (bar,) = timeline([logged(0, 0.0, 0.034, stages=((10_000, 20_000),))], 0.0, 0.05).bars
    assert (bar.begin_s, bar.end_s) == pytest.approx((0.012, 0.032))


def test_frames_queued_before_the_first_stage_move_no_bar() -> None:
    steps, truth = simulated([0.02, 0.02], hop_s=0.001, num_steps=12, in_flight=6)
    hidden = [
        replace(step, stages=((0, step.stages[0][1]), *step.stages[1:])) if step.step_id else step
        for step in steps
    ]
    chart = timeline(hidden, 0.0, steps[-1].result_s)
    assert [bar.begin_s for bar in chart.bars] == pytest.approx([entry[2] for entry in truth], abs=1e-5)


def test_hops_of_large_steps_take_longer_than_those_of_small_ones() -> None:
    small = logged(0, 0.0, 0.024, stages=((0, 20_000),))
    large = logged(1, 0.1, 0.130, num_decodes=0, chunks=(512,), stages=((0, 20_000),))
    begins_s = [bar.begin_s for bar in timeline([small, large], 0.0, 0.2).bars]
    assert begins_s == pytest.approx([0.002, 0.105])


def test_stage_times_beyond_the_step_time_give_no_negative_hops() -> None:
    assert travel_s(logged(0, 0.0, 0.01, stages=((0, 12_000),))) == 0.0


@pytest.mark.parametrize("stages", [((), ()), (((1, 1),), ()), (((1, 1),), ((1, 1), (1, 1)))])
def test_steps_with_inconsistent_stage_times_are_rejected(
    stages: tuple[tuple[tuple[int, int], ...], ...],
) -> None:
    steps = [logged(index, 0.0, 1.0, stages=stage_times) for index, stage_times in enumerate(stages)]
    with pytest.raises(ValueError, match="2 steps"):
        timeline(steps, 0.0, 1.0)


def test_the_drawing_has_a_row_per_stage_and_a_bar_per_stage_and_step() -> None:
    steps, _ = simulated([0.02, 0.02, 0.02], hop_s=0.001, num_steps=8, in_flight=3)
    (axes,) = draw(timeline(steps, 0.0, steps[-1].result_s), "3 stages & more").axes
    assert [len(row.get_paths()) for row in axes.collections] == [8, 8, 8]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage 0", "stage 1", "stage 2"]


def test_a_step_has_one_colour_on_all_stages_and_its_neighbours_have_others() -> None:
    steps, _ = simulated([0.02, 0.02], hop_s=0.001, num_steps=6, in_flight=3)
    (axes,) = draw(timeline(steps, 0.0, steps[-1].result_s), "colours").axes
    first, second = ([tuple(colour) for colour in row.get_facecolor()] for row in axes.collections)
    assert first == second
    assert len(set(first)) == 6
