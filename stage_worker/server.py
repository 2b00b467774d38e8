"""The stage worker process, from configuration to exit status."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from certificates.identity import Role
from checkpoint.hashes import CACHE_FOLDER, HashCache
from stage_worker.backends.backend import StageBackend
from stage_worker.backends.contract import DeviceError, StepObserver
from stage_worker.backends.gpu_choice import warn_of_unused_gpus
from stage_worker.backends.hop_memory import HopMemory
from stage_worker.backends.mock_backend import MockBackend
from stage_worker.config import MemoryTooLarge, SameHost, WorkerConfig
from stage_worker.coordinator_client import CoordinatorClient, JoinRefused
from stage_worker.hop_payloads import PayloadConnections
from stage_worker.loading.remote_weights import Sharing
from stage_worker.loading.weights_check import WeightsVerifier
from stage_worker.metrics import WorkerMetrics, resident_bytes
from stage_worker.policy import WORKER_POLICY
from stage_worker.service import StageService
from stage_worker.spans import StageSpans
from stage_worker.stage_manager import StageManager
from stage_worker.weights_port import WeightsPort
from stageline_rpc.internal.v1 import forward_pb2, join_pb2
from telemetry import logs
from telemetry.service_manager import supervised
from telemetry.span_recorder import SpanRecorder, new_recorder
from telemetry.span_sinks import CoordinatorSink
from telemetry.spans import WORKER
from weights.serving import HeldRegistry
from wire.addresses import Address, parse_address, parse_peer_address
from wire.audit import open_audit
from wire.authorization import authorization
from wire.channels import PROTOCOL_VERSION, new_server, raise_file_limit
from wire.clock import ClusterClock
from wire.condition import Condition, ProcessState
from wire.device_rates import DeviceRates, encode_rates
from wire.errors import ServingError, reason_of
from wire.exit_codes import ExitCode, error_line
from wire.flags import OFF
from wire.gpu import DeviceMemory, encode_device_memory, encode_gpu
from wire.interceptors import HealthServicer
from wire.memory_listener import MemoryListener
from wire.payload_sockets import PayloadListener
from wire.payloads import MIN_PAYLOAD_BYTES
from wire.peer_limits import PeerLimits
from wire.peer_secrets import RefusedPeers
from wire.reflection import add_reflection
from wire.status_codec import encode_certificate
from wire.transport import is_loopback, open_transport

if TYPE_CHECKING:
    from stage_worker.enrolment import Renewal

log = logging.getLogger(__name__)


STAGE_SERVICE = forward_pb2.DESCRIPTOR.services_by_name["StageService"].full_name
_MAX_CALLS_PER_HOST = 256
"""Of the coordinator, the stage before, and probes of its health."""
_STREAM_WINDOW_BYTES = MIN_PAYLOAD_BYTES + 64 * 1024
"""Hidden states below `--payload-min` do not wait for the receiver's window; others do, on a stream."""
_WILDCARDS = ("0.0.0.0", "::")
_PAYLOAD_PORT_HINT = "choose another address with --payload-listen HOST:PORT"


class Worker:
    """One worker per process: construct, start, run, stop, in one event loop."""

    def __init__(self, config: WorkerConfig) -> None:
        """Raises ValueError for a device that this host lacks. Binds no port."""
        self._config = config
        self._audit = open_audit(config.logs.audit_log, f"worker {config.name or socket.gethostname()}")
        self.metrics = WorkerMetrics(config.telemetry, num_lost_records=lambda: self._audit.num_lost)
        self._health = HealthServicer(self.condition)
        self._transport = open_transport(config.transport, Role.WORKER, self._audit)
        self._weights_port = self._new_weights_port()
        self._backend = _new_backend(config, self._sharing())
        self._device = self._backend.device
        self._backend.on_device_failure = self._note_device_failure
        self.metrics.watch_device(self._device_memory)
        self._device_failure = ""
        self._has_failed = asyncio.Event()
        self.metrics.watch_certificate(self._transport.certificate_life)
        self._refused = RefusedPeers(time.monotonic, audit=self._audit)
        self._server = new_server(
            authorization=authorization(self._transport, config.transport.deny_list, self._refused),
            limits=PeerLimits(max_calls_per_host=_MAX_CALLS_PER_HOST),
            stream_window_bytes=_STREAM_WINDOW_BYTES,
        )
        self._clock = ClusterClock()
        self._recorder: SpanRecorder | None = None
        self._payloads = PayloadListener(self._refused, tls=self._transport.server_context)
        self._memory = MemoryListener(self._refused, self._hop_memory, self._hop_memory)
        self._observers: list[StepObserver] = [self.metrics.stage]
        self._stage = self._new_stage()
        self._client = CoordinatorClient(
            coordinator=config.coordinator,
            new_hello=self._hello,
            heartbeat=self._heartbeat,
            stage=self._stage,
            clock=self._clock,
            transport=self._transport,
        )
        self._renewal = _renewal(config)
        self._health_tasks: set[asyncio.Task[None]] = set()
        self.listen_address = ""
        self.advertised_address = ""
        self.name = self._certified_name()

    def _new_weights_port(self) -> WeightsPort:
        config = self._config
        return WeightsPort(
            HeldRegistry(),
            listen=config.weights_listen,
            advertise=config.weights_advertise,
            transport=self._transport,
            deny_list=config.transport.deny_list,
            audit=self._audit,
        )

    def _sharing(self) -> Sharing:
        listen = self._config.weights_listen
        return Sharing(
            registry=self._weights_port.registry,
            context=self._transport.client_context,
            serves_directory=listen not in (None, OFF),
        )

    def _new_stage(self) -> StageManager:
        config, transport = self._config, self._transport
        return StageManager(
            coordinator=config.coordinator,
            backend=self._backend,
            on_serving=self._set_serving,
            wire_dtype=config.wire_dtype,
            clock=self._clock,
            observers=self._observers,
            weights=WeightsVerifier(_hash_cache(config.cache_directory)),
            weights_port=self._weights_port,
            payloads=PayloadConnections(
                self._payloads,
                memory=self._memory,
                hop_memory=self._hop_memory,
                min_bytes=config.min_payload_bytes,
                transport=transport,
            ),
            transport=transport,
            refused=self._refused,
        )

    def _certified_name(self) -> str:
        """The configured name or the certificate's; empty without either. Raises ValueError for two names."""
        wanted, identity = self._config.name or "", self._transport.identity
        if identity is None:
            return wanted
        if wanted and wanted != identity.name:
            raise ValueError(f"--name is {wanted}, but the certificate in --tls-dir is of {identity}")
        return identity.name

    async def start(self) -> None:
        """Bind and serve. Raises OSError when the address cannot be bound."""
        listen = await self._listen_address()
        StageService(self._stage).add_to(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if self._config.reflection:
            add_reflection(self._server, (forward_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR))
        port = self._transport.bind(self._server, str(listen))
        bound = Address(listen.host, port)
        self._listen_for_payloads(bound.host)
        self._listen_for_memory()
        self.listen_address = str(bound)
        self.advertised_address = self._config.advertise or str(
            await _advertised(bound, self._config.coordinator)
        )
        if is_loopback(self.advertised_address) and not is_loopback(self._config.coordinator):
            log.warning(
                "other hosts cannot reach this worker at %s; pass --listen with an address of this host",
                self.advertised_address,
            )
        self.name = self.name or f"{socket.gethostname()}-{port}"
        self._weights_port.host = bound.host
        self._weights_port.advertised_host = parse_address(self.advertised_address).host
        self._start_telemetry()
        await self._report_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()

    async def run(self) -> None:
        """Stay joined until told to exit. Raises JoinRefused, and DeviceError after its report."""
        client = self._client
        orders = asyncio.create_task(self._stage.run(), name="stage-manager")
        joined = asyncio.create_task(client.run(), name="membership")
        failed = asyncio.create_task(self._has_failed.wait(), name="device-failure")
        renewing = [] if self._renewal is None else [asyncio.create_task(self._renewal.run(), name="renewal")]
        try:
            await asyncio.wait({orders, joined, failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._has_failed.is_set():
                # The coordinator ends the stream when it receives the report, which is being sent.
                client.stop_dialling()
                await asyncio.wait({joined}, timeout=WORKER_POLICY.report_timeout_s)
                raise DeviceError(f"device {self._device.name} failed: {self._device_failure}")
            for task in (orders, joined):
                if task.done():
                    task.result()
        finally:
            await _cancel((joined, orders, failed, *renewing))

    @property
    def computes_on_cpu(self) -> bool:
        return self._device.name == "cpu"

    def condition(self) -> Condition:
        """Whether the worker is of use to its cluster. Called from any thread."""
        return self._client.condition()

    def ask_to_leave(self) -> bool:
        """Ask to drain this worker, which ends `run`. Returns False without a connection."""
        return self._client.ask_to_leave()

    @property
    def leave_timeout_s(self) -> float:
        """Maximum time that leaving may take, as set by the coordinator."""
        return self._client.leave_timeout_s

    async def stop(self) -> bool:
        """Stop server and backend. Returns False when the backend is still busy."""
        await self.metrics.close()
        self._payloads.close()
        self._memory.close()
        await self._weights_port.stop()
        await self._server.stop(WORKER_POLICY.stop_grace_s)
        if self._recorder is not None:
            await self._recorder.close()
        await _cancel(self._health_tasks)
        self._audit.close()
        return self._backend.stop(timeout_s=WORKER_POLICY.stop_grace_s)

    def _start_telemetry(self) -> None:
        """Start telemetry, which needs the worker's name."""
        config = self._config
        self._recorder = new_recorder(
            WORKER,
            CoordinatorSink(config.coordinator, self._transport),
            *(config.telemetry, self._clock),
            instance=self.name,
        )
        self._observers.append(StageSpans(self._recorder, self._stage, worker=self.name))
        self._recorder.start()
        self.metrics.start(self.name, config.coordinator, self._stage, self._recorder, self._transport)

    async def _listen_address(self) -> Address:
        """The configured address, else a free port on the interface that reaches the coordinator."""
        if self._config.listen is not None:
            return parse_address(self._config.listen)
        address = Address(await _local_host(self._config.coordinator), 0)
        transport = self._config.transport
        transport.check_listen("--listen", str(address))
        return address

    def _listen_for_payloads(self, host: str) -> None:
        """Raises OSError when the address cannot be bound."""
        wanted = self._config.payload_listen
        if wanted == OFF:
            return
        address = Address(host, 0) if wanted is None else parse_address(wanted)
        offered = Address("" if address.host in (host, *_WILDCARDS) else address.host, 0)
        if self._config.payload_advertise is not None:
            offered = parse_peer_address(self._config.payload_advertise)
        try:
            self._payloads.listen(address, offered=offered)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise OSError(
                f"cannot listen on {address} for payloads: {reason}; {_PAYLOAD_PORT_HINT}"
            ) from None

    def _listen_for_memory(self) -> None:
        if self._config.same_host is SameHost.OFF:
            return
        try:
            self._memory.listen()
        except OSError as error:
            log.warning("hidden states do not travel in shared memory on this host: %s", error.strerror)

    def _hello(self) -> join_pb2.WorkerHello:
        """A hello with a new incarnation: the coordinator may have replaced the previous one."""
        device = self._device
        return join_pb2.WorkerHello(
            protocol_version=PROTOCOL_VERSION,
            name=self.name,
            incarnation=self._stage.renew(),
            address=self.advertised_address,
            device=device.name,
            memory_bytes=device.memory_bytes,
            last_epoch=self._stage.last_epoch,
            pid=os.getpid(),
            hostname=socket.gethostname(),
            is_mock=device.is_mock,
            supports_bf16=device.supports_bf16,
            supports_f16=device.supports_f16,
            gpu=None if device.gpu is None else encode_gpu(device.gpu),
            reads_pages_in_place=device.reads_pages_in_place,
            rates=None if (rates := self._rates) is None else encode_rates(rates),
            warm_spare_bytes=self._config.warm_spare_bytes or 0,
            memory_domain=self._stage.memory_domain,
            host_memory_bytes=device.host_memory_bytes,
        )

    @property
    def _hop_memory(self) -> HopMemory | None:
        memory = self._backend.gpu_memory
        return None if memory is None else memory.hop_memory

    def _device_memory(self) -> DeviceMemory | None:
        memory = self._backend.gpu_memory
        return None if memory is None else memory.read()

    @property
    def _rates(self) -> DeviceRates | None:
        """As given, or else as measured."""
        given = self._config.device_rate
        return given if isinstance(given, DeviceRates) else self._device.rates

    def _heartbeat(self) -> join_pb2.Heartbeat:
        heartbeat = self._stage.heartbeat()
        heartbeat.resident_bytes = resident_bytes()
        if (memory := self._device_memory()) is not None:
            heartbeat.device_memory.CopyFrom(encode_device_memory(memory))
        if (certificate := encode_certificate(self._transport.certificate_life())) is not None:
            heartbeat.certificate.CopyFrom(certificate)
        return heartbeat

    def _note_device_failure(self, reason: str) -> None:
        if not self._has_failed.is_set():
            self._device_failure = reason
            self._has_failed.set()
            self._stage.device_failed(reason)

    def _set_serving(self, is_serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING
        if not is_serving:
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        task = asyncio.create_task(self._report_health(status))
        self._health_tasks.add(task)
        task.add_done_callback(self._health_tasks.discard)

    async def _report_health(self, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        for service in ("", STAGE_SERVICE):
            await self._health.set(service, status)


def _hash_cache(directory: Path | None) -> HashCache | None:
    return None if directory is None else HashCache(directory / CACHE_FOLDER)


def _new_backend(config: WorkerConfig, sharing: Sharing) -> StageBackend:
    """Raises ValueError for a device that this host lacks."""
    if config.mock is not None:
        return MockBackend(
            config.mock, memory_bytes=config.memory_bytes, step_timeout_s=config.step_timeout_s
        )
    from stage_worker.backends.torch_backend import TorchBackend  # imported late: a mock does not need torch

    return TorchBackend(config, sharing)


async def _enrolled(config: WorkerConfig) -> WorkerConfig:
    from stage_worker.enrolment import enrolled  # imported late, as other workers need no such library

    return await enrolled(config)


def _renewal(config: WorkerConfig) -> Renewal | None:
    directory = config.transport.tls_directory
    if config.join_token_file is None or directory is None:
        return None
    from stage_worker.enrolment import Renewal

    return Renewal(config.enroll_address, directory)


async def _advertised(bound: Address, coordinator: str) -> Address:
    """The bound address; for a wildcard, the local address of the route to the coordinator."""
    if bound.host not in _WILDCARDS:
        return bound
    family = socket.AF_INET if bound.host == "0.0.0.0" else socket.AF_UNSPEC
    return Address(await _local_host(coordinator, family), bound.port)


async def _local_host(coordinator: str, family: socket.AddressFamily = socket.AF_UNSPEC) -> str:
    """The local address of the route to the coordinator. Raises OSError."""
    peer = parse_peer_address(coordinator)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(peer.host, peer.port, family=family, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # Connecting a datagram socket sends nothing; it only selects the route.
            probe.connect(address)
            host: str = probe.getsockname()[0]
    except OSError as error:
        raise OSError(f"no route to the coordinator at {coordinator}: {error.strerror}") from None
    return host


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = tuple(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def run(config: WorkerConfig) -> int:
    """Run a worker to its end and return the exit code; errors are one line on stderr.

    Exits at once with DEVICE_FAILED when the device fails.
    """
    logs.configure(config.logs, "worker", worker=config.name)
    raise_file_limit()
    state = ProcessState()
    with ExitStack() as stack:
        try:
            stack.enter_context(_health_port(config.health_listen, state))
        except OSError as error:
            return _fail(config, error)
        return uvloop.run(_supervise(config, state))


def _health_port(listen: str | None, state: ProcessState) -> AbstractContextManager[None]:
    if listen is None:
        return nullcontext()
    from web.health_port import health_port  # imported late: the HTTP server takes some 20 MB

    return health_port(listen, state.current)


async def _supervise(config: WorkerConfig, state: ProcessState) -> int:
    async with supervised(config.notify, state.current):
        return await _main(config, state)


async def _main(config: WorkerConfig, state: ProcessState) -> int:
    try:
        if config.join_token_file is not None:
            config = await _enrolled(config)
        worker = Worker(config)
        state.follow(worker.condition)
        await worker.start()
    except MemoryTooLarge as error:
        logs.log_fatal(config.logs, error_line("USAGE", str(error)))
        return ExitCode.USAGE
    except (ValueError, OSError, ServingError) as error:
        return _fail(config, error)
    logs.configure(config.logs, "worker", worker=worker.name)
    if worker.computes_on_cpu:
        await asyncio.to_thread(warn_of_unused_gpus)
    # Repeated collection of these permanent objects would delay steps by tens of milliseconds.
    gc.freeze()
    task = asyncio.create_task(worker.run())
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, _leave, worker, task)
    loop.add_signal_handler(signal.SIGINT, _stop_on, "SIGINT", task)
    print(f"stageline worker {worker.name} listening on {worker.listen_address}", flush=True)
    failure: JoinRefused | None = None
    try:
        await task
    except asyncio.CancelledError:
        pass
    except JoinRefused as error:
        failure = error
    except DeviceError as error:
        _fail(config, error)
        # A hung thread or the device's library could block a normal exit.
        _exit_at_once(ExitCode.DEVICE_FAILED)
    is_stopped = await worker.stop()
    status = ExitCode.DONE if failure is None else _fail(config, failure)
    if not is_stopped:
        # The interpreter must not wait for a large step or tensor that is still in progress.
        _exit_at_once(status)
    return status


def _leave(worker: Worker, task: asyncio.Task[None]) -> None:
    """Drain this worker; a second SIGTERM or the timeout stops it immediately."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, _stop_on, "SIGTERM", task)
    if not worker.ask_to_leave():
        _stop_on("SIGTERM", task)
        return
    log.info("SIGTERM: draining; send SIGTERM again to stop immediately")
    timeout_s = worker.leave_timeout_s
    loop.call_later(timeout_s, _stop_on, f"no leave within {timeout_s:g} s", task)


def _stop_on(name: str, task: asyncio.Task[None]) -> None:
    log.info("%s: stopping", name)
    task.cancel()


def _exit_at_once(status: int) -> NoReturn:
    sys.stdout.flush()
    logging.shutdown()
    os._exit(status)


def _fail(config: WorkerConfig, error: Exception) -> int:
    logs.log_fatal(config.logs, error_line(reason_of(error), str(error)))
    return ExitCode.FAILED
