"""The coordinator process: builds every part, serves, drains and stops."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import Coroutine
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import uvloop
from grpc_health.v1 import health_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from certificates.identity import DEFAULT_CLUSTER, Role
from checkpoint import CheckpointError
from coordinator.api.activity import ActivityReporter
from coordinator.api.call_context import CallContexts, Operators, SecretCheck, TokenFile
from coordinator.api.cluster_service import ClusterService, KvOrigin
from coordinator.api.health import CoordinatorHealth, condition_of
from coordinator.api.inference_service import InferenceService
from coordinator.api.intake import Intake
from coordinator.api.message_limits import GENERATE, MessageLimits
from coordinator.api.request_handler import RequestHandler
from coordinator.api.serve_service import ServeStreams
from coordinator.api.status import StatusReporter
from coordinator.api.telemetry_service import MetricsService, TelemetryService, TraceService
from coordinator.api.tenants import read_public_prefixes
from coordinator.api.tokenizer_service import TokenizerService
from coordinator.api.worker_services import MembershipService, StepResultsService
from coordinator.cluster.controller import Controller
from coordinator.cluster.state_machine import ClusterState
from coordinator.cluster.step_limits import BatchingOptions, ServingSettings
from coordinator.cluster.worker_order import WorkerOrder
from coordinator.config import CoordinatorConfig
from coordinator.engine.admission import AdmissionLimits
from coordinator.engine.durability import Durability
from coordinator.engine.engine import Engine
from coordinator.journal.database import ServedIdentity
from coordinator.journal.journal import Journal
from coordinator.journal.records import JournalUnusable
from coordinator.model import ServedModel, open_model
from coordinator.observability.activity import ActivityRecorder
from coordinator.observability.facts import FactRecorder
from coordinator.observability.metrics import CoordinatorMetrics
from coordinator.observability.request_audit import RequestAudit
from coordinator.observability.request_log import RequestLog
from coordinator.observability.request_traces import RequestTraces
from coordinator.observability.trace_reader import TraceReader
from coordinator.observability.trace_store import StoreLimits, TraceStore
from coordinator.planner.planner import check_counts, plan_for
from coordinator.recovery.policy import RecoveryPolicy
from coordinator.recovery.self_check import References, SelfCheck
from stageline_rpc.internal.v1 import deliver_pb2, deliver_pb2_grpc, join_pb2, join_pb2_grpc
from stageline_rpc.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    telemetry_pb2,
    telemetry_pb2_grpc,
)
from telemetry import logs
from telemetry.service_manager import supervised
from telemetry.span_recorder import new_recorder
from telemetry.span_sinks import StoreSink
from telemetry.spans import COORDINATOR
from text.tokenizer import TokenizerError
from wire.addresses import Address, parse_address
from wire.audit import open_audit
from wire.authorization import DenyList, authorization
from wire.channels import new_server, raise_file_limit
from wire.clock import ClusterClock
from wire.condition import STARTING, Condition, ProcessState
from wire.errors import reason_of
from wire.exit_codes import ExitCode, error_line
from wire.flags import OFF
from wire.ids import Incarnation, new_incarnation
from wire.peer_secrets import new_secret
from wire.reflection import add_reflection
from wire.transport import open_transport

if TYPE_CHECKING:
    from coordinator.dashboard.server import DashboardServer
    from coordinator.enrolment.server import EnrolmentServer
    from coordinator.weights_port import CoordinatorWeightsPort

log = logging.getLogger(__name__)

SERVICES = (
    inference_pb2,
    cluster_pb2,
    telemetry_pb2,
    join_pb2,
    deliver_pb2,
    trace_service_pb2,
    metrics_service_pb2,
    health_pb2,
)
INTERPRETER_SWITCH_S = 0.0005
"""How long the event loop waits for a thread that runs Python, such as a chat template; CPython has 5 ms."""


class CoordinatorServer:
    """All parts of a coordinator, bound and started together. `address` is where it listens."""

    def __init__(
        self, config: CoordinatorConfig, model: ServedModel, policy: RecoveryPolicy | None = None
    ) -> None:
        self._config, self._model = config, model
        self._audit = open_audit(config.logs.audit_log, "coordinator")
        self._transport = open_transport(config.transport, Role.COORDINATOR, self._audit)
        self._policy = policy or config.recovery_policy
        self._token_file = TokenFile(config.token_directory) if config.token is None else None
        self._token = config.token if self._token_file is None else self._token_file.token
        self.journal = None if config.journal is None else open_journal(config.journal, model)
        incarnation = new_incarnation()
        self._instance = str(UUID(bytes=incarnation))
        self._open_telemetry(self._instance)
        self._traces = RequestTraces(
            self.recorder,
            config.sampler,
            model=model.name,
            on_refusal=self.metrics.requests.count_refusal,
        )
        self.engine = self._new_engine()
        self._health = CoordinatorHealth(self.condition)
        self.controller = self._new_controller(incarnation)
        self.metrics.watch(self.engine, self.controller, num_dropped_spans=lambda: self.recorder.num_dropped)
        self._sweeper: asyncio.Task[None] | None = None
        status = self._new_status()
        activity = ActivityReporter(self.activity, self.controller, self.engine)
        self._requests, self.weights_port = self._new_request_handler(), self._new_weights_port()
        self.dashboard = None if config.http is None else self._dashboard(config.http, status, activity)
        self.enrolment = None if config.enroll_listen is None else self._enrolment(config.enroll_listen)
        self._denied = self.metrics.refused_peers("certificate")
        self._server = new_server(
            authorization=authorization(self._transport, config.transport.deny_list, self._denied),
            interceptors=(MessageLimits(),),
            on_refusal=self._count_refusal,
        )
        self._add_services(status, activity)
        self.address = config.listen

    def _cluster_service(self, status: StatusReporter, operators: Operators) -> ClusterService:
        identity = self._transport.identity
        origin = KvOrigin(
            cluster=DEFAULT_CLUSTER if identity is None else identity.cluster,
            incarnation=self._instance,
            fingerprint=self._model.fingerprint,
        )
        return ClusterService(self.controller, status, self.engine.kv_events, origin, operators, self._audit)

    def _count_refusal(self, method: str, error: Exception) -> None:
        """Count a request that the server refused before its servicer."""
        if method == GENERATE:
            self.metrics.requests.count_refusal(error)

    def _open_telemetry(self, instance: str) -> None:
        config = self._config
        limits = StoreLimits(num_traces=config.trace_store, size_bytes=config.trace_bytes)
        self.trace_store = TraceStore(limits)
        self.trace_reader = TraceReader(self.trace_store)
        sink, clock = StoreSink(self.trace_store.add), ClusterClock()
        self.recorder = new_recorder(COORDINATOR, sink, config.telemetry, clock, instance=instance)
        self.metrics = CoordinatorMetrics(config.telemetry, instance=instance, audit=self._audit)
        self.metrics.watch_certificate(self._transport.certificate_life)
        self._refused_operators = self.metrics.refused_peers("operator_token")
        self.activity = ActivityRecorder(time.monotonic(), bubble_share=self.metrics.pipeline.bubble_share)

    def _new_engine(self) -> Engine:
        config = self._config
        limits = AdmissionLimits(
            queue_size=config.queue_size,
            max_client_requests=config.max_client_requests,
            max_unread_tokens=config.max_unread_tokens,
        )
        return Engine(
            limits,
            policy=self._policy,
            durability=Durability(self.journal, config.reattach_timeout_s, policy=self._policy),
            observer=FactRecorder(
                (
                    *(self._traces, *self.metrics.observers),
                    *(self.activity, RequestLog(), RequestAudit(self._audit, config.client_key)),
                )
            ),
        )

    def _new_controller(self, incarnation: Incarnation) -> Controller:
        config, model = self._config, self._model
        batching = BatchingOptions(
            steps_in_flight=config.steps_in_flight,
            itl_target_s=config.itl_target_s,
            max_decode_slowdown=config.max_decode_slowdown,
        )
        return Controller(
            _new_state(config, model, self._policy, self.journal),
            self.engine,
            model,
            incarnation=incarnation,
            policy=self._policy,
            settings=ServingSettings(
                batching=batching,
                prefix_caching=config.prefix_cache,
                hop_route=config.hidden_states,
                cache_directory=config.cache_directory,
                weights_peers=config.weights_peers or (),
                prefetch=config.prefetch,
                host=parse_address(config.listen).host,
            ),
            on_serving=self._health.set_serving,
            self_check=self._new_self_check() if config.wants_self_check else None,
            new_secret=new_secret,
            refused=self.metrics.refused_peers("hop_secret"),
            transport=self._transport,
            audit=self._audit,
        )

    def _new_self_check(self) -> SelfCheck:
        config, model, policy = self._config, self._model, self._policy
        return SelfCheck(
            References(
                model,
                cache_directory=config.cache_directory,
                policy=policy,
                transport=self._transport,
            ),
            vocab_size=model.config.vocab_size,
            interval_s=config.self_check_interval_s,
            policy=policy,
            changed_files=model.changed_files,
        )

    def _new_status(self) -> StatusReporter:
        config = self._config
        return StatusReporter(
            *(self.controller, self.engine, self._model),
            sampler=config.sampler.get_description(),
            loop_lag=self.metrics.loop_lag.recent,
            max_step_tokens=config.max_step_tokens,
            transport=self._transport,
        )

    def _new_request_handler(self) -> RequestHandler:
        """Make the request handler and restore the journal's requests."""
        handler = RequestHandler(
            self.engine,
            self.controller,
            self._model,
            self._traces,
            priority_age_s=self._config.priority_age_s,
            max_model_len=self._config.max_sequence_tokens,
            public=read_public_prefixes(self._config.public_prefixes or (), self._model),
        )
        if self.journal is not None and (requests := self.journal.take_requests()):
            num_live = handler.resume(requests)
            log.info("%d requests are in the journal, %d of them live", len(requests), num_live)
        return handler

    def _add_services(self, status: StatusReporter, activity: ActivityReporter) -> None:
        """Register all gRPC services."""
        callers = CallContexts(self._config.client_key, self.engine.now_s)
        operators = Operators(self._token, self._refused_operators)
        secrets = SecretCheck(self.engine, self.metrics.refused_peers("attach_secret"))
        self._streams = ServeStreams(
            self._requests, self.engine, callers, secrets, fingerprint=self._model.fingerprint
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(
            InferenceService(
                self._requests,
                self.engine,
                status,
                callers,
                operators,
                secrets,
                self._streams,
                TokenizerService(self._model, self._requests.beside),
                self._audit,
            ),
            self._server,
        )
        cluster_pb2_grpc.add_ClusterServicer_to_server(self._cluster_service(status, operators), self._server)
        self._add_worker_services()
        telemetry_pb2_grpc.add_TelemetryServiceServicer_to_server(
            TelemetryService(self.trace_store, self.trace_reader, activity), self._server
        )
        intake = Intake()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(
            TraceService(self.trace_store, intake), self._server
        )
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(
            MetricsService(intake, self.metrics.take), self._server
        )
        self._health.add_to(self._server)
        if self._config.reflection:
            add_reflection(self._server, (file.DESCRIPTOR for file in SERVICES))

    def _add_worker_services(self) -> None:
        join_pb2_grpc.add_MembershipServiceServicer_to_server(
            MembershipService(self.controller, self._denied), self._server
        )
        deliver_pb2_grpc.add_StepResultsServiceServicer_to_server(
            StepResultsService(self.controller), self._server
        )

    def _dashboard(self, listen: str, status: StatusReporter, activity: ActivityReporter) -> DashboardServer:
        # Imported late: the HTTP server takes some 20 MB, and not every coordinator has a dashboard.
        from coordinator.dashboard.routes import DashboardContext
        from coordinator.dashboard.server import DashboardServer
        from web.api_keys import KeysFile

        keys_file = self._config.keys_file
        context = DashboardContext(
            status=status,
            activity=activity,
            engine=self.engine,
            controller=self.controller,
            traces=self.trace_reader,
            metrics=self.metrics.metrics_text,
        )
        return DashboardServer(
            context,
            listen=listen,
            token=self._token,
            refused=self._refused_operators,
            tls=self._transport.http_context(),
            keys=None if keys_file is None else KeysFile(keys_file, audit=self._audit),
            needs_login=self._config.needs_login,
        )

    def _enrolment(self, listen: str) -> EnrolmentServer:
        """Raises ValueError for missing settings, OSError for an authority or tokens that cannot be used."""
        self._config.check_enrolment()
        # Imported late, as only this needs the library of certificates.
        from certificates.join_tokens import JoinTokenStore
        from coordinator.enrolment.enroller import Enroller
        from coordinator.enrolment.server import EnrolmentServer

        config, files = self._config, self._transport.files
        tls = self._transport.http_context(asks_certificates=True)
        assert config.authority is not None and config.join_tokens is not None
        assert files is not None and tls is not None
        denied = DenyList(config.transport.deny_list)
        tokens = JoinTokenStore(config.join_tokens)
        return EnrolmentServer(
            Enroller(config.authority, tokens, files, denied, self._audit),
            listen=listen,
            tls=tls,
            refused=self.metrics.refused_peers("join_token"),
        )

    def _new_weights_port(self) -> CoordinatorWeightsPort | None:
        """Raises OSError and CheckpointError for a directory that became unreadable."""
        config, model, listen = self._config, self._model, self._config.weights_listen
        is_wanted = model.has_weights_here and not model.is_builtin if listen is None else listen != OFF
        if not is_wanted:
            return None
        # Imported late: the HTTP server takes some 20 MB, and remote models need none here.
        from coordinator.weights_port import CoordinatorWeightsPort

        host = parse_address(config.listen).host
        return CoordinatorWeightsPort(
            model,
            Address(host, 0) if listen is None else parse_address(listen),
            self.controller.weights.peers,
            transport=self._transport,
            deny_list=config.transport.deny_list,
            refused=self.metrics.refused_peers("weights"),
        )

    def _start_weights_port(self, port: CoordinatorWeightsPort) -> None:
        """Raises OSError if the address cannot be bound."""
        port.start()
        if port.pins is not None:
            self._model.shared = port.pins
            is_own = port.address.host in (parse_address(self._config.listen).host, "0.0.0.0", "::")
            self.controller.weights.coordinator = f":{port.address.port}" if is_own else str(port.address)

    async def start(self) -> None:
        """Bind and start everything. Raises OSError if an address cannot be bound."""
        listen = self._config.listen
        port = self._transport.bind(self._server, str(parse_address(listen)))
        self.address = f"{listen.rpartition(':')[0]}:{port}"
        if self._token_file is not None:
            self._token_file.write(self.address)
        if self.dashboard is not None:
            await self.dashboard.start()
        if self.enrolment is not None:
            await self.enrolment.start()
        if self.weights_port is not None:
            await asyncio.to_thread(self._start_weights_port, self.weights_port)
        await self._health.start()
        await self._server.start()
        self.recorder.start()
        self.controller.start()
        self.metrics.start()
        self._sweeper = asyncio.create_task(self._sweep(), name="sweeper")

    def condition(self) -> Condition:
        """Whether new requests are served. Called from any thread."""
        return condition_of(self.controller)

    async def drain(self) -> None:
        """Reject new requests and finish running ones, within `drain_timeout_s`."""
        await self.controller.availability.drain()

    async def stop(self) -> None:
        """Fail all live requests and close all streams."""
        if self._token_file is not None:
            self._token_file.remove()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])
        if self.dashboard is not None:
            await self.dashboard.stop()
        if self.enrolment is not None:
            await self.enrolment.stop()
        if self.weights_port is not None:
            await asyncio.to_thread(self.weights_port.stop)
        self.engine.suspend()
        await self.controller.close()
        self._streams.close()
        self._requests.close()
        self.engine.kv_events.close()
        await self.metrics.close()
        await self._health.stop()
        await self.recorder.close()
        await self._server.stop(self._policy.stop_grace_s)
        self.trace_reader.close()
        self._audit.close()

    async def _sweep(self) -> None:
        """Sweep until cancelled; an error is logged, and the next sweep may succeed."""
        while True:
            await asyncio.sleep(self._policy.sweep_interval_s)
            try:
                self.engine.sweep()
            except Exception:
                log.exception("sweep failed: next_in_s=%g", self._policy.sweep_interval_s)


def open_journal(path: Path, model: ServedModel) -> Journal:
    """Open the journal. Raises JournalUnusable."""
    return Journal(path, ServedIdentity(model.fingerprint, model.dtype.value))


def _new_state(
    config: CoordinatorConfig, model: ServedModel, policy: RecoveryPolicy, journal: Journal | None
) -> ClusterState:
    """Make the state of a cluster without workers; a former coordinator may have served."""
    return ClusterState(
        num_stages=config.num_stages,
        make_plan=lambda workers: plan_for(config, model, workers),
        is_mock_model=model.is_mock,
        policy=policy,
        last_epoch=0 if journal is None else journal.epoch,
        has_served=journal is not None and journal.has_served,
        needs_check=config.wants_self_check,
        order=WorkerOrder(
            config.max_step_sequences * model.config.boundary_bytes(model.dtype),
            by_links=config.orders_by_links,
        ),
    )


def run(config: CoordinatorConfig) -> int:
    """Serve until SIGTERM or SIGINT. Return the exit code; failures are one line on stderr."""
    logs.configure(config.logs, "coordinator")
    raise_file_limit()
    sys.setswitchinterval(INTERPRETER_SWITCH_S)
    state = ProcessState()
    try:
        with _health_port(config.health_listen, state):
            uvloop.run(_supervise(config, _load_model(config), state))
    except (
        CheckpointError,
        TokenizerError,
        JournalUnusable,
        ValueError,
        OSError,
    ) as error:
        logs.log_fatal(config.logs, error_line(reason_of(error), str(error)))
        return ExitCode.FAILED
    return ExitCode.DONE


def _load_model(config: CoordinatorConfig) -> ServedModel:
    model = open_model(config)
    check_counts(config, model)
    model.load_text()
    return model


def _health_port(listen: str | None, state: ProcessState) -> AbstractContextManager[None]:
    if listen is None:
        return nullcontext()
    from web.health_port import health_port  # imported late: the HTTP server takes some 20 MB

    return health_port(listen, state.current)


async def _supervise(config: CoordinatorConfig, model: ServedModel, state: ProcessState) -> None:
    """Serve. It has started when it listens: only then can it get the workers with which it serves."""
    async with supervised(
        config.notify, state.current, is_started=lambda condition: condition is not STARTING
    ):
        await _serve(config, model, state)


async def _serve(config: CoordinatorConfig, model: ServedModel, state: ProcessState) -> None:
    stopping, draining = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stopping.set)
    loop.add_signal_handler(signal.SIGTERM, lambda: (stopping if draining.is_set() else draining).set())
    server = CoordinatorServer(config, model)
    await server.start()
    state.follow(server.condition)
    # Objects made at start are permanent: scanning them in each collection would pause steps for tens of ms.
    gc.freeze()
    if server.dashboard is not None:
        print(f"dashboard {server.dashboard.url}", flush=True)
    if server.enrolment is not None:
        print(f"enrolment at {server.enrolment.address}", flush=True)
    print(f"stageline coordinator listening on {server.address}", flush=True)
    log.info(
        "serving model %s (%s), waiting for %d workers", model.name, model.dtype.value, config.num_stages
    )
    await _first_of(stopping.wait(), draining.wait())
    if not stopping.is_set() and server.journal is None:
        log.info("draining; send SIGTERM again to stop immediately")
        await _first_of(stopping.wait(), server.drain())
    log.info("stopping")
    await server.stop()


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Await the first of `waits` and cancel the others."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
