from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.harness.step_log import read_steps, sent_between, steady_rate
from tests.unit.bench.runs import logged


def test_steps_are_read_as_logged_and_an_unfinished_line_is_skipped(tmp_path: Path) -> None:
    steps = [
        logged(0, 1.0, 1.5, num_decodes=0, chunks=(128, 64), stages=((1, 2), (3, 4))),
        logged(1, 1.2, 1.6, num_decodes=8),
    ]
    file = tmp_path / "steps.jsonl"
    assert read_steps(file) == []
    lines = [json.dumps(step.as_json()) for step in steps]
    file.write_text("\n".join(lines) + "\n" + lines[0][:20])
    assert read_steps(file) == steps
    assert [step.num_tokens for step in steps] == [192, 8]


def test_steps_without_tokens_are_not_counted_in_a_window() -> None:
    steps = [logged(0, 1.0, 2.0), logged(1, 1.1, 2.1, num_decodes=0), logged(2, 2.0, 3.0)]
    assert [step.step_id for step in sent_between(steps, 0.9, 2.0)] == [0]


def test_a_steady_rate_counts_intervals_between_results_and_not_results() -> None:
    steps = [logged(index, 0.0, 0.005 + 0.02 * index, num_decodes=4) for index in range(60)]
    rate = steady_rate(steps, 0.0, 1.0)
    assert rate.steps_per_s == pytest.approx(50.0)
    assert rate.tokens_per_step == 4
    assert rate.num_steps == 50


@pytest.mark.parametrize("begin_s", [0.0, 0.001, 0.0049, 0.0051, 0.0199])
def test_where_a_window_begins_does_not_change_the_rate(begin_s: float) -> None:
    steps = [logged(index, 0.0, 0.005 + 0.02 * index) for index in range(60)]
    assert steady_rate(steps, begin_s, begin_s + 0.5).steps_per_s == pytest.approx(50.0)


def test_filling_and_emptying_of_the_pipeline_are_outside_the_window() -> None:
    filling = [logged(index, 0.0, 0.2 * index) for index in range(5)]
    steady = [logged(5 + index, 0.0, 1.0 + 0.02 * index) for index in range(51)]
    emptying = [logged(56 + index, 0.0, 2.2 + 0.2 * index) for index in range(5)]
    assert steady_rate([*filling, *steady, *emptying], 1.0, 2.0).steps_per_s == pytest.approx(50.0)


def test_too_few_results_have_no_rate() -> None:
    steps = [logged(index, 0.0, 0.02 * index) for index in range(60)]
    with pytest.raises(ValueError, match="9 results"):
        steady_rate(steps, 0.0, 0.17)
