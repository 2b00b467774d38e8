"""Carries out the actions of `ClusterState`: messages to workers, the pipeline, epochs of the engine.

Everything runs on the event loop; events are handled one by one because handlers do not await.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import assert_never

from certificates.identity import Identity
from coordinator.cluster.actions import (
    Action,
    AssignStage,
    BeginEpoch,
    CheckPlan,
    Disconnect,
    DismissWorker,
    FinishRunning,
    StartServing,
    StopServing,
)
from coordinator.cluster.availability import STOPPING, Availability
from coordinator.cluster.checks import LedgerCheck, PlanChecks, WeightsCheck
from coordinator.cluster.connections import Connections, WorkerConnection, stage_kernels
from coordinator.cluster.event_log import EventLog
from coordinator.cluster.link_checks import LinkChecks, OwnLinks
from coordinator.cluster.membership import WorkerIdentity, WorkerRecord
from coordinator.cluster.messages import (
    decode_links,
    encode_assign,
    encode_serving,
    encode_welcome,
)
from coordinator.cluster.pipeline import LinkBroken, Pipeline
from coordinator.cluster.state_machine import ClusterState
from coordinator.cluster.step_limits import MemoryLimits, ServingSettings, scheduler_limits, token_transfer_us
from coordinator.cluster.transitions import ClusterPhase
from coordinator.cluster.warm_spares import WarmSpares
from coordinator.cluster.weight_tracker import WeightTracker
from coordinator.engine.engine import Engine
from coordinator.engine.observer import EndCause
from coordinator.model import ServedModel
from coordinator.planner.links import COORDINATOR, Link
from coordinator.planner.plan import Plan
from coordinator.recovery.attribution import FailureAttribution
from coordinator.recovery.failure_detector import FailureDetector, StageProgress, overdue_fault
from coordinator.recovery.policy import RecoveryPolicy
from coordinator.recovery.rejoin import StartTimer
from coordinator.recovery.self_check import SelfCheck
from coordinator.scheduler.in_flight import ResultMismatch, check_tokens
from coordinator.scheduler.kv_manager import KvCacheManager
from coordinator.scheduler.policy import SchedulerLimits
from stageline_rpc.internal.v1 import forward_pb2, join_pb2
from wire.audit import NO_AUDIT, AuditLog
from wire.errors import InvariantBroken, NameInUse, StaleStream, StepFaultKind, WorkerNotFound
from wire.ids import Incarnation
from wire.peer_secrets import RefusedPeers, is_secret, new_secret
from wire.steps import FaultReport, StepResult
from wire.transport import PLAIN, Transport

log = logging.getLogger(__name__)


class Controller:
    """Connects cluster state, workers, pipeline and engine: carries out the actions of `ClusterState`."""

    def __init__(
        self,
        state: ClusterState,
        engine: Engine,
        model: ServedModel,
        *,
        incarnation: Incarnation,
        policy: RecoveryPolicy,
        settings: ServingSettings,
        on_serving: Callable[[bool], None],
        self_check: SelfCheck | None = None,
        new_secret: Callable[[], bytes] = new_secret,
        refused: RefusedPeers | None = None,
        transport: Transport = PLAIN,
        audit: AuditLog = NO_AUDIT,
    ) -> None:
        """`on_serving` receives whether new requests are served, after each possible change.

        `new_secret` creates secrets between processes, `refused` counts result streams with a wrong one.
        """
        self.state, self._engine, self._model, self._config = state, engine, model, model.config
        self.incarnation, self.policy, self._settings = incarnation, policy, settings
        self._new_secret, self._totals, self._durability = new_secret, engine.totals, engine.durability
        self._durability.on_change = self._journal_changed
        self._attribution = FailureAttribution(engine.scheduler, engine.registry, engine.fail, policy=policy)
        self.availability = Availability(state, engine, policy, on_serving)
        self.connections, self.memory_limits = Connections(), MemoryLimits()
        self.ledger_check, self._events = LedgerCheck(engine), EventLog(audit=audit)
        self.weights = WeightTracker(model, self.connections, settings.weights_peers)
        self._spares = WarmSpares(
            *(state, self.connections, self.weights, model), is_enabled=settings.prefetch
        )
        own = OwnLinks(settings.host, transport, self._way_measured, self._spawn)
        self.link_checks = LinkChecks(state, self.connections, lambda: engine.has_live_requests, own)
        self._pipeline = self._new_pipeline(refused or RefusedPeers(time.monotonic), transport)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure_detector = self._new_failure_detector()
        self._weights_check = self._new_weights_check() if model.has_weights_here else None
        self.checks = None if self_check is None else self._new_checks(self_check)

    @property
    def prefix_caching(self) -> bool:
        return self._settings.prefix_caching

    def _new_pipeline(self, refused: RefusedPeers, transport: Transport) -> Pipeline:
        return Pipeline(
            incarnation=self.incarnation,
            fingerprint=self._model.fingerprint,
            connect_timeout_s=self.policy.connect_timeout_s,
            new_secret=self._new_secret,
            refused=refused,
            transport=transport,
            hop_route=self._settings.hop_route,
        )

    def _new_failure_detector(self) -> FailureDetector[WorkerConnection]:
        return FailureDetector(
            self.policy,
            connections=self.connections.values,
            on_silence=self._set_silent,
            on_lease_over=self.leave,
            on_tick=self._tick,
            on_steady=self.state.on_steady,
            on_window=self.state.on_window,
        )

    def start(self) -> None:
        """Start the failure detector. Restored requests wait as long as after a worker loss."""
        self._spawn(self._failure_detector.run())
        self._spawn(self.link_checks.run())
        if self._weights_check is not None:
            self._spawn(self._weights_check.run())
        self._carry_out(self.state.start())
        if self._engine.has_live_requests:
            self.availability.limit_waiting()

    async def close(self) -> None:
        """Fail live requests, and end the streams of all workers and all tasks."""
        self.availability.close()
        self._spares.close()
        if self.checks is not None:
            self.checks.close()
        if self.state.phase is ClusterPhase.SERVING:
            self._engine.stop_epoch()
        self.connections.close_all(STOPPING)
        if (link := self._pipeline.release()) is not None:
            await link.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def join(self, identity: WorkerIdentity, rejoin_secret: bytes = b"") -> WorkerConnection:
        """Add a worker that opened its stream.

        Raises:
            NameInUse: a live worker has the name, unless `rejoin_secret` proves that it is the same process.
        """
        present = self.connections.get(identity.name)
        if present is not None and not is_secret(rejoin_secret, present.rejoin_secret):
            taken = f"the name {identity.name!r} is in use by the worker at {present.identity.address}"
            raise NameInUse(f"{taken}: give another --name")
        actions = self.state.join(identity)
        connection = WorkerConnection(
            identity,
            now_s=asyncio.get_running_loop().time(),
            reference_secret=self._new_secret(),
            rejoin_secret=self._new_secret(),
        )
        self.connections.put(connection)
        self._events.joined(identity)
        connection.send(
            encode_welcome(
                self.incarnation,
                self.policy,
                self._model,
                reference_secret=connection.reference_secret,
                rejoin_secret=connection.rejoin_secret,
            )
        )
        self.link_checks.joined(connection)
        self._carry_out(actions)
        return connection

    def leave(self, connection: WorkerConnection, reason: str, cause: EndCause = EndCause.DEATH) -> None:
        """Remove a worker whose stream ended, and close the stream if it is open."""
        name = connection.identity.name
        connection.close(reason)
        if not self.connections.remove(connection):
            return  # It was removed before, or it has rejoined and its old stream ended.
        self._events.left(name, reason)
        self._note_unrelated_death(self.state.workers.find_live(name))
        self._carry_out(self.state.lose(name, connection.identity.incarnation, reason, cause))
        if self.checks is not None:
            self.checks.worker_left(name)

    def _note_unrelated_death(self, record: WorkerRecord | None) -> None:
        """Count the loss of a worker that computed nothing."""
        is_computing = record is not None and record.stage is not None and self.availability.is_serving
        if record is not None and not record.is_draining and not is_computing:
            self._attribution.record_unrelated_loss()

    def receive(self, connection: WorkerConnection, message: join_pb2.JoinRequest) -> None:
        """Handle a message of a worker."""
        name = connection.identity.name
        connection.last_message_s = asyncio.get_running_loop().time()
        match message.WhichOneof("message"):
            case "heartbeat":
                connection.beat(message.heartbeat)
            case "loaded":
                self._events.loaded(name, message.loaded)
                connection.stage_loaded(message.loaded)
                self._carry_out(self.state.loaded(name, message.loaded.plan_id))
            case "load_failed":
                connection.loads_tokenizer = False
                failed = message.load_failed
                self._events.load_failed(name, failed.reason)
                actions = self.state.load_failed(
                    name, failed.plan_id, failed.reason, is_final=failed.is_final
                )
                self._carry_out(actions)
            case "epoch_ready":
                self._carry_out(self.state.epoch_ready(name, message.epoch_ready.epoch))
            case "weights_differ":
                self._weights_differ(name, message.weights_differ.reason)
            case "held_weights":
                self.weights.take(connection, message.held_weights)
                self._spares.update()
            case "measured_links":
                self._carry_out(self.state.links_measured(name, decode_links(message.measured_links)))
            case "drain_requested":
                self._events.drain_started(name, by_worker=True)
                self._carry_out(self.state.drain(name))
            case "check_states":
                if self.checks is not None:
                    self.checks.take_states(name, message.check_states)
            case unknown:
                self._events.unexpected_message(name, unknown)

    def _weights_differ(self, name: str, reason: str) -> None:
        record = self.state.workers.find_live(name)
        if record is None or record.has_wrong_weights:
            return  # It may report once more after each join.
        self._events.weights_differ(name, reason)
        if self.checks is not None:
            self.checks.weights_differ(name)
        self._carry_out(self.state.weights_differ(name, reason))

    def _way_measured(self, worker: WorkerIdentity, link: Link) -> None:
        self._carry_out(self.state.links_measured(COORDINATOR, {worker.name: link}))

    def receive_fault(self, connection: WorkerConnection, report: FaultReport) -> None:
        """Handle a fault report of a worker; ignored unless the worker runs the reported stage."""
        stages = [record.identity for record in self.state.stage_workers]
        if not stages:
            return  # The epoch was stopped, usually by the loss that the fault is about.
        is_of_stage = report.stage < len(stages) and stages[report.stage] is connection.identity
        if report.epoch == self.state.epoch and not is_of_stage:
            self._events.foreign_fault(connection.identity.name, report.stage)
            return
        self.report_fault(report)

    def report_fault(self, report: FaultReport) -> None:
        """Handle a step that a stage refused: starts a new epoch."""
        if report.epoch != self.state.epoch:
            return
        self._engine.deliver()
        workers = dict(enumerate(record.identity.name for record in self.state.stage_workers))
        in_step = self._engine.sequences_in_step(report.step_id)
        self._events.step_fault(report, in_step, workers.get(report.stage))
        if report.kind is StepFaultKind.DEVICE and self._lose_device(report):
            return
        if not report.kind.blames_requests:
            # If the next stage was lost, that loss is the better cause.
            asyncio.get_running_loop().call_later(self.policy.report_grace_s, self._fail_hop, report)
            return
        counts = self.state.phase is ClusterPhase.SERVING and not self._fits_when_smaller(report)
        plan_id = self.state.plan_id
        if report.kind is StepFaultKind.NON_FINITE:
            actions = self.state.stage_failed(report)
        else:
            actions = self.state.epoch_failed(report.epoch, str(report), EndCause.FAULT)
        if counts:
            self._attribution.record_fault(report, is_worker_avoided=self.state.plan_id != plan_id)
        self._carry_out(actions)

    def _lose_device(self, report: FaultReport) -> bool:
        """Remove the worker of the stage, which exits. False if the stage has none."""
        workers = self.state.stage_workers[report.stage : report.stage + 1]
        connection = self.connections.of(workers[0].identity) if workers else None
        if connection is None:
            return False
        self.leave(connection, f"its device failed: {report.message}", EndCause.DEVICE)
        return True

    def _fits_when_smaller(self, report: FaultReport) -> bool:
        """Limit the step size if a stage ran out of memory; False if that does not apply or help."""
        step, plan = self._engine.step_in_flight(report.step_id), self.state.plan
        if report.kind is not StepFaultKind.OUT_OF_MEMORY or step is None or plan is None:
            return False
        is_smaller = self.memory_limits.record_out_of_memory(
            self.state.stage_workers[report.stage].identity.incarnation,
            plan.stages[report.stage],
            self._plan_limits(plan),
            num_tokens=step.num_tokens,
            num_sequences=step.num_slices,
            block_size=plan.block_size,
        )
        if is_smaller:
            self._events.steps_limited(self.memory_limits.text)
        return is_smaller

    def _plan_limits(self, plan: Plan) -> SchedulerLimits:
        boundary_bytes, links = self._config.boundary_bytes(plan.dtype), self.state.links
        hop_us = token_transfer_us(plan, links, boundary_bytes, wire_dtype=self._model.wire_dtype)
        return scheduler_limits(plan, self._settings.batching, boundary_bytes=boundary_bytes, hop_us=hop_us)

    def _fail_hop(self, report: FaultReport) -> None:
        self._carry_out(self.state.hop_failed(report.epoch, report.stage, str(report)))

    async def drain(self, name: str) -> None:
        """Move the layers of a worker to others and let it exit; returns when its stream is closed.

        Raises:
            WorkerNotFound: no connected worker has the name.
        """
        connection = self.connections.get(name)
        if connection is None:
            known = ", ".join(sorted(self.connections)) or "none"
            raise WorkerNotFound(f"worker {name!r} not found: connected are {known}")
        self._events.drain_started(name, by_worker=False)
        self._carry_out(self.state.drain(name))
        await connection.wait_closed()

    def open_results(self, hello: forward_pb2.HopHello, *, host: str, caller: Identity | None = None) -> int:
        """Accept the result stream of LAST from `host`; returns the epoch.

        Raises AccessDenied, SecretMismatch, StaleStream or HandshakeMismatch.
        """
        self._pipeline.accept_results(hello, epoch=self.state.epoch, host=host, caller=caller)
        self._carry_out(self.state.results_open(hello.epoch))
        return hello.epoch

    def complete(self, epoch: int, result: StepResult) -> None:
        """Handle a result on the stream of `epoch`. Raises StaleStream if that epoch is over."""
        if self.checks is not None and self.checks.take(epoch, result):
            return
        if epoch != self.state.epoch or self.state.phase is not ClusterPhase.SERVING:
            raise StaleStream(f"epoch {epoch} is over")
        self.state.result_arrived()
        try:
            check_tokens(result, vocab_size=self._config.vocab_size)
            num_tokens = self._engine.complete(result)
        except (ResultMismatch, InvariantBroken) as error:
            if isinstance(error, InvariantBroken):
                log.exception("epoch %d failed: %s", epoch, error)
            self.fail_epoch(epoch, str(error))
            return
        self._attribution.record_tokens(num_tokens)
        if num_tokens:
            self.state.token_arrived()
        self.availability.record_result(has_tokens=num_tokens > 0)
        self._require_sound_ledger(self.ledger_check.after_step())

    def _require_sound_ledger(self, problem: str) -> None:
        """End the epoch if the ledger has a `problem`; the next one starts with an empty ledger."""
        if problem:
            self._events.ledger_broken(self.state.epoch, problem)
            reason = f"the coordinator's KV accounting is inconsistent: {problem}"
            self._carry_out(self.state.epoch_failed(self.state.epoch, reason, EndCause.FAULT))

    def stream_broke(self, epoch: int, reason: str) -> None:
        """Fail the epoch after a stream broke, unless the cause arrives within `report_grace_s`."""
        asyncio.get_running_loop().call_later(self.policy.report_grace_s, self.fail_epoch, epoch, reason)

    def fail_epoch(self, epoch: int, reason: str) -> None:
        """End the epoch; calls for older epochs are ignored."""
        self._carry_out(self.state.epoch_failed(epoch, reason))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case AssignStage():
                    self._assign(action)
                case BeginEpoch():
                    self._pipeline.expect(action)
                    self._durability.begin_epoch(action.epoch)
                    self._spawn(self._begin_epoch(action))
                case StopServing():
                    self._stop_serving(action)
                case StartServing():
                    self._start_serving(action)
                case StartTimer():
                    self._start_timer(action)
                case Disconnect():
                    self._disconnect(action)
                case DismissWorker():
                    self._dismiss_worker(action)
                case FinishRunning():
                    self._spawn(self._finish_running(action))
                case CheckPlan():
                    assert self.checks is not None
                    self.checks.begin(action)
                case _:
                    assert_never(action)
        self._spares.update()

    def _assign(self, action: AssignStage) -> None:
        self._events.assigned(action)
        self.memory_limits.begin_stage(action.plan_id, action.worker.incarnation, action.stage)
        connection = self.connections[action.worker.name]
        connection.loads_tokenizer = action.stage.role.has_head and not action.worker.is_mock
        connection.kernels = connection.kernels_detail = ""
        connection.prefetch = b""  # the assignment ends it
        sources = self.weights.sources(action.worker.name, [action.stage])
        connection.send(encode_assign(action, self._model, sources))

    async def _begin_epoch(self, action: BeginEpoch) -> None:
        await asyncio.sleep(action.delay_s)
        if action.epoch != self.state.epoch or self.state.phase is not ClusterPhase.STARTING_EPOCH:
            return
        self._events.epoch_begins(action)
        for stage, worker in enumerate(action.workers):
            self.connections[worker.name].send(self._pipeline.begin_message(action, stage))
        self._release_link()
        link = self._pipeline.new_link(action, lambda reason: self.stream_broke(action.epoch, reason))
        asyncio.get_running_loop().call_later(self.policy.epoch_timeout_s, self._check_started, action.epoch)
        try:
            await link.open()
        except LinkBroken as error:
            self.fail_epoch(action.epoch, str(error))
        else:
            self._carry_out(self.state.link_open(action.epoch))

    def _check_started(self, epoch: int) -> None:
        reason = f"epoch {epoch}: not every stage was ready within {self.policy.epoch_timeout_s:g} s"
        self._carry_out(self.state.epoch_late(epoch, reason))

    def _start_timer(self, action: StartTimer) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(action.delay_s, lambda: self._carry_out(self.state.elapsed(action.timer)))

    def _disconnect(self, action: Disconnect) -> None:
        if (connection := self.connections.of(action.worker)) is not None:
            self.leave(connection, action.reason)

    def _new_weights_check(self) -> WeightsCheck:
        return WeightsCheck(
            self._model,
            activity=self._activity,
            send=self._send,
            idle_s=self.policy.weights_idle_s,
            cache_directory=self._settings.cache_directory,
        )

    def _activity(self) -> object | None:
        """A value that changes with every request; None unless the cluster serves and is idle."""
        if self._engine.has_live_requests or self.state.phase is not ClusterPhase.SERVING:
            return None
        return self.state.epoch, self._totals.finished

    def _send(self, worker: WorkerIdentity, message: join_pb2.JoinResponse) -> None:
        if (connection := self.connections.of(worker)) is not None:
            connection.send(message)

    def _dismiss_worker(self, action: DismissWorker) -> None:
        leave = join_pb2.Leave(reason=action.reason, exit_process=True)
        self._send(action.worker, join_pb2.JoinResponse(leave=leave))

    async def _finish_running(self, action: FinishRunning) -> None:
        """Finish running requests before the worker exits, because no other worker can take its layers."""
        self._events.finishing_requests(action.worker.name)
        self._engine.stop_admitting()
        self.availability.stop_admitting()
        self.connections.send_all(encode_serving(self.state.epoch, is_serving=False))
        await self.availability.wait_until(lambda: self._engine.is_idle)
        self._carry_out(self.state.drained(action.worker.name, action.worker.incarnation))

    def _start_serving(self, action: StartServing) -> None:
        plan = action.plan
        kv = KvCacheManager(
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            prefix_caching=self.prefix_caching,
            window=plan.window,
            other_groups=plan.other_groups,
            num_states=plan.num_states,
        )
        limits = self.memory_limits.apply(self._plan_limits(plan))
        self._events.serving(action.epoch, plan)
        self._events.kernels([stage_kernels(connection) for connection in self._stage_connections()])
        self._durability.record_served()
        if self._weights_check is not None:
            workers = (record.identity for record in self.state.stage_workers)
            self._weights_check.plan_serves(self.state.plan_id, zip(workers, plan.stages, strict=True))
        # No other worker can take the layers of a draining worker that still has a stage.
        admits_new = not any(record.is_draining for record in self.state.stage_workers)
        self.availability.begin(admits_new=admits_new)
        self._send_serving()
        self.ledger_check.restart()
        self._engine.start_epoch(
            action.epoch,
            kv,
            limits,
            self._pipeline.send,
            max_sequence_tokens=plan.max_sequence_tokens,
            admits_new=admits_new,
        )

    def _send_serving(self) -> None:
        """Send workers whether new requests are served, for their health services."""
        message = encode_serving(self.state.epoch, is_serving=self.availability.serves_new)
        self.connections.send_all(message)

    def _journal_changed(self) -> None:
        self.availability.journal_changed()
        if self.availability.is_serving:
            self._send_serving()

    def _stop_serving(self, action: StopServing) -> None:
        self._events.epoch_over(action, was_serving=self.availability.is_serving)
        if self.checks is not None:
            self.checks.end()
        self._failure_detector.restart()
        if self.availability.is_serving:
            self._engine.deliver()
            self._attribute(action)
            self._engine.stop_epoch(action.cause, action.reason)
            self.availability.end()
        self._release_link()
        end = join_pb2.EndEpoch(epoch=action.epoch)
        self.connections.send_all(join_pb2.JoinResponse(end_epoch=end))
        self.availability.limit_waiting()

    def _attribute(self, action: StopServing) -> None:
        match action.cause:
            case EndCause.DEATH:
                self._attribution.record_worker_loss(action.reason)
            case EndCause.DEVICE:
                self._attribution.record_device_failure(action.reason, num_stages=self.state.num_stages)
            case EndCause.BROKEN | EndCause.NO_PROGRESS:
                is_lasting = action.cause is EndCause.NO_PROGRESS
                self._attribution.record_break(action.reason, is_lasting=is_lasting)

    def _release_link(self) -> None:
        if (link := self._pipeline.release()) is not None:
            self._spawn(link.close())

    def _set_silent(self, connection: WorkerConnection, is_silent: bool) -> None:
        identity = connection.identity
        self.state.workers.set_silent(identity.name, identity.incarnation, is_silent=is_silent)

    def _tick(self) -> None:
        self.availability.tick()
        if self.state.phase is not ClusterPhase.SERVING:
            return
        if (fault := overdue_fault(self._engine, self._stage_progress(), self.policy)) is not None:
            self.report_fault(fault)
        else:
            self._require_sound_ledger(self.ledger_check.when_idle())
            if self.checks is not None:
                self.checks.tick()

    def _stage_connections(self) -> list[WorkerConnection | None]:
        return self.connections.of_stages(record.identity for record in self.state.stage_workers)

    def _stage_progress(self) -> list[StageProgress | None]:
        return self.connections.progress_of(record.identity for record in self.state.stage_workers)

    def _new_checks(self, check: SelfCheck) -> PlanChecks:
        return PlanChecks(
            check,
            self.state,
            self._engine,
            connections=self.connections,
            pipeline=self._pipeline,
            events=self._events,
            weights=self._weights_check,
            carry_out=self._carry_out,
            fail_epoch=self.fail_epoch,
            spawn=self._spawn,
        )

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("controller task failed", exc_info=error)
