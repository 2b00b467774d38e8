"""Figures and steps for tests of the benchmark harness."""

from __future__ import annotations

from typing import Any

from bench.harness.figure import Better, Figure
from bench.harness.step_log import LoggedStep


def figure(name: str = "speed", measured: float = 80.0, bound: float = 100.0, **rest: Any) -> Figure:
    return Figure(name=name, measured=measured, bound=bound, unit="tok/s", how="counted", **rest)


def latency(measured: float, bound: float = 100.0, **rest: Any) -> Figure:
    return figure("latency", measured, bound, better=Better.LOWER, **rest)


def logged(step_id: int, sent_s: float, result_s: float, **rest: Any) -> LoggedStep:
    return LoggedStep(
        epoch=1, step_id=step_id, sent_s=sent_s, result_s=result_s, **{"num_decodes": 1, **rest}
    )
