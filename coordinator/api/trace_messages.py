"""What clients get about traces."""

from stageline_rpc.v1 import telemetry_pb2
from telemetry.trace_view.slow_stage import SlowStage
from telemetry.trace_view.summary import TraceSummary


def encode_summary(summary: TraceSummary) -> telemetry_pb2.TraceSummary:
    """One line of the list."""
    return telemetry_pb2.TraceSummary(
        request_id=summary.request_id,
        trace_id=summary.trace_id,
        started_at_ns=summary.started_ns,
        duration_s=summary.duration_s,
        outcome=summary.outcome,
        prompt_tokens=summary.num_prompt_tokens,
        completion_tokens=summary.num_completion_tokens,
        time_in_queue_s=summary.time_in_queue_s,
        time_to_first_token_s=summary.time_to_first_token_s,
        slowest_stage=None if summary.slowest is None else _encode_slowest(summary.slowest),
        preemptions=summary.num_preemptions,
        recoveries=summary.num_recoveries,
        spans=summary.num_spans,
    )


def _encode_slowest(slow: SlowStage) -> telemetry_pb2.SlowestStage:
    return telemetry_pb2.SlowestStage(
        stage=slow.place.index,
        worker=slow.place.worker,
        layer_begin=slow.place.layer_begin,
        layer_end=slow.place.layer_end,
        compute_s=slow.compute_s,
        times_the_others=slow.ratio,
    )
