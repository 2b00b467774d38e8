"""Which stage computes longest, compared with the others, step by step."""

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from telemetry.slowness import stands_out
from telemetry.spans import Attr
from telemetry.trace_view.read_model import RequestTrace, StagePlace, StageTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStage:
    """The stage that computed longest for a step. `ratio` is what it took by what the median of the other
    stages would have taken for as many steps, prefill and decode apart, in the epochs in which it took part;
    None where there is no other stage, or the others took no time. `num_others` is of the last of its epochs.
    """

    place: StagePlace
    compute_s: float
    ratio: float | None
    num_others: int

    @property
    def stands_out(self) -> bool:
        return stands_out(self.ratio)


@dataclass(slots=True)
class _Computed:
    """Seconds of so many steps."""

    seconds: float = 0.0
    num_steps: int = 0

    @property
    def per_step_s(self) -> float:
        return self.seconds / self.num_steps


_Work: TypeAlias = dict[tuple[int, str], dict[StagePlace, _Computed]]
"""By epoch and name of the span, which is the kind of the steps."""


def slowest_stage(trace: RequestTrace) -> SlowStage | None:
    """None for a trace without spans of stages."""
    done = _work(trace)
    found = [_compare(work.place, done) for work in trace.stages]
    return max(found, key=lambda each: (each.ratio or 0.0, each.compute_s), default=None)


def _compare(place: StagePlace, done: _Work) -> SlowStage:
    own_s = compared_s = others_s = 0.0
    others_by_epoch: dict[int, set[StagePlace]] = {}
    for (epoch, _), computed in done.items():
        if place not in computed:
            continue
        own = computed[place]
        own_s += own.seconds
        others = [each for other, each in computed.items() if other != place]
        others_by_epoch.setdefault(epoch, set()).update(computed.keys() - {place})
        if others:
            compared_s += own.seconds
            others_s += own.num_steps * median(each.per_step_s for each in others)
    return SlowStage(
        place=place,
        compute_s=own_s,
        ratio=compared_s / others_s if others_s > 0 else None,
        num_others=len(others_by_epoch[max(others_by_epoch)]),
    )


def _work(trace: RequestTrace) -> _Work:
    """Not every stage tells of every step: spans that a worker had when it died are missing."""
    found: _Work = defaultdict(lambda: defaultdict(_Computed))
    for work in trace.stages:
        for span in work.spans:
            computed = found[span.number(Attr.EPOCH), span.name][work.place]
            computed.seconds += StageTimes.of(span).compute_s
            computed.num_steps += max(1, span.number(Attr.NUM_STEPS, 1))
    return found
