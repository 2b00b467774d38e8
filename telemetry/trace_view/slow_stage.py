"""Which stage computes longest, compared with the others in the same steps."""

from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from telemetry.spans import Attr
from telemetry.trace_view.read_model import RequestTrace, StagePlace, StageTimes

STANDS_OUT = 1.3
"""A stage that takes so many times as long as the others is worth a remark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStage:
    """The stage that computed longest. `ratio` is its time by that of the median of the other stages in the
    epochs in which it took part; None where there is no other stage, or the others took no time.
    """

    place: StagePlace
    compute_s: float
    ratio: float | None
    num_others: int

    @property
    def stands_out(self) -> bool:
        return self.ratio is not None and self.ratio >= STANDS_OUT


def slowest_stage(trace: RequestTrace) -> SlowStage | None:
    """None for a trace without spans of stages."""
    by_epoch = _compute_by_epoch(trace)
    found = [_compare(work.place, by_epoch) for work in trace.stages]
    return max(found, key=lambda each: (each.ratio or 0.0, each.compute_s), default=None)


def _compare(place: StagePlace, by_epoch: dict[int, dict[StagePlace, float]]) -> SlowStage:
    own_s = others_s = 0.0
    num_others = 0
    for computed in by_epoch.values():
        if place not in computed:
            continue
        own_s += computed[place]
        others = [seconds for other, seconds in computed.items() if other != place]
        num_others = max(num_others, len(others))
        others_s += median(others) if others else 0.0
    return SlowStage(
        place=place,
        compute_s=own_s,
        ratio=own_s / others_s if others_s > 0 else None,
        num_others=num_others,
    )


def _compute_by_epoch(trace: RequestTrace) -> dict[int, dict[StagePlace, float]]:
    """Stages of one epoch have computed the same steps."""
    found: dict[int, dict[StagePlace, float]] = defaultdict(lambda: defaultdict(float))
    for work in trace.stages:
        for span in work.spans:
            found[span.number(Attr.EPOCH)][work.place] += StageTimes.of(span).compute_s
    return found
