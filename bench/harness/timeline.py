"""Compute times of each step on each stage, combined from logs of coordinator and stages. Pure.

The coordinator logs when it sent a step and when the result arrived; each stage reports how long the frame
waited and how long it computed, on its own clock. The rest of the step's time is travel: n stages have n + 1
hops. A hop is assumed to take the time of the fastest travel among steps with as many tokens, and bars are
placed backwards from the result; longer travel is placed before FIRST, where frames queue in a busy pipeline.
So the length of every bar is measured; its place is uncertain by the differences of hops, and the median
travel is printed beside the drawing. A stage computes one step at a time, in order: a bar that would overlap
the previous one is moved behind it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bench.harness.step_log import LoggedStep


@dataclass(frozen=True, slots=True)
class Bar:
    """Computation of a step on a stage, in seconds from the beginning of the timeline."""

    stage: int
    step_id: int
    num_tokens: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bars; `busy` is the compute share of each stage, FIRST to LAST, `travel_s` the median travel time of
    all hops.
    """

    num_stages: int
    duration_s: float
    bars: tuple[Bar, ...]
    busy: tuple[float, ...]
    travel_s: float


def travel_s(step: LoggedStep) -> float:
    """Time of a step outside its stages, at least 0."""
    spent_s = sum(wait + compute for wait, compute in step.stages) / 1e6
    return max(0.0, step.result_s - step.sent_s - spent_s)


def timeline(steps: Iterable[LoggedStep], begin_s: float, end_s: float) -> Timeline:
    """Timeline of [begin_s, end_s] of the machine's clock; bars beyond it are cut.

    Raises ValueError without steps, or for a step without stage times.
    """
    inside = [step for step in steps if step.result_s >= begin_s and step.sent_s <= end_s]
    num_stages = {len(step.stages) for step in inside}
    if len(num_stages) != 1 or 0 in num_stages:
        raise ValueError(f"{len(inside)} steps with times of {sorted(num_stages)} stages")
    bars = _cut(_bars(sorted(inside, key=lambda step: step.step_id)), begin_s, end_s)
    count = num_stages.pop()
    duration_s = end_s - begin_s
    busy = tuple(
        sum(bar.end_s - bar.begin_s for bar in bars if bar.stage == stage) / duration_s
        for stage in range(count)
    )
    return Timeline(count, duration_s, tuple(bars), busy, statistics.median(map(travel_s, inside)))


def _bars(steps: Sequence[LoggedStep]) -> list[Bar]:
    """Bars on the machine's clock, in order of steps, FIRST to LAST."""
    hop_s: dict[int, float] = {}
    for step in steps:
        one_hop_s = travel_s(step) / (len(step.stages) + 1)
        hop_s[step.num_tokens] = min(one_hop_s, hop_s.get(step.num_tokens, one_hop_s))
    free_s: dict[int, float] = {}
    bars = []
    for step in steps:
        for bar in _placed(step, hop_s[step.num_tokens]):
            late_s = max(0.0, free_s.get(bar.stage, bar.begin_s) - bar.begin_s)
            moved = replace(bar, begin_s=bar.begin_s + late_s, end_s=bar.end_s + late_s)
            free_s[bar.stage] = moved.end_s
            bars.append(moved)
    return bars


def _placed(step: LoggedStep, hop_s: float) -> list[Bar]:
    """Bars of one step, FIRST to LAST, placed backwards from its result."""
    bars = []
    end_s = step.result_s - hop_s
    for stage, (wait_us, compute_us) in reversed(list(enumerate(step.stages))):
        begin_s = end_s - compute_us / 1e6
        bars.append(Bar(stage, step.step_id, step.num_tokens, begin_s, end_s))
        end_s = begin_s - wait_us / 1e6 - hop_s
    return bars[::-1]


def _cut(bars: Iterable[Bar], begin_s: float, end_s: float) -> list[Bar]:
    """Cut to the window, with times from its beginning."""
    return [
        Bar(
            bar.stage,
            bar.step_id,
            bar.num_tokens,
            max(bar.begin_s, begin_s) - begin_s,
            min(bar.end_s, end_s) - begin_s,
        )
        for bar in bars
        if bar.end_s > begin_s and bar.begin_s < end_s
    ]
