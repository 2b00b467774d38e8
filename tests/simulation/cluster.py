"""The processes of a simulated cluster: the product's own coordinator and workers, on a simulated network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import coordinator.cluster.controller
import coordinator.server
import gateway.upstream.link
import stage_worker.coordinator_client
import stage_worker.epoch_session
import stage_worker.hop_payloads
import stage_worker.server
import wire.link_probe
from checkpoint import DType
from coordinator import mock_model
from coordinator.config import CoordinatorConfig
from coordinator.engine.engine import Engine
from coordinator.journal.clock import HostClocks
from coordinator.journal.journal import Journal
from coordinator.model import ServedModel
from coordinator.observability.metrics import LoopLag
from coordinator.planner.plan import Plan, WorkerCapacity
from coordinator.recovery.policy import RecoveryPolicy
from coordinator.scheduler.kv_manager import KvCacheManager
from coordinator.server import CoordinatorServer
from kvcache import StatePool
from stage_worker.assignment import Assignment
from stage_worker.backends.contract import DeviceError
from stage_worker.backends.mock_spec import MockSpec
from stage_worker.config import SameHost, WorkerConfig
from stage_worker.executor import StepExecutor
from stage_worker.server import Worker
from telemetry.settings import DISABLED
from tests.simulation.backend import Machine, SimBackend
from tests.simulation.network import Channel, Network, Server, SimTransport
from tests.simulation.observed import ObservedState, observed_apply
from tests.simulation.oracle import Oracle
from tests.simulation.payloads import SimListener, SimSender
from tests.simulation.self_check import SimCheck
from tests.simulation.stage_compute import NUM_LAYERS, VOCAB_SIZE, SimDevice
from tests.simulation.virtual_loop import Process, VirtualLoop
from wire.frames import Frame
from wire.ids import Incarnation, RequestId
from wire.transport import TransportSettings
from wire.unreachable import SILENT

RESTART_S = 0.4
COORDINATOR = "10.0.1.1:7000"
PAYLOAD_RETRY_S = 0.5
GRID_TOKENS = 8
"""Between snapshots of recurrent states, so that short prompts have some."""
POLICY = RecoveryPolicy(heartbeat_interval_s=0.5, lease_s=2.0, epoch_timeout_s=2.0, recovery_timeout_s=20.0)


PlanMaker = Callable[[Sequence[WorkerCapacity]], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a cluster consists of."""

    num_stages: int
    num_workers: int
    num_blocks: int
    block_size: int = 4
    max_step_tokens: int = 12
    num_states: int = 0
    """Recurrent states of every stage; 0 for a model without."""
    is_checked: bool = False
    min_payload_bytes: int = 1
    """Hidden states of this size travel on payload connections."""
    poison: frozenset[RequestId] = frozenset()
    """Requests that crash the worker that computes `poisoned_layer`."""
    poisoned_layer: int = 0
    depth: int = 1
    """Steps that a device takes."""
    journal: Path | None = None
    keep_s: float = 60.0
    """How long a restarted coordinator keeps what the journal has."""


@dataclass(slots=True)
class Host:
    """A machine on which workers of one name run, one after another."""

    name: str
    address: str
    machine: Machine = field(default_factory=Machine)
    process: Process | None = None
    worker: Worker | None = None
    device: SimDevice = field(default_factory=SimDevice)
    """Of the last process."""
    is_bad: bool = False
    """The weights of the last process are wrong."""

    @property
    def is_up(self) -> bool:
        return self.process is not None and not self.process.is_dead


class Cluster:
    """One coordinator and its workers."""

    def __init__(self, shape: Shape, random: Random) -> None:
        self.shape = shape
        self.loop = VirtualLoop()
        self.network = Network(self.loop, random)
        self.oracle = Oracle(self.network)
        self.is_closing = False
        self.hosts = [Host(f"worker-{n}", f"10.0.0.{n + 1}:7000") for n in range(shape.num_workers)]
        self.start_coordinator()
        self.clients = Process("clients", self.network)
        self.others: list[Process] = []

    def start_coordinator(self) -> None:
        """A new process, in the place of one that is dead."""
        self.coordinator_process = Process("coordinator", self.network)
        self.coordinator_process.context.run(self._start_coordinator)

    def kill_coordinator(self) -> None:
        """Its cleanup must not reach the journal, which the next one opens."""
        durability = self.coordinator.engine.durability
        journal = durability.journal
        durability.journal = durability._writer = None
        if journal is not None:
            journal.close()
        self.coordinator_process.die()
        self.network.forget(self.coordinator_process)
        self.others.append(self.coordinator_process)

    def start_worker(self, host: Host) -> None:
        """A new process, unless one is up."""
        if host.is_up or self.is_closing:
            return
        process = host.process = Process(host.name, self.network)
        host.is_bad = host.machine.is_bad
        host.device = SimDevice(self.shape.depth)
        process.spawn(self._run_worker(host, process))

    def kill_worker(self, host: Host) -> None:
        assert host.process is not None
        host.process.die()
        self.network.forget(host.process)

    def close(self) -> None:
        """Ends everything, and waits for what that takes."""
        self.is_closing = True
        for process in self._processes:
            if not process.is_dead:
                process.die()
        self.loop.most_callbacks += 100_000
        try:
            self.loop.run_until(self.loop.time() + 60)
        finally:
            for process in self._processes:
                process.drop_unfinished()

    @property
    def _processes(self) -> list[Process]:
        hosts = (host.process for host in self.hosts)
        return [
            process
            for process in (self.clients, self.coordinator_process, *self.others, *hosts)
            if process is not None
        ]

    def executors(self) -> list[StepExecutor]:
        """Those of the present plan, in stage order."""
        hosts = {host.name: host for host in self.hosts}
        loaded = []
        for record in self.coordinator.controller.state.stage_workers:
            worker = hosts[record.identity.name].worker
            if worker is not None and worker._stage._loaded is not None:
                loaded.append(worker._stage._loaded.executor)
        return loaded

    def client_channel(self) -> Any:
        """To be opened by a process."""
        return Channel(self.network, COORDINATOR)

    def _start_coordinator(self) -> None:
        shape = self.shape
        config = CoordinatorConfig(
            model=None,
            listen=COORDINATOR,
            transport=TransportSettings(insecure=True),
            num_stages=shape.num_stages,
            layers=None,
            orders_by_links=False,  # the links of a run are alike
            dtype="f32",
            block_size=shape.block_size,
            max_step_tokens=shape.max_step_tokens,
            max_step_sequences=4,
            max_sequence_tokens=None,
            max_kv_tokens=shape.num_blocks * shape.block_size,
            queue_size=64,
            mock_model=f"layers={NUM_LAYERS},hidden=1,ffn=1,heads=1,kv_heads=1,head_dim=1,"
            f"vocab={VOCAB_SIZE},max_len=96",
            http=None,
            telemetry=DISABLED,
            journal=shape.journal,
            reattach_timeout_s=shape.keep_s,
        )
        assert config.mock_model is not None
        model_config = mock_model.parse_mock_model(config.mock_model)
        model = ServedModel(
            name="mock",
            config=model_config,
            fingerprint=mock_model.mock_fingerprint(model_config),
            dtype=DType.F32,
        )
        self.coordinator = CoordinatorServer(config, model, POLICY)
        untyped: Any = self.coordinator.controller
        if shape.num_states:
            choice = untyped.state._choice
            choice._make_plan = _with_states(choice._make_plan, shape.num_states)
        if shape.is_checked:
            untyped.checks = untyped._new_checks(SimCheck(self._is_bad))
            untyped.state._needs_check = True
        self.oracle.watch(self.coordinator, self._is_known_as_bad if shape.is_checked else lambda name: False)
        self.loop.create_task(self.coordinator.start())

    def _is_bad(self, name: str) -> bool:
        return next(host.is_bad for host in self.hosts if host.name == name)

    def _is_known_as_bad(self, name: str) -> bool:
        """The coordinator counts results of the last process, not of the one that was killed before it."""
        record = self.coordinator.controller.state.workers.get(name)
        worker = next(host.worker for host in self.hosts if host.name == name)
        if record is None or worker is None:
            return False
        return record.identity.incarnation == worker._stage._incarnation and self._is_bad(name)

    def _kills(self, host: Host, assignment: Assignment, frame: Frame) -> bool:
        """Restart the process."""
        keys = {part.sequence.request_id for part in frame.step.slices}
        is_here = assignment.layer_begin <= self.shape.poisoned_layer < assignment.layer_end
        if not is_here or not keys & self.shape.poison:
            return False
        self.loop.call_soon(self.kill_worker, host)
        self.loop.call_later(RESTART_S, self.start_worker, host)
        return True

    async def _run_worker(self, host: Host, process: Process) -> None:
        config = WorkerConfig(
            coordinator=COORDINATOR,
            device="cpu",
            memory_bytes=None,
            name=host.name,
            listen=host.address,
            advertise=host.address,
            model_directory=None,
            num_threads=None,
            mock=MockSpec(),
            min_payload_bytes=self.shape.min_payload_bytes,
            same_host=SameHost.OFF,
            telemetry=DISABLED,
            transport=TransportSettings(insecure=True),
        )
        backend = SimBackend(
            host.machine,
            lambda epoch: self.oracle.epoch_begins(host.name, epoch),
            lambda assignment, frame: self._kills(host, assignment, frame),
            host.device,
        )
        with patch.object(stage_worker.server, "_new_backend", lambda *_: backend):
            worker = host.worker = Worker(config)
        try:
            await worker.start()
            await worker.run()
        except DeviceError:
            self.loop.call_later(RESTART_S, self.start_worker, host)
        finally:
            await worker.stop()
        if host.process is process:
            self.loop.call_soon(self.kill_worker, host)  # it was let go


def _with_states(make_plan: PlanMaker, num_states: int) -> PlanMaker:
    """Plans of a model with recurrent states, so few that sequences wait for them."""
    return lambda workers: replace(make_plan(workers), num_states=num_states)


@contextmanager
def simulated(cluster_random: Random) -> Iterator[None]:
    """The product without gRPC, and with ids from a seed, while this lasts."""

    secrets = Random(0)

    def now_s() -> float:
        return Process.current().loop.time()

    def new_incarnation() -> Incarnation:
        return Incarnation(cluster_random.randbytes(16))

    async def no_tokenizer(*_: object, **__: object) -> None:
        pass

    async def report_health(worker: Worker, status: object) -> None:
        pass

    async def no_cause(address: str, transport: object) -> str:
        return SILENT

    clocks = HostClocks(boot_id=lambda: "simulation", uptime_s=now_s, wall_s=now_s)
    patches: list[tuple[Any, str, Any]] = []
    for module in (coordinator.server, stage_worker.server):
        patches += [(module, "new_server", Server), (module, "open_transport", lambda *_: SimTransport())]
    patches += [(wire.link_probe, "time", SimpleNamespace(monotonic=now_s))]
    for module in (coordinator.server, stage_worker.stage_manager):
        patches += [(module, "new_incarnation", new_incarnation)]
    patches += [
        (coordinator.server, "new_secret", lambda: secrets.randbytes(32)),
        (stage_worker.server, "PayloadListener", SimListener),
        (stage_worker.hop_payloads, "PayloadSender", SimSender),
        (stage_worker.hop_payloads, "PAYLOAD_RETRY_S", PAYLOAD_RETRY_S),
        (coordinator.server, "ClusterState", ObservedState),
        (coordinator.cluster.controller, "KvCacheManager", partial(KvCacheManager, grid_tokens=GRID_TOKENS)),
        (StatePool, "apply", observed_apply),
        (coordinator.server, "Engine", partial(Engine, clock=now_s)),
        (coordinator.server, "Journal", partial(Journal, host=clocks)),
        (gateway.upstream.link, "fetch_tokenizer", no_tokenizer),
        (stage_worker.server, "resident_bytes", lambda: 1),
        (stage_worker.coordinator_client, "unreachable_cause", no_cause),
        (Worker, "_report_health", report_health),
        (stage_worker.epoch_session, "time", _VirtualTime),
        (LoopLag, "start", lambda lag: None),  # events of no interest: the virtual loop is never late
    ]
    saved = [(where, name, getattr(where, name)) for where, name, _ in patches]
    for where, name, value in patches:
        setattr(where, name, value)
    try:
        yield
    finally:
        for where, name, value in saved:
            setattr(where, name, value)


class _VirtualTime:
    """The part of `time` that the session reads."""

    @staticmethod
    def monotonic() -> float:
        return asyncio.get_running_loop().time()
