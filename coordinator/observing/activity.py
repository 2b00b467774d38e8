"""What the pipeline has done lately, as plain data that nobody changes any more. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.observing.bottleneck import describe_pipeline, find_bottleneck
from coordinator.observing.per_second import PastSecond, Rates
from coordinator.observing.request_history import RequestActivity
from coordinator.observing.stage_loads import StageLoad, stage_loads
from coordinator.observing.step_history import KEPT_S, AnsweredStep, SentStep

MAX_STAGE_TIMES = 8000
"""Of all stages in the steps of one answer: some 100 kB."""


@dataclass(frozen=True, slots=True)
class EpochSpan:
    """When steps of an epoch could be handed out, and why it ended; `stopped_s` None: they still can."""

    epoch: int
    started_s: float
    stopped_s: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What was recorded. Times are in seconds of the coordinator's monotonic clock, of which `now_s` was
    `now_unix_s` since 1970; it is recorded since `began_s`.

    `bubble_share` is that of the metric `stageline.pipeline.bubble`, None where nothing was in flight.
    `steps` are those answered in the last seconds, of `num_answered` in all; `workers` are the names of the
    stages' workers; `seconds` and `steps` begin with the oldest, `ended` with the latest.
    """

    now_s: float
    now_unix_s: float
    began_s: float
    bubble_share: float | None
    num_answered: int
    steps: tuple[AnsweredStep, ...]
    in_flight: tuple[SentStep, ...]
    epochs: tuple[EpochSpan, ...]
    workers: tuple[str, ...]
    rates: Rates
    seconds: tuple[PastSecond, ...]
    live: tuple[RequestActivity, ...]
    ended: tuple[RequestActivity, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLoad:
    """What stages did in the last `over_s` seconds.

    `slowest` holds up the others, if one of them does; `summary` says it in a sentence.
    """

    over_s: float
    stages: tuple[StageLoad, ...]
    bubble_share: float | None
    slowest: int | None
    summary: str


def pipeline_load(snapshot: Snapshot) -> PipelineLoad:
    """Takes some milliseconds where there are many steps."""
    over_s = min(KEPT_S, snapshot.now_s - snapshot.began_s)
    loads = stage_loads(
        snapshot.steps, snapshot.now_s, began_s=snapshot.began_s, is_idle=not snapshot.in_flight
    )
    found = find_bottleneck(loads)
    return PipelineLoad(
        over_s=over_s,
        stages=tuple(loads),
        bubble_share=snapshot.bubble_share,
        slowest=found.stage if found is not None and found.is_notable else None,
        summary=describe_pipeline(loads, snapshot.workers, over_s=over_s, bubble_share=snapshot.bubble_share),
    )


def steps_after(steps: Sequence[AnsweredStep], number: int) -> tuple[AnsweredStep, ...]:
    """Those that were answered after step `number`; where they are many, the latest."""
    kept, num_times = list[AnsweredStep](), 0
    for step in reversed(steps):
        num_times += len(step.stage_times)
        if step.number <= number or num_times > MAX_STAGE_TIMES:
            break
        kept.append(step)
    return tuple(reversed(kept))
