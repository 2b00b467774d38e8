"""Phases within a pause, from the coordinator's log."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from tests.chaos.recovery_log import LogLine, Phase, num_recoveries, parts_of, read_log, spans_of

LINES = [
    LogLine(1.0, "plan 1: layers 0-2 on worker-0, 3-5 on worker-1"),
    LogLine(1.2, "worker worker-0 is ready (3 ms)"),
    LogLine(1.5, "worker worker-1 is ready (3 ms)"),
    LogLine(1.6, "epoch 1 begins on 2 workers"),
    LogLine(2.0, "serving: epoch 1, 2 stages"),
    LogLine(5.0, "worker worker-1 left: its stream ended"),
    LogLine(5.0, "epoch 1 is over: worker worker-1 is lost: its stream ended"),
    LogLine(5.5, "plan 2: layers 0-5 on worker-0"),
    LogLine(5.6, "worker worker-0 left: its stream ended"),
    LogLine(6.6, "plan 3: layers 0-5 on worker-1"),
    LogLine(6.8, "worker worker-1 is ready (3 ms)"),
    LogLine(6.8, "epoch 2 begins on 1 workers"),
    LogLine(7.0, "serving: epoch 2, 1 stages, again after 2.00 s"),
    LogLine(8.0, "epoch 2 is over: the connection to stage 0 broke"),
    LogLine(8.1, "epoch 3 begins on 1 workers"),
    LogLine(8.3, "serving: epoch 3, 1 stages, again after 0.30 s"),
]


def rounded(begin_s: float, end_s: float) -> dict[Phase, float]:
    parts = parts_of(begin_s, end_s, spans_of(LINES, [], end_s=20.0))
    return {phase: round(seconds, 3) for phase, seconds in parts.items()}


def test_a_pause_is_divided_among_the_phases_of_the_coordinator() -> None:
    assert rounded(4.6, 7.4) == {
        Phase.DETECTION: 0.4,
        Phase.NO_PLAN: 1.5,
        Phase.LOADING: 0.3,
        Phase.CONNECTING: 0.2,
        Phase.RECOMPUTING: 0.4,
    }


def test_an_epoch_that_breaks_is_followed_by_a_backoff() -> None:
    assert rounded(7.9, 8.5) == {
        Phase.DETECTION: 0.1,
        Phase.BACKOFF: 0.1,
        Phase.CONNECTING: 0.2,
        Phase.RECOMPUTING: 0.2,
    }


def test_every_moment_from_the_first_line_on_has_one_phase() -> None:
    spans = spans_of(LINES, [(10.0, 12.0)], end_s=20.0)
    assert all(one.end_s == other.begin_s for one, other in itertools.pairwise(spans))
    assert (spans[0].begin_s, spans[-1].end_s) == (1.0, 20.0)
    assert sum(parts_of(10.0, 12.0, spans).values()) == 2.0
    assert set(parts_of(10.0, 12.0, spans)) == {Phase.COORDINATOR_DOWN}
    assert num_recoveries(4.6, 8.5, spans) == 2


def test_lines_other_than_json_are_skipped(tmp_path: Path) -> None:
    log = tmp_path / "coordinator.log"
    entry = json.dumps({"ts": "2026-01-31T12:00:00.250Z", "message": "serving: epoch 1, 2 stages"})
    log.write_text(f"stageline coordinator listening on 127.0.0.1:1\n{entry}\n7\n")
    assert read_log(log) == [LogLine(1769860800.25, "serving: epoch 1, 2 stages")]


def test_a_log_without_lines_has_no_spans() -> None:
    """As of a cluster that did not start, whose own failure is reported."""
    assert spans_of([], [], end_s=20.0) == []
