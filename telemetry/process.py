"""What a process needs to record spans, put together."""

from telemetry.collector_sink import CollectorSink, new_exporter
from telemetry.environment import TelemetrySettings
from telemetry.span_recorder import SpanRecorder, new_resource
from telemetry.span_sinks import SpanSink
from wire.clock import ClusterClock


def new_recorder(
    service: str, own: SpanSink, settings: TelemetrySettings, clock: ClusterClock, *, instance: str
) -> SpanRecorder:
    """The recorder of this process. Its spans go to `own`, and to a collector where `settings` name one."""
    resource = new_resource(service, instance=instance, version=settings.service_version)
    sinks: list[SpanSink] = []
    if not settings.is_disabled:
        sinks.append(own)
        if settings.protocol is not None:
            sinks.append(CollectorSink(new_exporter(settings.protocol)))
    return SpanRecorder(resource, clock, sinks)
