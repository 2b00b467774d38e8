"""Encodes the responses of `GetStatus` and `GetModel`."""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator

from coordinator.cluster.controller import Controller
from coordinator.cluster.membership import WorkerRecord, WorkerState
from coordinator.cluster.messages import ROLE_TO_MESSAGE
from coordinator.cluster.state_machine import ClusterState
from coordinator.cluster.transitions import ClusterPhase
from coordinator.engine.engine import Engine
from coordinator.model import ServedModel
from coordinator.planner.links import hops_of, wire_dtype_advice
from coordinator.planner.plan import Plan
from coordinator.recovery.self_check_verdict import CheckOutcome
from stageline_rpc.internal.v1 import join_pb2
from stageline_rpc.v1 import cluster_pb2, inference_pb2
from wire.clock import wall_clock_us
from wire.device_rates import encode_rates
from wire.gpu import encode_gpu
from wire.status_codec import duration, encode_certificate, encode_integrity, overall_integrity, timestamp
from wire.tensors import DTYPE_TO_MESSAGE, IMPLEMENTATION_TO_MESSAGE, WEIGHT_FORMAT_TO_MESSAGE, number_of
from wire.transport import PLAIN, Transport

LOST_SHOWN_S = 600.0
"""How long a lost worker is listed."""

PHASE_TO_MESSAGE: dict[ClusterPhase, cluster_pb2.ClusterState.ValueType] = {
    ClusterPhase.WAITING_FOR_WORKERS: cluster_pb2.CLUSTER_STATE_WAITING_FOR_WORKERS,
    ClusterPhase.LOADING: cluster_pb2.CLUSTER_STATE_LOADING,
    ClusterPhase.STARTING_EPOCH: cluster_pb2.CLUSTER_STATE_STARTING_EPOCH,
    ClusterPhase.CHECKING: cluster_pb2.CLUSTER_STATE_CHECKING,
    ClusterPhase.SERVING: cluster_pb2.CLUSTER_STATE_SERVING,
    ClusterPhase.BLOCKED: cluster_pb2.CLUSTER_STATE_BLOCKED,
}
WORKER_STATE_TO_MESSAGE: dict[WorkerState, cluster_pb2.WorkerState.ValueType] = {
    WorkerState.JOINING: cluster_pb2.WORKER_STATE_JOINING,
    WorkerState.SPARE: cluster_pb2.WORKER_STATE_SPARE,
    WorkerState.LOADING: cluster_pb2.WORKER_STATE_LOADING,
    WorkerState.READY: cluster_pb2.WORKER_STATE_READY,
    WorkerState.LOST: cluster_pb2.WORKER_STATE_LOST,
    WorkerState.SUSPECT: cluster_pb2.WORKER_STATE_SUSPECT,
    WorkerState.DRAINING: cluster_pb2.WORKER_STATE_DRAINING,
    WorkerState.QUARANTINED: cluster_pb2.WORKER_STATE_QUARANTINED,
}
_LOADS = (WorkerState.LOADING, WorkerState.SPARE)
"""States of workers that load a stage, or that may be asked to again after a failure."""
CHECK_OUTCOME_TO_MESSAGE: dict[CheckOutcome, cluster_pb2.SelfCheckVerdict.ValueType] = {
    CheckOutcome.NOT_RUN: cluster_pb2.SELF_CHECK_VERDICT_NOT_RUN,
    CheckOutcome.RUNNING: cluster_pb2.SELF_CHECK_VERDICT_RUNNING,
    CheckOutcome.PASSED: cluster_pb2.SELF_CHECK_VERDICT_PASSED,
    CheckOutcome.FINITE_ONLY: cluster_pb2.SELF_CHECK_VERDICT_FINITE_ONLY,
    CheckOutcome.FAILED: cluster_pb2.SELF_CHECK_VERDICT_FAILED,
}


class StatusReporter:
    """Read-only access to the cluster's status."""

    def __init__(
        self,
        controller: Controller,
        engine: Engine,
        model: ServedModel,
        *,
        sampler: str,
        loop_lag: Callable[[], tuple[float, float] | None],
        max_step_tokens: int,
        transport: Transport = PLAIN,
    ) -> None:
        """`sampler` describes which requests are traced, `transport` has this process's certificate.

        `loop_lag` returns median and p99 in seconds; None before the first measurement.
        """
        self._controller = controller
        self._state, self._members = controller.state, controller.state.workers
        self._connections = controller.connections
        self._availability, self._memory_limits = controller.availability, controller.memory_limits
        self._ledger_check = controller.ledger_check
        self._engine = engine
        self._model = model
        self._sampler, self._loop_lag, self._transport = sampler, loop_lag, transport
        self._max_step_tokens = max_step_tokens

    def model(self) -> inference_pb2.GetModelResponse:
        """The model, and the current maximum sequence length (0 before the first plan)."""
        model, plan = self._model, self._state.plan
        return inference_pb2.GetModelResponse(
            name=model.name,
            architecture=model.config.model_type,
            fingerprint=model.fingerprint,
            vocab_size=model.config.vocab_size,
            max_sequence_tokens=0 if plan is None else plan.max_sequence_tokens,
            has_tokenizer=model.text is not None,
            has_chat_template=model.text is not None and model.text.has_chat_template,
            eos_token_ids=model.eos_token_ids,
            tracing=inference_pb2.Tracing(sampler=self._sampler, now=timestamp(wall_clock_us())),
        )

    def cluster(self) -> cluster_pb2.GetStatusResponse:
        """Current plan, workers and requests."""
        state, plan = self._state, self._state.plan
        workers = [*(self._worker(record) for record in self._in_stage_order()), *self._lost_workers()]
        return cluster_pb2.GetStatusResponse(
            model=self._model.name,
            fingerprint=self._model.fingerprint,
            dtype=DTYPE_TO_MESSAGE[self._model.dtype if plan is None else plan.dtype],
            wire_dtype=number_of(self._model.wire_dtype),
            weights=WEIGHT_FORMAT_TO_MESSAGE[self._model.weight_format],
            kv_dtype=number_of(self._model.kv_dtype),
            implementation=IMPLEMENTATION_TO_MESSAGE[self._model.implementation],
            state=PHASE_TO_MESSAGE[state.phase],
            detail="; ".join(filter(None, self._details(workers))),
            epoch=state.epoch,
            num_stages=state.num_stages,
            block_size=0 if plan is None else plan.block_size,
            num_blocks=0 if plan is None else plan.num_blocks,
            window_blocks=[] if plan is None else _window_blocks(plan),
            num_states=0 if plan is None else plan.num_states,
            workers=workers,
            requests=self._requests(),
            health=self._availability.health,
            self_check=self._self_check(),
            kv=self._kv(workers),
            journal=self._journal(),
            end_cause=state.end_cause.value if state.end_cause else cluster_pb2.EPOCH_END_CAUSE_UNSPECIFIED,
            loop_lag=self._lag(),
            certificate=encode_certificate(self._transport.certificate_life()),
            links=self._links(),
        )

    def _links(self) -> list[cluster_pb2.LinkStatus]:
        """Of hops between hosts. Tokens and results, from and to the coordinator, are small."""
        plan, links, model = self._state.plan, self._state.links, self._model
        if plan is None:
            return []
        shape = self._max_step_tokens, model.config.boundary_width
        used = model.wire_dtype or plan.dtype
        return [
            cluster_pb2.LinkStatus(
                from_worker=one,
                to_worker=other,
                round_trip=duration(link.round_trip_s),
                bytes_per_second=round(link.bytes_per_s),
                advice=wire_dtype_advice(link, *shape, used) if one and other else "",
            )
            for one, other in hops_of(plan)
            if (link := links.find(one, other)) is not None
        ]

    def _lag(self) -> cluster_pb2.LoopLag | None:
        if (lag := self._loop_lag()) is None:
            return None
        p50_s, p99_s = lag
        return cluster_pb2.LoopLag(p50=duration(p50_s), p99=duration(p99_s))

    def _kv(self, workers: Iterable[cluster_pb2.WorkerStatus]) -> cluster_pb2.KvStatus:
        ledger = encode_integrity(self._ledger_check.report)
        status = overall_integrity(ledger, {worker.name: worker.kv_integrity for worker in workers})
        status.prefix_cache = self._controller.prefix_caching
        return status

    def _self_check(self) -> cluster_pb2.SelfCheckStatus:
        checks = self._controller.checks
        if checks is None or self._state.has_mock_stages:
            detail = "off" if checks is None else "off: mock stages compute nothing"
            return cluster_pb2.SelfCheckStatus(verdict=cluster_pb2.SELF_CHECK_VERDICT_OFF, detail=detail)
        verdict = checks.check.verdict
        return cluster_pb2.SelfCheckStatus(
            verdict=CHECK_OUTCOME_TO_MESSAGE[verdict.outcome],
            deviation=verdict.deviation,
            allowed=verdict.allowed,
            stage=verdict.stage,
            at=timestamp(verdict.at_us) if verdict.at_us else None,
            detail=verdict.text,
        )

    def _journal(self) -> cluster_pb2.JournalStatus:
        if not self._engine.has_journal:
            return cluster_pb2.JournalStatus(state=cluster_pb2.JOURNAL_STATE_OFF)
        if (failure := self._engine.journal_failure) is None:
            return cluster_pb2.JournalStatus(state=cluster_pb2.JOURNAL_STATE_WRITING)
        return cluster_pb2.JournalStatus(
            state=cluster_pb2.JOURNAL_STATE_FAILING,
            detail=failure,
            num_unwritten=self._engine.num_unwritten_records,
        )

    def _in_stage_order(self) -> list[WorkerRecord]:
        def order(record: WorkerRecord) -> tuple[bool, int, str]:
            stage = record.stage
            return (stage is None, -1 if stage is None else stage.stage, record.identity.name)

        return sorted(self._members, key=order)

    def _details(self, workers: Iterable[cluster_pb2.WorkerStatus]) -> tuple[str, ...]:
        """Why the cluster is in its state."""
        return self._state.detail, *_held_up(self._state, workers), self._memory_limits.text

    def _lost_workers(self) -> Iterator[cluster_pb2.WorkerStatus]:
        """Recently lost workers that have not rejoined."""
        now_s = asyncio.get_running_loop().time()
        for record in self._members.lost:
            connection = self._connections.last_of(record.identity.name)
            age_s = math.inf if connection is None else now_s - connection.last_message_s
            if age_s < LOST_SHOWN_S:
                status = self._worker(record)
                status.detail = f"last heartbeat {age_s:.0f} s ago; {record.detail}"
                status.heartbeat_age.CopyFrom(duration(age_s))
                yield status

    def _worker(self, record: WorkerRecord) -> cluster_pb2.WorkerStatus:
        identity = record.identity
        status = cluster_pb2.WorkerStatus(
            name=identity.name,
            address=identity.address,
            device=identity.device,
            state=WORKER_STATE_TO_MESSAGE[record.shown_state],
            detail=record.shown_detail,
            memory_bytes=identity.memory_bytes,
            pid=identity.pid,
            gpu=None if identity.gpu is None else encode_gpu(identity.gpu),
            rates=None if record.rates is None else encode_rates(record.rates),
        )
        if (stage := record.stage) is not None:
            status.stage = stage.stage
            status.role = ROLE_TO_MESSAGE[stage.role]
            status.layer_begin, status.layer_end = stage.layer_begin, stage.layer_end
            if (plan := self._state.plan) is not None:
                status.dtype = DTYPE_TO_MESSAGE[plan.dtype]
        connection = self._connections.get(identity.name)
        if connection is not None:
            _copy_heartbeat(connection.heartbeat, status)
            if record.state in _LOADS:
                status.detail = connection.heartbeat.load_problem or status.detail
            if stage is not None:
                status.kernels, status.kernels_detail = connection.kernels, connection.kernels_detail
            age_s = asyncio.get_running_loop().time() - connection.last_message_s
            status.heartbeat_age.CopyFrom(duration(age_s))
        return status

    def _requests(self) -> cluster_pb2.RequestCounts:
        numbers = self._engine.snapshot()
        return cluster_pb2.RequestCounts(
            waiting=numbers.num_queued + numbers.num_preparing,
            prefill=numbers.num_prefilling,
            decode=numbers.num_decoding,
            finished=numbers.ended.finished,
            cancelled=numbers.ended.cancelled,
            failed=numbers.ended.failed,
            steps_in_flight=numbers.num_steps_in_flight,
            preemptions=numbers.scheduled.num_preemptions,
            prompt_tokens=numbers.scheduled.num_prompt_tokens,
            cached_tokens=numbers.scheduled.num_cached_tokens,
            detached=numbers.num_detached,
            kept=numbers.num_kept,
            orphaned=numbers.ended.orphaned,
        )


def _held_up(state: ClusterState, workers: Iterable[cluster_pb2.WorkerStatus]) -> list[str]:
    """The workers whose loads do not proceed, while the cluster waits for them."""
    if state.phase is not ClusterPhase.LOADING:
        return []
    loading = cluster_pb2.WORKER_STATE_LOADING
    held_up = (worker for worker in workers if worker.state == loading and worker.detail)
    return [f"worker {worker.name}: {worker.detail}" for worker in held_up]


def _window_blocks(plan: Plan) -> list[cluster_pb2.WindowBlocks]:
    return [
        cluster_pb2.WindowBlocks(window=window, num_blocks=num_blocks)
        for window, num_blocks in plan.window_blocks
    ]


def _copy_heartbeat(heartbeat: join_pb2.Heartbeat, status: cluster_pb2.WorkerStatus) -> None:
    status.weights = heartbeat.weights
    status.resident_bytes = heartbeat.resident_bytes
    status.weight_bytes = heartbeat.weight_bytes
    status.kv_bytes = heartbeat.kv_bytes
    status.num_steps = heartbeat.num_steps
    status.busy_time.FromMicroseconds(heartbeat.busy_us)
    status.load_progress = heartbeat.load_progress
    status.kv.CopyFrom(heartbeat.kv)
    status.kv_integrity.CopyFrom(heartbeat.kv_integrity)
    status.payload_fallback = heartbeat.payload_fallback
    status.hop_transport = heartbeat.hop_transport
    status.same_host_fallback = heartbeat.same_host_fallback
    status.fetch_detail = heartbeat.fetch_detail
    if heartbeat.HasField("fetch"):
        status.fetch.CopyFrom(heartbeat.fetch)
    if heartbeat.HasField("device_memory"):
        status.device_memory.CopyFrom(heartbeat.device_memory)
    if heartbeat.HasField("cuda_graphs"):
        status.cuda_graphs.CopyFrom(heartbeat.cuda_graphs)
    if heartbeat.HasField("certificate"):
        status.certificate.CopyFrom(heartbeat.certificate)
