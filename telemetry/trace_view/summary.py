"""One line about a request."""

from dataclasses import dataclass

from telemetry.spans import Attr, SpanName
from telemetry.trace_view.read_model import RequestTrace
from telemetry.trace_view.slow_stage import SlowStage, slowest_stage


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """`time_to_first_token_s` is None where none has come. Interruptions of every choice count."""

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
    """What the root says of the request, and which stage computed longest."""
    root = trace.root
    return TraceSummary(
        request_id=trace.request_id,
        trace_id=trace.trace_id,
        started_ns=root.start_ns,
        duration_s=trace.duration_s,
        outcome=trace.outcome,
        num_prompt_tokens=root.number(Attr.PROMPT_TOKENS),
        num_completion_tokens=root.number(Attr.COMPLETION_TOKENS),
        time_in_queue_s=root.measure(Attr.TIME_IN_QUEUE),
        time_to_first_token_s=root.measure(Attr.TIME_TO_FIRST_TOKEN),
        slowest=slowest_stage(trace),
        num_preemptions=len(trace.named(SpanName.PREEMPTION)),
        num_recoveries=len(trace.named(SpanName.RECOVERY)),
        num_spans=1 + len(trace.spans),
    )
