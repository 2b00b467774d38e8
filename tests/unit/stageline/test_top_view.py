"""Rendering of `stageline top` from status messages."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from stageline.cli.top import TopFrame, bar, format_duration, format_rate, top_view
from stageline_rpc.v1 import cluster_pb2, telemetry_pb2

DECODE, PREFILL = telemetry_pb2.STEP_KIND_DECODE, telemetry_pb2.STEP_KIND_PREFILL
NOW_US = 60_000_000


def shown(
    status: cluster_pb2.GetStatusResponse,
    activity: telemetry_pb2.GetActivityResponse,
    *,
    width: int = 80,
    height: int | None = None,
) -> str:
    console = Console(width=width, file=StringIO(), record=True)
    console.print(top_view(TopFrame(status, activity), width=width, height=height))
    return console.export_text()


def test_before_the_first_pipeline_top_shows_a_notice() -> None:
    text = shown(
        cluster_pb2.GetStatusResponse(
            model="m",
            num_stages=3,
            state=cluster_pb2.CLUSTER_STATE_WAITING_FOR_WORKERS,
            detail="1 of 3 workers joined",
        ),
        telemetry_pb2.GetActivityResponse(now_us=NOW_US, summary="Idle: no step in the last 10 s."),
    )
    assert "waiting for workers: 1 of 3 workers joined" in text
    assert "Idle: no step in the last 10 s." in text
    assert "bubble" not in text


def stage_row(text: str, stage: int) -> str:
    """The row of the pipeline, without its label."""
    (row,) = [line for line in text.splitlines() if line.startswith(f"{stage:>4}   ")]
    return row[7:]


def test_the_pipeline_has_a_row_for_each_stage_with_bubbles_where_it_idles() -> None:
    # Of the last 3 s, FIRST computes the second one, LAST the third one.
    steps = [
        telemetry_pb2.StepActivity(
            number=1,
            kind=DECODE,
            sent_us=NOW_US - 3_000_000,
            answered_us=NOW_US,
            computed_us=[1_000_000, 2_000_000, 2_000_000, 3_000_000],
        )
    ]
    loads = [telemetry_pb2.StageActivity(stage=stage, busy_share=0.33) for stage in range(2)]
    activity = telemetry_pb2.GetActivityResponse(now_us=NOW_US, steps=steps, stages=loads)
    text = shown(cluster_pb2.GetStatusResponse(num_stages=2), activity, width=67)
    assert stage_row(text, 0) == "·" * 20 + "█" * 20 + "·" * 20
    assert stage_row(text, 1) == "·" * 40 + "█" * 20


def test_unknown_bubbles_are_not_shown_as_0() -> None:
    def row(**known: float) -> list[str]:
        activity = telemetry_pb2.GetActivityResponse(stages=[telemetry_pb2.StageActivity()], **known)
        text = shown(cluster_pb2.GetStatusResponse(), activity)
        (found,) = [line.split() for line in text.splitlines() if line.startswith("Bubbles")]
        return found[1:]

    assert row() == ["-"]
    assert row(bubble_share=0.0)[:2] == ["0", "%"]


def test_live_requests_are_listed_first_as_space_permits() -> None:
    requests = [
        telemetry_pb2.RequestActivity(
            request_id=f"0199{index:04}-0000-7000-8000-00000000{index:04}",
            phase=telemetry_pb2.REQUEST_PHASE_DECODE if index < 30 else telemetry_pb2.REQUEST_PHASE_FINISHED,
            num_choices=1,
            num_generated_tokens=11,
            max_tokens=20,
            accepted_us=NOW_US - 3_000_000,
            started_us=NOW_US - 2_500_000,
            first_token_us=NOW_US - 2_000_000,
        )
        for index in range(60)
    ]
    activity = telemetry_pb2.GetActivityResponse(now_us=NOW_US, requests=requests)
    text = shown(cluster_pb2.GetStatusResponse(), activity, height=24)
    rows = [line for line in text.splitlines() if line.startswith("0199")]
    assert 1 <= len(rows) < 24
    assert len(text.splitlines()) <= 24
    assert rows[0].split()[1:] == ["decode", "0", "11/20", "500", "ms", "1.00", "s", "5.00", "3.00", "s"]


@pytest.mark.parametrize(
    ("share", "rendered"),
    [(0.0, "    "), (0.5, "██  "), (1.0, "████"), (2.0, "████"), (-1.0, "    "), (0.28125, "█▏  ")],
)
def test_bars_are_exact_to_an_eighth_of_a_column(share: float, rendered: str) -> None:
    assert bar(share, 4) == rendered


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0000853, "85 us"),
        (0.00081, "810 us"),
        (0.0081, "8.10 ms"),
        (0.0123, "12.3 ms"),
        (0.812, "812 ms"),
        (0.99949, "999 ms"),
        (0.9996, "1.00 s"),
        (12.34, "12.3 s"),
        (119.6, "120 s"),
        (125, "2 min 5 s"),
    ],
)
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_rates_have_three_digits() -> None:
    assert [format_rate(rate) for rate in (0, 7.123, 98.44, 12300.4)] == ["0", "7.12", "98.4", "12300"]
