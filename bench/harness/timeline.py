"""When each stage computed each step, put together from what the coordinator and the stages noted. Pure.

The coordinator knows when it handed a step out and when the result came back; each stage says how long the
whole frame waited for it and how long it computed, on its own clock. What is left of the step's time is
travel: n stages have n + 1 hops. A hop is taken to last what it lasts in the fastest travel among steps of as
many tokens, and bars are placed from the result backwards: what a step's travel took longer, it spent before
FIRST, where frames pile up that a busy pipeline does not take yet. So the length of every bar is measured;
its place is uncertain by what hops differ, and the median travel is shown beside the drawing. A stage
computes one step at a time, in order: a bar that would begin before the one in front of it has ended is moved
behind it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bench.harness.step_log import LoggedStep


@dataclass(frozen=True, slots=True)
class Bar:
    """A stage computes a step, in seconds from the beginning of the timeline."""

    stage: int
    step_id: int
    num_tokens: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """`busy` is the share of the time in which each stage computes, FIRST to LAST; `travel_s` the median of
    what the steps spent on all their hops together.
    """

    num_stages: int
    duration_s: float
    bars: tuple[Bar, ...]
    busy: tuple[float, ...]
    travel_s: float


def travel_s(step: LoggedStep) -> float:
    """What is left of a step's time when no stage works on it or keeps it waiting. Never below 0."""
    spent_s = sum(wait + compute for wait, compute in step.stages) / 1e6
    return max(0.0, step.result_s - step.sent_s - spent_s)


def timeline(steps: Iterable[LoggedStep], begin_s: float, end_s: float) -> Timeline:
    """What happened in [begin_s, end_s] of the machine's clock; bars that reach beyond it are cut.

    Raises ValueError where no step, or a step without the times of its stages, is in it.
    """
    inside = [step for step in steps if step.result_s >= begin_s and step.sent_s <= end_s]
    num_stages = {len(step.stages) for step in inside}
    if len(num_stages) != 1 or 0 in num_stages:
        raise ValueError(f"{len(inside)} steps that tell the times of {sorted(num_stages)} stages")
    bars = _cut(_bars(sorted(inside, key=lambda step: step.step_id)), begin_s, end_s)
    count = num_stages.pop()
    duration_s = end_s - begin_s
    busy = tuple(
        sum(bar.end_s - bar.begin_s for bar in bars if bar.stage == stage) / duration_s
        for stage in range(count)
    )
    return Timeline(count, duration_s, tuple(bars), busy, statistics.median(map(travel_s, inside)))


def _bars(steps: Sequence[LoggedStep]) -> list[Bar]:
    """On the machine's clock, in the order of the steps, FIRST to LAST."""
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
    """The bars of one step, FIRST to LAST, placed from its result backwards."""
    bars = []
    end_s = step.result_s - hop_s
    for stage, (wait_us, compute_us) in reversed(list(enumerate(step.stages))):
        begin_s = end_s - compute_us / 1e6
        bars.append(Bar(stage, step.step_id, step.num_tokens, begin_s, end_s))
        end_s = begin_s - wait_us / 1e6 - hop_s
    return bars[::-1]


def _cut(bars: Iterable[Bar], begin_s: float, end_s: float) -> list[Bar]:
    """To the time in question, and counted from its beginning."""
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
