"""What `GetActivity` answers, and the dashboard shows."""

import asyncio
import time

from coordinator.api.activity_messages import encode_activity
from coordinator.cluster.controller import Controller
from coordinator.observing.activity import Snapshot, pipeline_load
from coordinator.observing.activity_recorder import ActivityRecorder
from coordinator.requests.engine import Engine
from stageline_rpc.v1 import telemetry_pb2


class ActivityReporter:
    """Reads; never changes anything."""

    def __init__(self, recorder: ActivityRecorder, controller: Controller, engine: Engine) -> None:
        self._recorder = recorder
        self._controller = controller
        self._engine = engine

    def snapshot(self) -> Snapshot:
        """What was recorded until now."""
        return self._recorder.snapshot(
            self._engine.now_s(), now_unix_s=time.time(), workers=self._stage_workers()
        )

    async def activity(self, request: telemetry_pb2.GetActivityRequest) -> telemetry_pb2.GetActivityResponse:
        """Works on another thread, so that steps go out meanwhile."""
        snapshot = self.snapshot()
        return await asyncio.to_thread(_encode, snapshot, request.after_step, request.since_us)

    def _stage_workers(self) -> tuple[str, ...]:
        stages = {
            record.stage.stage: record.identity.name
            for record in self._controller.state.workers
            if record.stage is not None
        }
        return tuple([stages.get(stage, "") for stage in range(max(stages, default=-1) + 1)])


def _encode(snapshot: Snapshot, after_step: int, since_us: int) -> telemetry_pb2.GetActivityResponse:
    return encode_activity(snapshot, pipeline_load(snapshot), after_step=after_step, since_us=since_us)
