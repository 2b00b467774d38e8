"""Time shares of a request by cause, its slowest stage, and an explanation in one sentence.

Each instant counts once. Choices that are active at the same time share it equally, and so do prefill chunks
that overlap on different stages. Within a prefill chunk or a decode span, shares follow the hop, receive,
wait and compute times that the stages recorded.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import TypeAlias

from telemetry.spans import Attr, SpanName
from telemetry.trace_view.read_model import NS_PER_S, RequestTrace, StagePlace, StageTimes, TraceSpan

STANDS_OUT = 1.3
"""A stage is slow from this ratio to the median of the others on."""


def ratio_to_median(own_s: float, others_s: Sequence[float]) -> float | None:
    """Ratio of a stage's time per step to the median of the other stages; None without other times."""
    middle_s = median(others_s) if others_s else 0.0
    return own_s / middle_s if middle_s > 0 else None


def stands_out(ratio: float | None) -> bool:
    """Whether a stage is slow, given its ratio to the median of the others."""
    return ratio is not None and ratio >= STANDS_OUT


class Cause(StrEnum):
    """Causes of a request's time."""

    INTAKE = "intake"
    QUEUE = "queue"
    HOP = "hop"
    RECEIVE = "receive"
    WAIT = "wait"
    COMPUTE = "compute"
    RESULT = "result"
    """From LAST to the coordinator."""
    UNRECORDED = "unrecorded"
    """In steps that some stage did not report."""
    TURN = "turn"
    """Between two steps, while other sequences are computed."""
    PREEMPTION = "preemption"
    RECOVERY = "recovery"
    GATEWAY_PROMPT = "gateway_prompt"
    """At the gateway, before the coordinator."""
    GATEWAY_RESPONSE = "gateway_response"
    """At the gateway, after the coordinator."""
    COORDINATOR = "coordinator"
    """Everything else."""


Key: TypeAlias = tuple[Cause, StagePlace | None]


@dataclass(frozen=True, slots=True)
class Share:
    """Seconds of the request; `place` is the stage for causes at a stage, else None."""

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


def time_shares(trace: RequestTrace) -> tuple[Share, ...]:
    """Shares, largest first; their sum is the duration of the request."""
    spent: dict[Key, float] = defaultdict(float)
    intervals = list(_intervals(trace))
    active_s = _active_seconds(intervals)
    for span in _activities(trace):
        for key, fraction in _causes_of(span, trace).items():
            spent[key] += active_s.get(span.span_id, 0.0) * fraction
    steps = trace.named(*_STEPS)
    first_end_ns = min((span.end_ns for span in steps), default=0)
    last_start_ns = max((span.start_ns for span in steps), default=0)
    for interval in intervals:
        if not interval.active:
            is_between = first_end_ns <= interval.start_ns and interval.end_ns <= last_start_ns
            cause = _outside(interval, trace.root) or (Cause.TURN if is_between else Cause.COORDINATOR)
            spent[cause, None] += interval.length_s
    shares = [Share(*key, seconds) for key, seconds in spent.items() if seconds > 0]
    return tuple(sorted(shares, key=lambda share: -share.seconds))


def _outside(interval: _Interval, root: TraceSpan) -> Cause | None:
    """The gateway's part in the time outside of the coordinator's request."""
    if interval.end_ns <= root.start_ns:
        return Cause.GATEWAY_PROMPT
    return Cause.GATEWAY_RESPONSE if interval.start_ns >= root.end_ns else None


def _activities(trace: RequestTrace) -> tuple[TraceSpan, ...]:
    return trace.named(*_PRIORITY)


def _causes_of(span: TraceSpan, trace: RequestTrace) -> Mapping[Key, float]:
    """Causes of a span's time, as fractions with sum 1."""
    name = SpanName(span.name)
    if name not in _STEPS:
        return {(_CAUSES[name], None): 1.0}
    seconds = _recorded(trace.children.get(span.span_id, ()))
    seconds[Cause.RESULT, None] = span.signed(Attr.RESULT_DURATION) or 0.0
    _remove_negative(seconds)
    recorded_s = math.fsum(seconds.values())
    stated_s = span.measure(Attr.STEP_DURATION)
    in_steps_s = min(span.duration_s, max(recorded_s, span.duration_s if stated_s is None else stated_s))
    seconds[Cause.UNRECORDED, None] = max(0.0, in_steps_s - recorded_s)
    seconds[Cause.TURN, None] = max(0.0, span.duration_s - in_steps_s)
    whole_s = math.fsum(seconds.values())
    return {key: part_s / whole_s for key, part_s in seconds.items()} if whole_s else {}


def _remove_negative(seconds: dict[Key, float]) -> None:
    """Remove negative times.

    A clock offset adds as much to the hops towards a host as it takes from the hops away from it, so negative
    times are subtracted from the other hops.
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
    """Seconds of the request per activity, by span id."""
    found: dict[str, float] = defaultdict(float)
    for interval in intervals:
        by_choice = _foremost_by_choice(interval.active)
        for spans in by_choice:
            for span in spans:
                found[span.span_id] += interval.length_s / (len(by_choice) * len(spans))
    return found


def _intervals(trace: RequestTrace) -> Iterator[_Interval]:
    """The request's time, cut at the begin and end of each activity."""
    begin_ns, end_ns = trace.root.start_ns, trace.root.end_ns
    edges: dict[int, list[TraceSpan]] = defaultdict(list, {begin_ns: [], end_ns: []})
    for span in _activities(trace):
        start_ns, stop_ns = max(begin_ns, span.start_ns), min(end_ns, span.end_ns)
        if start_ns < stop_ns:
            edges[start_ns].append(span)
            edges[stop_ns].append(span)
    active: dict[str, TraceSpan] = {}
    at_ns = trace.start_ns
    for edge_ns in sorted({*edges, trace.end_ns}):
        if edge_ns > at_ns:
            yield _Interval(at_ns, edge_ns, tuple(active.values()))
        at_ns = edge_ns
        for span in edges.get(edge_ns, ()):
            if active.pop(span.span_id, None) is None:
                active[span.span_id] = span


def _foremost_by_choice(active: Iterable[TraceSpan]) -> list[list[TraceSpan]]:
    """The activities of highest priority of each choice."""
    by_choice: dict[int | None, list[TraceSpan]] = defaultdict(list)
    for span in active:
        by_choice[span.choice].append(span)
    return [_of_highest_priority(spans) for spans in by_choice.values()]


def _of_highest_priority(spans: list[TraceSpan]) -> list[TraceSpan]:
    highest = max(_PRIORITY[SpanName(span.name)] for span in spans)
    return [span for span in spans if _PRIORITY[SpanName(span.name)] == highest]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStage:
    """The stage with the highest compute time per step, relative to the other stages.

    Attributes:
        ratio: compute time of the stage relative to the median of the other stages for the same number of
            steps, prefill and decode separately, in the stage's epochs; None without other stages or times.
        num_others: number of other stages in the last of these epochs.
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
    """Compute time of `num_steps` steps."""

    seconds: float = 0.0
    num_steps: int = 0

    @property
    def per_step_s(self) -> float:
        return self.seconds / self.num_steps


_Work: TypeAlias = dict[tuple[int, str], dict[StagePlace, _Computed]]
"""By epoch and span name, which separates prefill and decode."""


def slowest_stage(trace: RequestTrace) -> SlowStage | None:
    """None for a trace without stage spans."""
    done = _work(trace)
    found = [_compare(work.place, done) for work in trace.stages]
    return max(found, key=lambda stage: (stage.ratio or 0.0, stage.compute_s), default=None)


def _compare(place: StagePlace, done: _Work) -> SlowStage:
    own_s = compared_s = others_s = 0.0
    others_by_epoch: dict[int, set[StagePlace]] = {}
    for (epoch, _), computed in done.items():
        if place not in computed:
            continue
        own = computed[place]
        own_s += own.seconds
        others = [work for other, work in computed.items() if other != place]
        others_by_epoch.setdefault(epoch, set()).update(computed.keys() - {place})
        if others:
            compared_s += own.seconds
            others_s += own.num_steps * median(other.per_step_s for other in others)
    return SlowStage(
        place=place,
        compute_s=own_s,
        ratio=compared_s / others_s if others_s > 0 else None,
        num_others=len(others_by_epoch[max(others_by_epoch)]),
    )


def _work(trace: RequestTrace) -> _Work:
    """Some steps lack a stage: spans of a worker that crashed are missing."""
    found: _Work = defaultdict(lambda: defaultdict(_Computed))
    for work in trace.stages:
        for span in work.spans:
            computed = found[span.number(Attr.EPOCH), span.name][work.place]
            computed.seconds += StageTimes.of(span).compute_s
            computed.num_steps += max(1, span.number(Attr.NUM_STEPS, 1))
    return found


MAX_PARTS = 4
MIN_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of the explanation: seconds, and text `before` and `after` the stage's name."""

    seconds: float
    before: str
    place: StagePlace | None = None
    after: str = ""
    is_slow_stage: bool = False


def explain(trace: RequestTrace) -> str:
    """Explain where the time went.

    Example: "2.41 s: 71 % computing on stage 2 (worker-2, layers 8-11), which takes 2.1 x as long as the
    median stage; 12 % waiting at stage 2 behind other steps; 9 % in the queue."
    """
    whole_s = trace.duration_s
    parts = _largest_parts(_groups(trace), whole_s)
    if not parts:
        return f"{_headline(trace)}: no time was spent."
    names = _StageNames()
    words = [f"{round(100 * part.seconds / whole_s)} % {_text(part, names)}" for part in parts]
    return f"{_headline(trace)}: {'; '.join(words)}."


def format_seconds(seconds: float) -> str:
    """Format with three digits: 123 s, 12.3 s, 2.41 s, 812 ms, 8.10 ms, 85 us, -85 us."""
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds >= 0.9995:
        return f"{three_digits(seconds)} s"
    if seconds >= 0.0009995:
        return f"{three_digits(seconds * 1e3)} ms"
    return f"{seconds * 1e6:.0f} us"


def three_digits(number: float) -> str:
    """Format as 12300, 98.4 or 7.12."""
    if number >= 99.95:
        return f"{number:.0f}"
    return f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"


class _StageNames:
    """Names of stages; the first mention has worker and layers."""

    def __init__(self) -> None:
        self._known: set[StagePlace] = set()

    def of(self, place: StagePlace) -> str:
        if place in self._known:
            return f"stage {place.index}"
        self._known.add(place)
        plural = "layers" if place.layer_end - place.layer_begin > 1 else "layer"
        return f"stage {place.index} ({place.worker}, {plural} {place.layers})"


def _headline(trace: RequestTrace) -> str:
    length = format_seconds(trace.duration_s)
    return length if trace.outcome == "finished" else f"{trace.outcome} after {length}"


def _text(part: _Part, names: _StageNames) -> str:
    place = "" if part.place is None else f" {names.of(part.place)}"
    return f"{part.before}{place}{part.after}"


def _largest_parts(groups: Iterable[list[_Part]], whole_s: float) -> list[_Part]:
    """The largest parts, ordered by the time of their group, the slow stage before the others."""
    ordered = [
        part
        for group in sorted(groups, key=lambda group: -sum(part.seconds for part in group))
        for part in group
        if part.seconds > 0
    ]
    large = [part for part in ordered if part.seconds >= MIN_SHARE * whole_s]
    kept = sorted(large, key=lambda part: -part.seconds)[:MAX_PARTS] or ordered[:1]
    return [part for part in ordered if part in kept or part.is_slow_stage]


def _groups(trace: RequestTrace) -> list[list[_Part]]:
    shares = time_shares(trace)
    return [
        _compute_parts(shares, slowest_stage(trace)),
        _wait_parts(shares),
        _transit_parts(shares),
        *([part] for part in _other_causes(trace, shares)),
    ]


def _compute_parts(shares: Iterable[Share], slow: SlowStage | None) -> list[_Part]:
    by_place = _by_place(shares, Cause.COMPUTE)
    if slow is None or not by_place:
        return []
    if len(by_place) == 1:
        return [_Part(by_place[slow.place], "computing on the only stage,", slow.place)]
    whole_s = math.fsum(by_place.values())
    if slow.ratio is None or not slow.stands_out:
        return [_Part(whole_s, f"computing, spread evenly over {_stages(len(by_place))}")]
    others = "the median stage" if slow.num_others > 1 else "the other stage"
    own_s = by_place.get(slow.place, 0.0)
    remark = f", which takes {_ratio(slow.ratio)} x as long as {others}"
    return [
        _Part(own_s, "computing on", slow.place, remark, is_slow_stage=True),
        _Part(whole_s - own_s, f"computing on the other {_stages(slow.num_others)}"),
    ]


def _wait_parts(shares: Iterable[Share]) -> list[_Part]:
    return _concentrated(
        _by_place(shares, Cause.WAIT),
        at_one=("waiting at", " behind other steps"),
        elsewhere="waiting behind other steps at the stages",
    )


def _transit_parts(shares: Iterable[Share]) -> list[_Part]:
    back_s = math.fsum(share.seconds for share in shares if share.cause is Cause.RESULT)
    hops = _by_place(shares, Cause.HOP, Cause.RECEIVE)
    if back_s > math.fsum(hops.values()):
        return [
            _Part(back_s, "in transit from the last stage back to the coordinator"),
            _Part(math.fsum(hops.values()), "in transit between stages"),
        ]
    parts = _concentrated(hops, at_one=("in transit into", ""), elsewhere="in transit between stages")
    return [*parts, _Part(back_s, "in transit back to the coordinator")]


def _concentrated(
    by_place: Mapping[StagePlace, float], *, at_one: tuple[str, str], elsewhere: str
) -> list[_Part]:
    """Name a stage with most of the time and twice the median of the others, else group all stages."""
    if not by_place:
        return []
    place = max(by_place, key=by_place.__getitem__)
    rest = [seconds for other, seconds in by_place.items() if other != place]
    rest_s = math.fsum(rest)
    if by_place[place] <= rest_s or (rest and by_place[place] < 2 * median(rest)):
        return [_Part(rest_s + by_place[place], elsewhere)]
    return [_Part(by_place[place], at_one[0], place, at_one[1]), _Part(rest_s, elsewhere)]


def _other_causes(trace: RequestTrace, shares: Iterable[Share]) -> list[_Part]:
    words = {
        Cause.QUEUE: "in the queue",
        Cause.TURN: "between steps, while other sequences were computed",
        Cause.RECOVERY: f"recovering{_count_and_reason(trace, SpanName.RECOVERY)}",
        Cause.PREEMPTION: f"preempted{_count_and_reason(trace, SpanName.PREEMPTION)}",
        Cause.INTAKE: "before the queue (checks, tokenizer, no pipeline yet)",
        Cause.UNRECORDED: "in steps without times from every stage",
        Cause.GATEWAY_PROMPT: "in the gateway before the coordinator (body, chat template, tokenizer)",
        Cause.GATEWAY_RESPONSE: "in the gateway after the last token (text, sending to the client)",
        Cause.COORDINATOR: "in the coordinator",
    }
    return [_Part(share.seconds, words[share.cause]) for share in shares if share.cause in words]


def _count_and_reason(trace: RequestTrace, name: SpanName) -> str:
    """Count and first reason, such as " twice (worker-1 was lost)"."""
    spans = trace.named(name)
    num_times = max((sum(span.choice == choice for span in spans) for choice in _choices(trace)), default=0)
    often = "" if num_times < 2 else " twice" if num_times == 2 else f" {num_times} times"
    reasons = list(dict.fromkeys(filter(None, (span.text(Attr.REASON) for span in spans))))
    return often + (f" ({reasons[0]}{', ...' if len(reasons) > 1 else ''})" if reasons else "")


def _choices(trace: RequestTrace) -> set[int | None]:
    return {span.choice for span in trace.spans}


def _by_place(shares: Iterable[Share], *causes: Cause) -> dict[StagePlace, float]:
    found: dict[StagePlace, float] = defaultdict(float)
    for share in shares:
        if share.cause in causes and share.place is not None:
            found[share.place] += share.seconds
    return dict(found)


def _stages(number: int) -> str:
    return "stage" if number == 1 else f"{number} stages"


def _ratio(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"
