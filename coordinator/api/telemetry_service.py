"""`stageline.v1.Telemetry`: decodes, makes one domain call, encodes."""

from typing import Any

import grpc

from coordinator.api.activity import ActivityReporter
from coordinator.api.trace_messages import encode_summary
from coordinator.observing.trace_reader import TraceReader
from coordinator.observing.trace_store import TraceStore
from stageline_rpc.v1 import telemetry_pb2, telemetry_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class TelemetryService(telemetry_pb2_grpc.TelemetryServicer):
    """What `stageline top` and `stageline trace` ask."""

    def __init__(self, store: TraceStore, traces: TraceReader, activity: ActivityReporter) -> None:
        self._store = store
        self._traces = traces
        self._activity = activity

    async def GetActivity(  # noqa: N802
        self, request: telemetry_pb2.GetActivityRequest, context: Context
    ) -> telemetry_pb2.GetActivityResponse:
        return await self._activity.activity(request)

    async def ListTraces(  # noqa: N802
        self, request: telemetry_pb2.ListTracesRequest, context: Context
    ) -> telemetry_pb2.ListTracesResponse:
        summaries = await self._traces.summaries(request.max_traces or None)
        return telemetry_pb2.ListTracesResponse(
            traces=[encode_summary(each) for each in summaries],
            num_dropped_traces=self._store.counts.dropped_traces,
            num_dropped_spans=self._store.counts.dropped,
        )

    async def GetTrace(  # noqa: N802
        self, request: telemetry_pb2.GetTraceRequest, context: Context
    ) -> telemetry_pb2.GetTraceResponse:
        found, data = await self._traces.data(request.request_id)
        return telemetry_pb2.GetTraceResponse(
            request_id=found.request_id, trace_id=found.trace_id, traces_data=data
        )
