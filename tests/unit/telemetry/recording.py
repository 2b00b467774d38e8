"""A recorder that keeps its spans for inspection."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan

from telemetry.span_recorder import SpanRecorder, new_resource
from telemetry.span_sinks import SpanSink
from wire.clock import ClusterClock


class ListSink(SpanSink):
    """Keeps all spans."""

    def __init__(self) -> None:
        self.num_dropped = 0
        self.spans: list[ReadableSpan] = []

    def offer(self, span: ReadableSpan) -> None:
        self.spans.append(span)

    def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


def recorder_into(*sinks: SpanSink) -> SpanRecorder:
    resource = new_resource("test", instance="one", version="0")
    return SpanRecorder(resource, ClusterClock(), sinks)
