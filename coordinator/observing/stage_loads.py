"""What share of the time each stage computes, and how long it takes for a step. Pure.

The times of a step are known when it is answered. So what a stage has done lately is not known yet while
steps are in flight; its shares then end with the last computation that is known of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.observing.step_history import KEPT_S, AnsweredStep
from wire.steps import StageTime

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """Of one stage in the last seconds.

    `busy_share`: of all time, that in which it computes. Times are means per step, in seconds; `hop_s` ends
    with the first byte of the frame, as in traces.
    """

    num_steps: int
    busy_share: float
    compute_s: float
    wait_s: float
    hop_s: float


def stage_loads(
    steps: Sequence[AnsweredStep], now_s: float, *, began_s: float, is_idle: bool
) -> list[StageLoad]:
    """For each stage of the newest step whose times are known; empty without any. Nothing before `began_s`
    counts, and neither do steps without slices or of other plans. `is_idle`: no step is in flight.
    """
    known = [each for each in steps if each.stage_times and each.sent.num_sequences]
    if not known:
        return []
    num_stages = len(known[-1].stage_times)
    known = [each for each in known if len(each.stage_times) == num_stages]
    begin_s = max(now_s - KEPT_S, began_s)
    # Only steps that were handed out before the window can have been computed before it.
    early = [list(each.computed()) for each in known if each.sent.sent_s < begin_s]
    ends_s = [end_s for _, end_s in known[-1].computed()]
    loads = []
    for stage, times in enumerate(zip(*[each.stage_times for each in known], strict=True)):
        window = (begin_s, now_s if is_idle else min(now_s, ends_s[stage]))
        before_s = _overlap_s([each[stage] for each in early], (-math.inf, begin_s))
        loads.append(_load(times, before_s, window[1] - window[0]))
    return loads


def _load(times: Sequence[StageTime], before_s: float, window_s: float) -> StageLoad:
    """`before_s` of what was computed was computed before the window."""
    count = len(times)
    compute_s = sum([each.compute_us for each in times]) / 1e6
    return StageLoad(
        num_steps=count,
        busy_share=_share(compute_s - before_s, window_s),
        compute_s=compute_s / count,
        wait_s=sum([each.wait_us for each in times]) / count / 1e6,
        hop_s=sum([each.hop_us for each in times]) / count / 1e6,
    )


def _share(part_s: float, whole_s: float) -> float:
    return min(1.0, max(0.0, part_s) / max(whole_s, 1e-9))


def _overlap_s(intervals: Sequence[Interval], window: Interval) -> float:
    begin_s, end_s = window
    return sum([max(0.0, min(end, end_s) - max(begin, begin_s)) for begin, end in intervals])
