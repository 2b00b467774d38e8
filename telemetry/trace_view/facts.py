"""Everything about a request's trace as plain data, to be written as JSON."""

from typing import Any

from telemetry.spans import Attr
from telemetry.trace_view.accounting import Share, account
from telemetry.trace_view.explain import explain
from telemetry.trace_view.read_model import NS_PER_S, RequestTrace, StagePlace, StageWork
from telemetry.trace_view.slow_stage import slowest_stage
from telemetry.trace_view.waterfall import Row, Segment, waterfall


def trace_facts(trace: RequestTrace) -> dict[str, Any]:
    """Times are in seconds: those of rows since the request's start, `started_at` since 1970."""
    view = waterfall(trace)
    root = trace.root
    return {
        "request_id": trace.request_id,
        "trace_id": trace.trace_id,
        "started_at": root.start_ns / NS_PER_S,
        "duration_s": trace.duration_s,
        "end_s": view.end_s,
        "outcome": trace.outcome,
        "error": root.error,
        "explanation": explain(trace),
        "prompt_tokens": root.number(Attr.PROMPT_TOKENS),
        "completion_tokens": root.number(Attr.COMPLETION_TOKENS),
        "time_in_queue_s": root.measure(Attr.TIME_IN_QUEUE),
        "time_to_first_token_s": root.measure(Attr.TIME_TO_FIRST_TOKEN),
        "attributes": dict(root.attributes),
        "shares": [_share(share, trace) for share in account(trace)],
        "slowest_stage": _slowest(trace),
        "stages": [_stage(work) for work in trace.stages],
        "rows": [_row(row) for row in view.rows],
    }


def _share(share: Share, trace: RequestTrace) -> dict[str, Any]:
    return {
        "cause": share.cause.value,
        "seconds": share.seconds,
        "share": share.seconds / trace.duration_s if trace.duration_s else 0.0,
        **({} if share.place is None else _place(share.place)),
    }


def _slowest(trace: RequestTrace) -> dict[str, Any] | None:
    slow = slowest_stage(trace)
    if slow is None:
        return None
    return {**_place(slow.place), "compute_s": slow.compute_s, "times_the_others": slow.ratio}


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
