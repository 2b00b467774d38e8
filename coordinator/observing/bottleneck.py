"""Which stage holds up the others, and the sentence that says so. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.observing.stage_loads import StageLoad
from telemetry.slowness import stands_out, times_the_others

_FEW_STEPS = 3


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """`stage` computes longest for a step, `ratio` times as long as the median of the others."""

    stage: int
    ratio: float

    @property
    def is_notable(self) -> bool:
        return stands_out(self.ratio)


def find_bottleneck(loads: Sequence[StageLoad]) -> Bottleneck | None:
    """None for a single stage, and before there are some steps to compare."""
    if len(loads) < 2 or loads[0].num_steps < _FEW_STEPS:
        return None
    stage = max(range(len(loads)), key=lambda index: loads[index].compute_s)
    others = [load.compute_s for index, load in enumerate(loads) if index != stage]
    ratio = times_the_others(loads[stage].compute_s, others)
    return None if ratio is None else Bottleneck(stage, ratio)


def describe_pipeline(
    loads: Sequence[StageLoad], workers: Sequence[str], *, over_s: float, bubble_share: float | None
) -> str:
    """One sentence about the last `over_s` seconds; `workers` are the names of the stages' workers."""
    if not loads or not loads[0].num_steps:
        return f"Idle: no step in the last {over_s:.0f} s."
    found = find_bottleneck(loads)
    if found is None:
        return " ".join(f"{_name(stage, workers)} is {_busy(load)}." for stage, load in enumerate(loads))
    who, busy = _name(found.stage, workers), _busy(loads[found.stage])
    if found.is_notable:
        return f"{who} is the slowest: {busy}, {found.ratio:.1f} x the median step time."
    text = (
        f"No stage stands out: {who} takes longest, {found.ratio:.2f} x the median step time, and is {busy}"
    )
    if bubble_share is None:
        return f"{text}."
    return f"{text}; {_percent(bubble_share)} of the stages' time are bubbles."


def _name(stage: int, workers: Sequence[str]) -> str:
    worker = workers[stage] if stage < len(workers) else ""
    return f"Stage {stage} ({worker})" if worker else f"Stage {stage}"


def _busy(load: StageLoad) -> str:
    return f"{_percent(load.busy_share)} busy"


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"
