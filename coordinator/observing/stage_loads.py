"""What share of the time each stage computes, and how long it takes for a step. Pure.

The times of a step are known when it is answered. So what a stage has done lately is not known yet while
steps are in flight; its shares then end with the last computation that is known of it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coordinator.observing.step_history import KEPT_S, AnsweredStep, SentStep
from wire.steps import StageTime

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """Of one stage in the last seconds.

    `busy_share`: of all time, that in which it computes. `bubble_share`: of the time in which steps are in
    flight, that in which it does not. The other times are means per step, in seconds; `hop_s` includes
    receiving.
    """

    num_steps: int
    busy_share: float
    bubble_share: float
    compute_s: float
    wait_s: float
    hop_s: float


def stage_loads(
    steps: Sequence[AnsweredStep], in_flight: Sequence[SentStep], now_s: float, *, began_s: float
) -> list[StageLoad]:
    """For each stage of the newest step whose times are known; empty without any. Nothing before `began_s`
    counts, and neither do steps without slices or of other plans.
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
    runs = list(_runs(steps, in_flight, now_s))
    loads = []
    for stage, times in enumerate(zip(*[each.stage_times for each in known], strict=True)):
        window = (begin_s, min(now_s, ends_s[stage]) if in_flight else now_s)
        before_s = _overlap_s([each[stage] for each in early], (-math.inf, begin_s))
        loads.append(_load(times, before_s, _overlap_s(runs, window), window))
    return loads


def bubble_share(loads: Sequence[StageLoad]) -> float | None:
    """The mean over all stages."""
    return sum(each.bubble_share for each in loads) / len(loads) if loads else None


def _load(times: Sequence[StageTime], before_s: float, in_flight_s: float, window: Interval) -> StageLoad:
    """`before_s` of what was computed was computed before the window."""
    count = len(times)
    compute_s = sum([each.compute_us for each in times]) / 1e6
    busy_s = compute_s - before_s
    return StageLoad(
        num_steps=count,
        busy_share=_share(busy_s, window[1] - window[0]),
        bubble_share=1 - _share(busy_s, in_flight_s),
        compute_s=compute_s / count,
        wait_s=sum([each.wait_us for each in times]) / count / 1e6,
        hop_s=sum([each.hop_us + each.receive_us for each in times]) / count / 1e6,
    )


def _share(part_s: float, whole_s: float) -> float:
    return min(1.0, max(0.0, part_s) / max(whole_s, 1e-9))


def _overlap_s(intervals: Sequence[Interval], window: Interval) -> float:
    begin_s, end_s = window
    return sum([max(0.0, min(end, end_s) - max(begin, begin_s)) for begin, end in intervals])


def _runs(steps: Sequence[AnsweredStep], in_flight: Sequence[SentStep], now_s: float) -> Iterator[Interval]:
    """Unbroken times in which at least one step is in flight."""
    spans = [(each.sent.sent_s, each.answered_s) for each in steps]
    spans += [(each.sent_s, now_s) for each in in_flight]
    if not spans:
        return
    begin_s, end_s = spans[0]
    for sent_s, answered_s in spans[1:]:
        if sent_s > end_s:
            yield begin_s, end_s
            begin_s = sent_s
        end_s = max(end_s, answered_s)
    yield begin_s, end_s
