"""Recent pipeline activity for `Telemetry.GetActivity` and the dashboard."""

import asyncio
import time
from collections.abc import Iterable

from coordinator.cluster.controller import Controller
from coordinator.engine.engine import Engine
from coordinator.observability.activity import (
    ActivityRecorder,
    EpochSpan,
    PipelineLoad,
    RequestActivity,
    RequestPhase,
    Snapshot,
    pipeline_load,
    steps_after,
)
from coordinator.observability.facts import SentStep, StepKind, StepRecord
from coordinator.observability.rates import PastSecond, Quantiles, Rates
from coordinator.observability.steps import StageLoad
from stageline_rpc.v1 import cluster_pb2, telemetry_pb2
from wire.ids import id_text
from wire.status_codec import duration, timestamp

KIND_TO_MESSAGE: dict[StepKind, telemetry_pb2.StepKind.ValueType] = {
    StepKind.PREFILL: telemetry_pb2.STEP_KIND_PREFILL,
    StepKind.DECODE: telemetry_pb2.STEP_KIND_DECODE,
    StepKind.MIXED: telemetry_pb2.STEP_KIND_MIXED,
    StepKind.EMPTY: telemetry_pb2.STEP_KIND_EMPTY,
}
PHASE_TO_MESSAGE: dict[RequestPhase, telemetry_pb2.RequestPhase.ValueType] = {
    RequestPhase.WAITING: telemetry_pb2.REQUEST_PHASE_WAITING,
    RequestPhase.PREFILL: telemetry_pb2.REQUEST_PHASE_PREFILL,
    RequestPhase.DECODE: telemetry_pb2.REQUEST_PHASE_DECODE,
    RequestPhase.PREEMPTED: telemetry_pb2.REQUEST_PHASE_PREEMPTED,
    RequestPhase.RECOVERING: telemetry_pb2.REQUEST_PHASE_RECOVERING,
    RequestPhase.FINISHED: telemetry_pb2.REQUEST_PHASE_FINISHED,
    RequestPhase.CANCELLED: telemetry_pb2.REQUEST_PHASE_CANCELLED,
    RequestPhase.FAILED: telemetry_pb2.REQUEST_PHASE_FAILED,
}


def encode_activity(
    snapshot: Snapshot, load: PipelineLoad, *, after_step: int, since_us: int
) -> telemetry_pb2.GetActivityResponse:
    """Encode a snapshot; takes some milliseconds for many steps."""
    return telemetry_pb2.GetActivityResponse(
        now_us=_us(snapshot.now_s),
        now=timestamp(_us(snapshot.now_unix_s)),
        uptime=duration(snapshot.now_s - snapshot.began_s),
        summary=load.summary,
        slowest_stage=load.slowest,
        window_s=load.window_s,
        stages=_stages(load.stages, snapshot.workers),
        bubble_share=load.bubble_share,
        rates=_rates(snapshot.rates),
        num_answered=snapshot.num_answered,
        steps=[_step(step) for step in steps_after(snapshot.steps, after_step)],
        in_flight=[_in_flight(step) for step in snapshot.in_flight],
        seconds=[_second(second) for second in snapshot.seconds if second.start_s * 1_000_000 >= since_us],
        requests=[_request(request) for request in (*snapshot.live, *snapshot.ended)],
        epochs=[_epoch(epoch) for epoch in snapshot.epochs],
    )


def _us(time_s: float) -> int:
    return round(time_s * 1e6)


def _maybe_us(time_s: float | None) -> int | None:
    return None if time_s is None else round(time_s * 1e6)


def _stages(loads: Iterable[StageLoad], workers: tuple[str, ...]) -> list[telemetry_pb2.StageActivity]:
    return [
        telemetry_pb2.StageActivity(
            stage=stage,
            worker=workers[stage] if stage < len(workers) else "",
            num_steps=load.num_steps,
            busy_share=load.busy_share,
            compute_us=load.compute_s * 1e6,
            wait_us=load.wait_s * 1e6,
            hop_us=load.hop_s * 1e6,
        )
        for stage, load in enumerate(loads)
    ]


def _step(step: StepRecord) -> telemetry_pb2.StepActivity:
    sent = step.sent
    return telemetry_pb2.StepActivity(
        number=step.number,
        epoch=sent.epoch,
        step_id=sent.step_id,
        kind=KIND_TO_MESSAGE[sent.kind],
        num_decodes=sent.num_decodes,
        num_chunks=sent.num_chunks,
        num_chunk_tokens=sent.num_chunk_tokens,
        sent_us=_us(sent.sent_s),
        answered_us=_us(step.answered_s),
        computed_us=[_us(time_s - sent.sent_s) for interval in step.computed() for time_s in interval],
    )


def _in_flight(step: SentStep) -> telemetry_pb2.StepInFlight:
    return telemetry_pb2.StepInFlight(
        epoch=step.epoch,
        step_id=step.step_id,
        kind=KIND_TO_MESSAGE[step.kind],
        num_decodes=step.num_decodes,
        num_chunks=step.num_chunks,
        num_chunk_tokens=step.num_chunk_tokens,
        sent_us=_us(step.sent_s),
    )


def _quantiles(quantiles: Quantiles) -> telemetry_pb2.Quantiles:
    return telemetry_pb2.Quantiles(
        count=quantiles.count,
        p50_s=quantiles.p50_s,
        p95_s=quantiles.p95_s,
        p99_s=quantiles.p99_s,
    )


def _rates(rates: Rates) -> telemetry_pb2.ActivityRates:
    return telemetry_pb2.ActivityRates(
        window_s=rates.window_s,
        generated_tokens=rates.generated_tokens,
        prefill_tokens=rates.prefill_tokens,
        steps=rates.steps,
        requests_accepted=rates.accepted,
        requests_finished=rates.finished,
        requests_unfinished=rates.unfinished,
        first_token=_quantiles(rates.first_token),
        inter_token=_quantiles(rates.inter_token),
    )


def _second(second: PastSecond) -> telemetry_pb2.SecondActivity:
    return telemetry_pb2.SecondActivity(
        start_us=second.start_s * 1_000_000,
        generated_tokens=second.num_generated_tokens,
        prefill_tokens=second.num_prefill_tokens,
        steps=second.num_steps,
        accepted=second.num_accepted,
        finished=second.num_finished,
        unfinished=second.num_unfinished,
        first_token=_quantiles(second.first_token),
        inter_token=_quantiles(second.inter_token),
    )


def _request(request: RequestActivity) -> telemetry_pb2.RequestActivity:
    return telemetry_pb2.RequestActivity(
        request_id=id_text(request.request_id),
        phase=PHASE_TO_MESSAGE[request.phase],
        num_choices=request.num_choices,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_generated_tokens=request.num_generated_tokens,
        max_tokens=request.max_tokens,
        num_restarts=request.num_restarts,
        accepted_us=max(0, _us(request.arrived_s)),
        started_us=_maybe_us(request.started_s),
        first_token_us=_maybe_us(request.first_token_s),
        ended_us=_maybe_us(request.ended_s),
        error=request.error,
        reason=request.reason,
    )


def _epoch(epoch: EpochSpan) -> telemetry_pb2.EpochActivity:
    return telemetry_pb2.EpochActivity(
        epoch=epoch.epoch,
        started_us=_us(epoch.started_s),
        stopped_us=_maybe_us(epoch.stopped_s),
        cause=epoch.cause.value if epoch.cause else cluster_pb2.EPOCH_END_CAUSE_UNSPECIFIED,
        detail=epoch.reason,
    )


class ActivityReporter:
    """Read-only access to the pipeline's activity."""

    def __init__(self, recorder: ActivityRecorder, controller: Controller, engine: Engine) -> None:
        self._recorder = recorder
        self._members = controller.state.workers
        self._engine = engine

    def snapshot(self) -> Snapshot:
        return self._recorder.snapshot(
            self._engine.now_s(), now_unix_s=time.time(), workers=self._stage_workers()
        )

    async def activity(self, request: telemetry_pb2.GetActivityRequest) -> telemetry_pb2.GetActivityResponse:
        """Encode the activity on another thread, so that the event loop can send steps."""
        snapshot = self.snapshot()
        return await asyncio.to_thread(_encode, snapshot, request.after_step, request.since_us)

    def _stage_workers(self) -> tuple[str, ...]:
        stages = {
            record.stage.stage: record.identity.name for record in self._members if record.stage is not None
        }
        return tuple([stages.get(stage, "") for stage in range(max(stages, default=-1) + 1)])


def _encode(snapshot: Snapshot, after_step: int, since_us: int) -> telemetry_pb2.GetActivityResponse:
    return encode_activity(snapshot, pipeline_load(snapshot), after_step=after_step, since_us=since_us)
