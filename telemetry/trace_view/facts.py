"""A request's trace as plain data for JSON."""

from dataclasses import dataclass
from typing import Any

from google.protobuf.duration_pb2 import Duration

from stageline_rpc.v1 import telemetry_pb2
from telemetry.spans import Attr, SpanName
from telemetry.trace_view.explain import Share, SlowStage, explain, slowest_stage, time_shares
from telemetry.trace_view.read_model import RequestTrace, StagePlace, StageWork
from telemetry.trace_view.waterfall import Row, Segment, waterfall
from wire.status_codec import duration, message_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """Summary of a trace; `time_to_first_token_s` is None before the first token.

    Preemptions and recoveries are counted over all choices.
    """

    request_id: str
    trace_id: str
    started_ns: int
    duration_s: float
    outcome: str
    num_prompt_tokens: int
    num_completion_tokens: int
    time_in_queue_s: float | None
    time_to_first_token_s: float | None
    slowest: SlowStage | None
    num_preemptions: int
    num_recoveries: int
    num_spans: int


def summary(trace: RequestTrace) -> TraceSummary:
    root = trace.root
    return TraceSummary(
        request_id=trace.request_id,
        trace_id=trace.trace_id,
        started_ns=trace.start_ns,
        duration_s=trace.duration_s,
        outcome=trace.outcome,
        num_prompt_tokens=root.number(Attr.PROMPT_TOKENS),
        num_completion_tokens=root.number(Attr.COMPLETION_TOKENS),
        time_in_queue_s=root.measure(Attr.TIME_IN_QUEUE),
        time_to_first_token_s=root.measure(Attr.TIME_TO_FIRST_TOKEN),
        slowest=slowest_stage(trace),
        num_preemptions=len(trace.named(SpanName.PREEMPTION)),
        num_recoveries=len(trace.named(SpanName.RECOVERY)),
        num_spans=1 + len(trace.spans) + (trace.gateway is not None),
    )


def trace_facts(trace: RequestTrace) -> dict[str, Any]:
    """Fields of `TraceSummary`, explanation, shares and rows; times in seconds since the start."""
    view = waterfall(trace)
    root = trace.root
    return {
        **message_fields(encode_summary(summary(trace))),
        "end_s": view.end_s,
        "error": root.error,
        "explanation": explain(trace),
        "attributes": dict(root.attributes),
        "gateway": None if trace.gateway is None else dict(trace.gateway.attributes),
        "shares": [_share(share, trace) for share in time_shares(trace)],
        "stages": [_stage(work) for work in trace.stages],
        "rows": [_row(row) for row in view.rows],
    }


def encode_summary(line: TraceSummary) -> telemetry_pb2.TraceSummary:
    message = telemetry_pb2.TraceSummary(
        request_id=line.request_id,
        trace_id=line.trace_id,
        duration=duration(line.duration_s),
        outcome=line.outcome,
        prompt_tokens=line.num_prompt_tokens,
        completion_tokens=line.num_completion_tokens,
        time_in_queue=_maybe_duration(line.time_in_queue_s),
        time_to_first_token=_maybe_duration(line.time_to_first_token_s),
        slowest_stage=None if line.slowest is None else _encode_slowest(line.slowest),
        preemptions=line.num_preemptions,
        recoveries=line.num_recoveries,
        spans=line.num_spans,
    )
    message.started_at.FromNanoseconds(line.started_ns)
    return message


def _maybe_duration(seconds: float | None) -> Duration | None:
    return None if seconds is None else duration(seconds)


def _encode_slowest(slow: SlowStage) -> telemetry_pb2.SlowestStage:
    return telemetry_pb2.SlowestStage(
        stage=slow.place.index,
        worker=slow.place.worker,
        layer_begin=slow.place.layer_begin,
        layer_end=slow.place.layer_end,
        compute_time=duration(slow.compute_s),
        ratio_to_median=slow.ratio,
    )


def _share(share: Share, trace: RequestTrace) -> dict[str, Any]:
    return {
        "cause": share.cause.value,
        "seconds": share.seconds,
        "share": share.seconds / trace.duration_s if trace.duration_s else 0.0,
        **({} if share.place is None else _place(share.place)),
    }


def _stage(work: StageWork) -> dict[str, Any]:
    times = work.times
    return {
        **_place(work.place),
        "steps": work.num_steps,
        "tokens": work.num_tokens,
        "mean_batch_size": work.mean_batch_size,
        "hop_s": times.hop_s,
        "receive_s": times.receive_s,
        "wait_s": times.wait_s,
        "compute_s": times.compute_s,
        "send_s": times.send_s,
    }


def _place(place: StagePlace) -> dict[str, Any]:
    return {
        "stage": place.index,
        "worker": place.worker,
        "role": place.role,
        "layer_begin": place.layer_begin,
        "layer_end": place.layer_end,
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "title": row.title,
        **({} if row.place is None else _place(row.place)),
        "segments": [_segment(segment) for segment in row.segments],
    }


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "kind": segment.kind.value,
        "start_s": segment.start_s,
        "end_s": segment.end_s,
        "choice": segment.choice,
        "steps": segment.num_steps,
        "tokens": segment.num_tokens,
        "is_share": segment.is_share,
        "span_id": segment.span_id,
    }
