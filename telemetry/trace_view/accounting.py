"""The time of a request, shared out among its causes, so that the parts add up to the whole.

Every instant counts once. Where several choices are under way it counts for them in equal parts, and so it
does for chunks of a prompt that follow each other through the stages. Within a prefill chunk and within a
decode span the shares are those of the steps: what the stages say of hops, receiving, waiting and computing.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from telemetry.spans import Attr, SpanName
from telemetry.trace_view.read_model import NS_PER_S, RequestTrace, StagePlace, StageTimes, TraceSpan


class Cause(StrEnum):
    """What a request can spend time on."""

    INTAKE = "intake"
    QUEUE = "queue"
    HOP = "hop"
    RECEIVE = "receive"
    WAIT = "wait"
    COMPUTE = "compute"
    RESULT = "result"
    """The way from LAST back to the coordinator."""
    UNRECORDED = "unrecorded"
    """Steps of which not every stage has told its times."""
    TURN = "turn"
    """Between two steps: other sequences are computed."""
    PREEMPTION = "preemption"
    RECOVERY = "recovery"
    COORDINATOR = "coordinator"
    """Everything else."""


Key: TypeAlias = tuple[Cause, StagePlace | None]


@dataclass(frozen=True, slots=True)
class Share:
    """Seconds of the request. `place` is the stage, for what happens at one."""

    cause: Cause
    place: StagePlace | None
    seconds: float


@dataclass(frozen=True, slots=True)
class _Interval:
    start_ns: int
    end_ns: int
    active: tuple[TraceSpan, ...]

    @property
    def length_s(self) -> float:
        return (self.end_ns - self.start_ns) / NS_PER_S


_PRIORITY = {
    SpanName.RECOVERY: 4,
    SpanName.PREEMPTION: 3,
    SpanName.PREFILL_CHUNK: 2,
    SpanName.DECODE: 2,
    SpanName.QUEUE: 1,
    SpanName.INTAKE: 0,
}
_CAUSES = {
    SpanName.RECOVERY: Cause.RECOVERY,
    SpanName.PREEMPTION: Cause.PREEMPTION,
    SpanName.QUEUE: Cause.QUEUE,
    SpanName.INTAKE: Cause.INTAKE,
}
_STEPS = (SpanName.PREFILL_CHUNK, SpanName.DECODE)


def account(trace: RequestTrace) -> tuple[Share, ...]:
    """Largest first. The sum is the duration of the request."""
    spent: dict[Key, float] = defaultdict(float)
    intervals = list(_intervals(trace))
    active_s = _active_seconds(intervals)
    for span in _activities(trace):
        for key, fraction in _mix(span, trace).items():
            spent[key] += active_s.get(span.span_id, 0.0) * fraction
    steps = trace.named(*_STEPS)
    first_end_ns = min((span.end_ns for span in steps), default=0)
    last_start_ns = max((span.start_ns for span in steps), default=0)
    for interval in intervals:
        if not interval.active:
            is_between = first_end_ns <= interval.start_ns and interval.end_ns <= last_start_ns
            spent[Cause.TURN if is_between else Cause.COORDINATOR, None] += interval.length_s
    shares = [Share(*key, seconds) for key, seconds in spent.items() if seconds > 0]
    return tuple(sorted(shares, key=lambda share: -share.seconds))


def _activities(trace: RequestTrace) -> tuple[TraceSpan, ...]:
    return trace.named(*_PRIORITY)


def _mix(span: TraceSpan, trace: RequestTrace) -> Mapping[Key, float]:
    """What the span's time consists of; the fractions add up to 1."""
    name = SpanName(span.name)
    if name not in _STEPS:
        return {(_CAUSES[name], None): 1.0}
    seconds = _recorded(trace.children.get(span.span_id, ()))
    seconds[Cause.RESULT, None] = span.signed(Attr.RESULT_DURATION) or 0.0
    _balance(seconds)
    recorded_s = math.fsum(seconds.values())
    stated_s = span.measure(Attr.STEP_DURATION)
    in_steps_s = min(span.duration_s, max(recorded_s, span.duration_s if stated_s is None else stated_s))
    seconds[Cause.UNRECORDED, None] = max(0.0, in_steps_s - recorded_s)
    seconds[Cause.TURN, None] = max(0.0, span.duration_s - in_steps_s)
    whole_s = math.fsum(seconds.values())
    return {key: part_s / whole_s for key, part_s in seconds.items()} if whole_s else {}


def _balance(seconds: dict[Key, float]) -> None:
    """A clock that is off makes the way to its host longer and the way from there shorter, or the other way
    round, by as much: what is less than nothing is taken from the other ways.
    """
    ways = [key for key in seconds if key[0] in (Cause.HOP, Cause.RESULT)]
    positive_s = math.fsum(max(0.0, seconds[key]) for key in ways)
    left_s = max(0.0, math.fsum(seconds[key] for key in ways))
    for key in ways:
        seconds[key] = max(0.0, seconds[key]) * left_s / positive_s if positive_s else 0.0


def _recorded(stage_spans: Iterable[TraceSpan]) -> dict[Key, float]:
    seconds: dict[Key, float] = defaultdict(float)
    for span in stage_spans:
        if not span.is_stage:
            continue
        place, times = StagePlace.of(span), StageTimes.of(span)
        seconds[Cause.HOP, place] += times.hop_s
        seconds[Cause.RECEIVE, place] += times.receive_s
        seconds[Cause.WAIT, place] += times.wait_s
        seconds[Cause.COMPUTE, place] += times.compute_s
    return seconds


def _active_seconds(intervals: Iterable[_Interval]) -> Mapping[str, float]:
    """How much of the request's time counts for each activity, by span id."""
    found: dict[str, float] = defaultdict(float)
    for interval in intervals:
        foremost = _foremost(interval.active)
        for spans in foremost:
            for span in spans:
                found[span.span_id] += interval.length_s / (len(foremost) * len(spans))
    return found


def _intervals(trace: RequestTrace) -> Iterator[_Interval]:
    """The request's time, cut wherever an activity begins or ends."""
    begin_ns, end_ns = trace.root.start_ns, trace.root.end_ns
    edges: dict[int, list[TraceSpan]] = defaultdict(list)
    for span in _activities(trace):
        start_ns, stop_ns = max(begin_ns, span.start_ns), min(end_ns, span.end_ns)
        if start_ns < stop_ns:
            edges[start_ns].append(span)
            edges[stop_ns].append(span)
    active: dict[str, TraceSpan] = {}
    at_ns = begin_ns
    for edge_ns in sorted({*edges, end_ns}):
        if edge_ns > at_ns:
            yield _Interval(at_ns, edge_ns, tuple(active.values()))
        at_ns = edge_ns
        for span in edges.get(edge_ns, ()):
            if active.pop(span.span_id, None) is None:
                active[span.span_id] = span


def _foremost(active: Iterable[TraceSpan]) -> list[list[TraceSpan]]:
    """For each choice what matters most of what it is doing."""
    by_choice: dict[int | None, list[TraceSpan]] = defaultdict(list)
    for span in active:
        by_choice[span.choice].append(span)
    return [_of_highest_priority(spans) for spans in by_choice.values()]


def _of_highest_priority(spans: list[TraceSpan]) -> list[TraceSpan]:
    highest = max(_PRIORITY[SpanName(span.name)] for span in spans)
    return [span for span in spans if _PRIORITY[SpanName(span.name)] == highest]
