"""A request as rows of segments on one time axis: the gateway, the coordinator's phases, each stage."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from telemetry.spans import Attr, SpanName
from telemetry.trace_view.read_model import RequestTrace, StagePlace, StageTimes, TraceSpan


class SegmentKind(StrEnum):
    """The first four are recorded by a gateway, the next six by the coordinator, the others by stages."""

    BODY = "body"
    PROMPT = "prompt"
    ACCEPT = "accept"
    RESPONSE = "response"
    INTAKE = "intake"
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTION = "preemption"
    RECOVERY = "recovery"
    HOP = "hop"
    RECEIVE = "receive"
    WAIT = "wait"
    COMPUTE = "compute"
    SEND = "send"


GATEWAY_KINDS = (SegmentKind.BODY, SegmentKind.PROMPT, SegmentKind.ACCEPT, SegmentKind.RESPONSE)
STAGE_KINDS = (
    SegmentKind.HOP,
    SegmentKind.RECEIVE,
    SegmentKind.WAIT,
    SegmentKind.COMPUTE,
    SegmentKind.SEND,
)
COORDINATOR_KINDS = {
    SpanName.INTAKE: SegmentKind.INTAKE,
    SpanName.QUEUE: SegmentKind.QUEUE,
    SpanName.PREFILL_CHUNK: SegmentKind.PREFILL,
    SpanName.DECODE: SegmentKind.DECODE,
    SpanName.PREEMPTION: SegmentKind.PREEMPTION,
    SpanName.RECOVERY: SegmentKind.RECOVERY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Times are seconds since the request's start; a clock offset can place a hop before it.

    With `is_share` the segment is one part of a span of many steps: its length is the sum over these steps,
    its place is not measured.
    """

    kind: SegmentKind
    start_s: float
    end_s: float
    span_id: str
    choice: int
    num_steps: int
    num_tokens: int
    is_share: bool = False

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Row:
    """`place` is the stage, None for a row of gateway or coordinator. Segments may overlap."""

    title: str
    place: StagePlace | None
    segments: tuple[Segment, ...]

    @property
    def is_gateway(self) -> bool:
        return any(segment.kind in GATEWAY_KINDS for segment in self.segments)

    def total_s(self, kind: SegmentKind) -> float:
        return sum(segment.duration_s for segment in self.segments if segment.kind is kind)


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Gateway, coordinator, stages; `end_s` is the end of the last segment."""

    duration_s: float
    end_s: float
    rows: tuple[Row, ...]


def waterfall(trace: RequestTrace) -> Waterfall:
    """Rows without segments are omitted."""
    rows = [*_gateway_row(trace), *_coordinator_rows(trace), *_stage_rows(trace)]
    ends = [segment.end_s for row in rows for segment in row.segments]
    return Waterfall(trace.duration_s, max(trace.duration_s, *ends, 0.0), tuple(rows))


def _gateway_row(trace: RequestTrace) -> Iterator[Row]:
    """What the gateway did before the coordinator, one after the other, and the sending of the output."""
    span = trace.gateway
    if span is None:
        return
    at_s = begin_s = trace.since_start_s(span.start_ns)
    durations = (Attr.BODY_DURATION, Attr.PROMPT_DURATION, Attr.ACCEPT_DURATION)
    segments = []
    for kind, duration in zip(GATEWAY_KINDS, durations, strict=False):
        length_s = span.measure(duration) or 0.0
        if length_s > 0:
            segments.append(_segment(span, kind, at_s, at_s + length_s))
        at_s += length_s
    first_s, end_s = span.measure(Attr.TIME_TO_OUTPUT), trace.since_start_s(span.end_ns)
    response_s = at_s if first_s is None else max(at_s, begin_s + first_s)
    segments.append(_segment(span, SegmentKind.RESPONSE, min(response_s, end_s), end_s))
    yield Row("gateway", None, tuple(segments))


def _coordinator_rows(trace: RequestTrace) -> Iterator[Row]:
    for name, kind in COORDINATOR_KINDS.items():
        if spans := trace.named(name):
            yield Row(kind.value, None, tuple(_whole(span, kind, trace) for span in spans))


def _stage_rows(trace: RequestTrace) -> Iterator[Row]:
    for work in trace.stages:
        segments = (segment for span in work.spans for segment in _of_stage(span, trace))
        yield Row(f"stage {work.place.index}", work.place, tuple(segments))


def _of_stage(span: TraceSpan, trace: RequestTrace) -> Iterator[Segment]:
    """A stage span begins with the first byte of its first step; the hop before it ends there."""
    times = StageTimes.of(span)
    hop_s = max(0.0, times.hop_s)
    num_steps = max(1, span.number(Attr.NUM_STEPS, 1))
    at_s = trace.since_start_s(span.start_ns) - hop_s / num_steps
    lengths = (hop_s, times.receive_s, times.wait_s, times.compute_s, times.send_s)
    for kind, length_s in zip(STAGE_KINDS, lengths, strict=True):
        if length_s > 0:
            yield _segment(span, kind, at_s, at_s + length_s, is_share=num_steps > 1)
        at_s += length_s


def _whole(span: TraceSpan, kind: SegmentKind, trace: RequestTrace) -> Segment:
    return _segment(span, kind, trace.since_start_s(span.start_ns), trace.since_start_s(span.end_ns))


def _segment(
    span: TraceSpan, kind: SegmentKind, start_s: float, end_s: float, *, is_share: bool = False
) -> Segment:
    return Segment(
        kind=kind,
        start_s=start_s,
        end_s=end_s,
        span_id=span.span_id,
        choice=span.choice or 0,
        num_steps=span.number(Attr.NUM_STEPS),
        num_tokens=span.number(Attr.TOKENS),
        is_share=is_share,
    )


def lanes(segments: Iterable[Segment]) -> list[list[Segment]]:
    """Distribute segments over as few lanes as possible, so that no two segments of a lane overlap."""
    found: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda segment: (segment.start_s, segment.end_s)):
        for lane in found:
            if lane[-1].end_s <= segment.start_s:
                lane.append(segment)
                break
        else:
            found.append([segment])
    return found
