"""Which requests are traced: decided once, where the trace begins."""

from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, set_span_in_context


def ratio_sampler(ratio: float) -> Sampler:
    """As the caller has decided; `ratio` of those that nobody has decided about."""
    return ParentBased(TraceIdRatioBased(ratio))


def is_sampled(sampler: Sampler, trace_id: int, parent: SpanContext | None, name: str) -> bool:
    """Whether the trace is recorded. `parent` is the caller's span."""
    context = None if parent is None else set_span_in_context(NonRecordingSpan(parent))
    return bool(sampler.should_sample(context, trace_id, name).decision.is_sampled())
