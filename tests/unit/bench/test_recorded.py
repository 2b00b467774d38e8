from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.harness import recorded
from bench.harness.figure import Figure
from bench.harness.machine import Machine
from bench.harness.recorded import Change, compare
from bench.harness.run import GroupResult
from tests.unit.bench.runs import figure, latency

MACHINE = Machine(
    processor="a processor", cores=2, memory_gib=4, matrix_units="none", python="3", torch="2", grpc="1"
)


def run_of(*figures: Figure, group: str = "decode") -> dict[str, Any]:
    result = GroupResult(name=group, figures=figures, took_s=1.0)
    return recorded.as_json([result], MACHINE, is_quick=False)


@pytest.mark.parametrize(
    ("before", "now", "change"),
    [
        (figure(measured=80), figure(measured=71), Change.WORSE),
        (figure(measured=80), figure(measured=73), Change.SAME),
        (figure(measured=80), figure(measured=87), Change.SAME),
        (figure(measured=80), figure(measured=89), Change.BETTER),
        (latency(100), latency(112), Change.WORSE),
        (latency(100), latency(109), Change.SAME),
        (latency(100), latency(90), Change.BETTER),
    ],
)
def test_a_change_of_the_ratio_beyond_the_noise_is_reported(
    before: Figure, now: Figure, change: Change
) -> None:
    (compared,) = compare([now], run_of(before))
    assert compared.change is change


def test_twice_the_speed_of_machine_and_bound_alike_changes_nothing() -> None:
    (compared,) = compare([figure(measured=160, bound=200)], run_of(figure(measured=80, bound=100)))
    assert compared.change is Change.SAME
    assert compared.relative == pytest.approx(0)


def test_a_figure_states_its_own_noise() -> None:
    (compared,) = compare([figure(measured=78, noise=0.02)], run_of(figure(measured=80)))
    assert compared.change is Change.WORSE


def test_rounds_that_differ_in_both_runs_widen_the_margin_up_to_a_limit() -> None:
    def spread(ratio: float, half: float) -> Figure:
        return figure(measured=ratio, bound=1, ratios=(ratio * (1 - half), ratio, ratio * (1 + half)))

    (one_sided,) = compare([spread(0.66, 0.1)], run_of(figure(measured=0.8, bound=1)))
    assert one_sided.change is Change.WORSE
    (both,) = compare([spread(0.66, 0.1)], run_of(spread(0.8, 0.1)))
    assert both.change is Change.SAME
    (too_much,) = compare([spread(0.5, 0.6)], run_of(spread(0.8, 0.6)))
    assert too_much.change is Change.WORSE


def test_a_figure_that_was_never_recorded_is_new() -> None:
    (compared,) = compare([figure()], {})
    assert compared.change is Change.NEW


def test_only_figures_of_groups_that_ran_can_disappear() -> None:
    before = recorded.merged(run_of(figure("a"), figure("b")), run_of(latency(1), group="memory"))
    now = GroupResult(name="decode", figures=(figure("a"),))
    assert [(figure.name, figure.change) for figure in recorded.gone([now], before)] == [("b", Change.GONE)]


def test_recording_some_groups_keeps_the_others() -> None:
    first = recorded.merged({}, run_of(figure("a"), figure("b")))
    second = recorded.merged(first, run_of(latency(70), group="memory"))
    third = recorded.merged(second, run_of(figure("a", measured=90)))
    assert [(figure["name"], figure["ratio"]) for figure in third["figures"]] == [
        ("latency", 0.7),
        ("a", 0.9),
    ]
    assert [group["name"] for group in third["groups"]] == ["memory", "decode"]


def test_a_run_round_trips(tmp_path: Path) -> None:
    file = tmp_path / "results" / "run.json"
    assert recorded.read(file) == {}
    run = run_of(figure(ratios=(0.7, 0.8, 0.9), details={"tokens_per_step": 7.99}))
    recorded.write(file, run)
    assert recorded.read(file) == run


def test_a_row_has_the_numbers_of_a_figure_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    recorded.write(file, recorded.rows([figure("a", measured=61.23456, target=0.8), latency(99)]))
    assert json.loads(file.read_text()) == [
        {"name": "a", "measured": 61.23, "bound": 100.0, "ratio": 0.6123, "target": 0.8},
        {"name": "latency", "measured": 99.0, "bound": 100.0, "ratio": 0.99, "target": None},
    ]
