"""A whole cluster in this process: a coordinator and workers, each with a real server on port 0."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from certificates.identity import Role
from checkpoint.implementation import AUTO
from coordinator.config import CoordinatorConfig
from coordinator.model import ServedModel, open_model
from coordinator.recovery.policy import RecoveryPolicy
from coordinator.server import CoordinatorServer
from stage_worker.backends.mock_spec import MockSpec
from stage_worker.config import SameHost, WorkerConfig
from stage_worker.server import Worker
from stageline.client.client import Client
from stageline.client.errors import StagelineError
from stageline.client.output import FinishReason, Usage
from stageline_rpc.v1 import cluster_pb2
from telemetry.logs import LogSettings
from telemetry.settings import NO_SETTINGS, TelemetrySettings
from tests.integration.stream_proxy import CoordinatorProxy, HopProxy
from tests.issued import Certificates
from weights.location import ModelLocation
from wire.ids import RequestId, id_text, new_request_id
from wire.tensors import HopRoute, WireDType
from wire.transport import PLAIN_SETTINGS, TransportSettings

DEADLINE_S = 120.0
"""Limit of every wait; only a defect takes this long."""

TOKEN = "token-of-the-operators-of-tests"

TEST_POLICY = RecoveryPolicy(
    heartbeat_interval_s=0.1,
    lease_s=60.0,
    epoch_timeout_s=60.0,
    recovery_timeout_s=60.0,
    # Many tests hold frames back, possibly on slow machines, and need no step to be overdue.
    min_step_timeout_s=60.0,
)


@dataclass(frozen=True, kw_only=True)
class RequestCase:
    """One request: sampled with a seed, greedy without."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None = None
    request_id: RequestId = field(default_factory=new_request_id)

    def again(self) -> "RequestCase":
        """Copy the request with a new id."""
        return replace(self, request_id=new_request_id())


@dataclass(eq=False)
class Answer:
    """Output of a request so far; `ended_s` is on the event loop's clock."""

    case: RequestCase
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: StagelineError | None = None
    ended_s: float = 0.0

    @property
    def succeeded(self) -> bool:
        return self.finish_reason is not None and self.error is None


class RunningWorker:
    """A worker with its task and its proxy, if any."""

    def __init__(self, worker: Worker, proxy: HopProxy | None) -> None:
        self.worker = worker
        self.proxy = proxy
        self.task = asyncio.create_task(worker.run(), name=f"worker-{worker.name}")
        self._is_stopped = False

    @property
    def name(self) -> str:
        return self.worker.name

    async def stop(self) -> None:
        """Stop like a crash: streams break without a leave."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.worker.stop()
        if self.proxy is not None:
            await self.proxy.stop()


class Cluster:
    """`async with Cluster(model, layers=(1, 1, 1)) as cluster:` serves when the block begins.

    Workers are named w0, w1, ...; the plan puts them in this order. `hop_proxies` are stages that receive
    frames through a HopProxy. With `waits=False` the block begins at once, with only `num_workers` workers
    started. With `mock` the stages are mock ones, and `mock_model` may be served. Texts are served with
    `has_text`; `client_key` and what follows it are the coordinator's own settings, at their defaults. With
    `certificates`, every connection has TLS, and `client` is an operator. `worker_wire_dtypes` are those of
    workers, by name, that override `wire_dtype`. By default the built-in model is checked before it serves,
    and checkpoints are not: a reference takes a while. `weights_directory` has the workers' caches of remote
    weights, by their names. Hidden states travel in frames and on payload connections, as between hosts,
    unless `same_host` is AUTO, or `hidden_states` is GRPC.
    """

    def __init__(
        self,
        model: ModelLocation | None,
        *,
        layers: tuple[int, ...],
        num_workers: int | None = None,
        hop_proxies: Sequence[int] = (),
        is_coordinator_proxied: bool = False,
        block_size: int = 8,
        max_step_tokens: int = 32,
        max_step_sequences: int = 16,
        max_kv_tokens: int = 1024,
        queue_size: int = 256,
        worker_memory_bytes: int = 64 * 1024 * 1024,
        policy: RecoveryPolicy = TEST_POLICY,
        waits: bool = True,
        has_text: bool = False,
        prefix_cache: bool = True,
        client_key: str | None = None,
        max_client_requests: int | None = None,
        max_unread_tokens: int = 4096,
        priority_age_s: float = 10.0,
        mock: MockSpec | None = None,
        mock_model: str | None = None,
        dtype: str = "f32",
        wire_dtype: str | None = None,
        implementation: str = AUTO,
        quantize: str | None = None,
        kv_dtype: str | None = None,
        max_sequence_tokens: int | None = None,
        worker_wire_dtypes: Mapping[str, WireDType] | None = None,
        self_check: bool | None = None,
        self_check_interval_s: float = 600.0,
        cache_directory: Path | None = None,
        journal: Path | None = None,
        http: str | None = None,
        reflection: bool = True,
        token: str = TOKEN,
        trace_sample: float | None = None,
        telemetry: TelemetrySettings = NO_SETTINGS,
        certificates: Certificates | None = None,
        public_prefixes: tuple[Path, ...] | None = None,
        audit_log: Path | None = None,
        enrolment: Path | None = None,
        keys_file: Path | None = None,
        weights_directory: Path | None = None,
        weights_limit_bytes: int | None = None,
        weights_listen: str | None = None,
        weights_peers: tuple[str, ...] = (),
        warm_spare_bytes: int | None = None,
        same_host: SameHost = SameHost.OFF,
        hidden_states: HopRoute = HopRoute.AUTO,
    ) -> None:
        self._warm_spare_bytes, self._same_host = warm_spare_bytes, same_host
        self._weights_directory, self._weights_limit_bytes = weights_directory, weights_limit_bytes
        self._certificates = certificates
        self.num_stages = len(layers)
        self._mock = mock
        self._worker_wire_dtypes = worker_wire_dtypes or {}
        self._num_workers = len(layers) if num_workers is None else num_workers
        self._hop_proxies = hop_proxies
        self._worker_memory_bytes = worker_memory_bytes
        self._config = CoordinatorConfig(
            model=model,
            listen="127.0.0.1:0",
            num_stages=len(layers),
            layers=layers,
            dtype=None if mock_model else dtype,
            wire_dtype=wire_dtype,
            implementation=implementation,
            quantize=quantize,
            kv_dtype=kv_dtype,
            max_sequence_tokens=max_sequence_tokens,
            mock_model=mock_model,
            block_size=block_size,
            max_step_tokens=max_step_tokens,
            max_step_sequences=max_step_sequences,
            max_kv_tokens=max_kv_tokens,
            queue_size=queue_size,
            prefix_cache=prefix_cache,
            client_key=client_key,
            max_client_requests=max_client_requests,
            max_unread_tokens=max_unread_tokens,
            priority_age_s=priority_age_s,
            self_check_interval_s=self_check_interval_s,
            cache_directory=cache_directory,
            self_check=model is None and mock_model is None if self_check is None else self_check,
            journal=journal,
            http=http,
            reflection=reflection,
            token=token,
            trace_sample=trace_sample,
            telemetry=telemetry,
            public_prefixes=public_prefixes,
            transport=self._transport("coordinator", Role.COORDINATOR),
            logs=LogSettings(audit_log=audit_log),
            keys_file=keys_file,
            weights_listen=weights_listen,
            weights_peers=weights_peers,
            enroll_listen=None if enrolment is None else "127.0.0.1:0",
            authority=enrolment,
            join_tokens=None if enrolment is None else enrolment / "tokens.json",
            hidden_states=hidden_states,
        )
        self.server = CoordinatorServer(self._config, _model_of(self._config, has_text=has_text), policy)
        self.coordinator_proxy = CoordinatorProxy() if is_coordinator_proxied else None
        self.workers: dict[str, RunningWorker] = {}
        self._retired: list[RunningWorker] = []
        self._waits = waits

    async def __aenter__(self) -> Self:
        await self.server.start()
        self.client = Client(
            self.server.address, tls_dir=self._transport("operator", Role.OPERATOR).tls_directory
        )
        await self.client.__aenter__()
        try:
            await self._start_workers()
        except BaseException:
            await self._stop()
            raise
        return self

    def _transport(self, name: str, role: Role) -> TransportSettings:
        if self._certificates is None:
            return PLAIN_SETTINGS
        return TransportSettings(
            tls_directory=self._certificates.of(name, role), deny_list=self._certificates.deny_list
        )

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stop()

    @property
    def address(self) -> str:
        """Address of the coordinator for clients."""
        return self.server.address

    @property
    def epoch(self) -> int:
        return self.server.controller.state.epoch

    def proxy(self, stage: int) -> HopProxy:
        """Proxy of the hop into `stage`."""
        proxy = self.workers[f"w{stage}"].proxy
        assert proxy is not None, f"stage {stage} has no proxy"
        return proxy

    def incarnations(self) -> dict[str, bytes]:
        """Incarnations of the workers known to the coordinator."""
        records = self.server.controller.state.workers
        return {record.identity.name: record.identity.incarnation for record in records}

    async def start_worker(
        self,
        name: str,
        *,
        is_proxied: bool = False,
        model_directory: Path | None = None,
        memory_bytes: int | None = None,
    ) -> RunningWorker:
        """Start a worker; an earlier one with the same name must have been stopped."""
        proxy = HopProxy() if is_proxied else None
        if proxy is not None:
            await proxy.start()
        config = self.worker_config(name, proxy, model_directory=model_directory)
        worker = Worker(config if memory_bytes is None else replace(config, memory_bytes=memory_bytes))
        await worker.start()
        if proxy is not None:
            proxy.target = worker.listen_address
        if name in self.workers:
            self._retired.append(self.workers[name])
        self.workers[name] = RunningWorker(worker, proxy)
        return self.workers[name]

    def worker_config(
        self, name: str, proxy: HopProxy | None = None, *, model_directory: Path | None = None
    ) -> WorkerConfig:
        """Configuration of a worker of this cluster."""
        return WorkerConfig(
            coordinator=self.coordinator_proxy.address if self.coordinator_proxy else self.address,
            device="cpu",
            memory_bytes=self._worker_memory_bytes,
            name=name,
            listen="127.0.0.1:0",
            advertise=None if proxy is None else proxy.address,
            model_directory=model_directory,
            weights_directory=None if self._weights_directory is None else self._weights_directory / name,
            weights_limit_bytes=self._weights_limit_bytes,
            warm_spare_bytes=self._warm_spare_bytes,
            num_threads=None if self._mock else 1,
            mock=self._mock,
            wire_dtype=self._worker_wire_dtypes.get(name),
            same_host=self._same_host,
            reflection=self._config.reflection,
            telemetry=self._config.telemetry,
            transport=self._transport(name, Role.WORKER),
        )

    async def generate(self, case: RequestCase, into: Answer | None = None) -> Answer:
        """Generate to the end or an error. `into` is filled meanwhile."""
        answer = into or Answer(case)
        try:
            async for output in self.client.generate(
                list(case.prompt),
                max_tokens=case.max_tokens,
                temperature=0.0 if case.seed is None else 1.0,
                seed=case.seed,
                ignore_eos=True,  # configs of some families need an end token
                request_id=id_text(case.request_id),
                timeout_s=DEADLINE_S,
            ):
                assert output.first_token_index == len(answer.tokens), "a token is repeated or missing"
                answer.tokens += output.token_ids
                answer.finish_reason, answer.usage = output.finish_reason, output.usage
        except StagelineError as error:
            answer.error = error
        answer.ended_s = asyncio.get_running_loop().time()
        return answer

    @asynccontextmanager
    async def generating(self, cases: Sequence[RequestCase]) -> AsyncIterator[list[Answer]]:
        """Generate concurrently; the answers grow inside the block and are complete after it."""
        answers = [Answer(case) for case in cases]
        async with asyncio.TaskGroup() as tasks:
            for answer in answers:
                tasks.create_task(self.generate(answer.case, answer))
            yield answers

    async def generate_all(self, cases: Sequence[RequestCase]) -> list[Answer]:
        """Generate concurrently, each to its end."""
        async with self.generating(cases) as answers:
            pass
        return answers

    async def wait_state(self, state: cluster_pb2.ClusterState.ValueType) -> cluster_pb2.GetStatusResponse:
        """Wait until the cluster is in `state`; return that status."""
        return await self.wait_status(lambda status: status.state == state)

    async def wait_status(
        self, holds: Callable[[cluster_pb2.GetStatusResponse], bool]
    ) -> cluster_pb2.GetStatusResponse:
        """Poll the status until `holds`; return it."""
        async with asyncio.timeout(DEADLINE_S):
            while not holds(status := await self.client.status()):
                await asyncio.sleep(0.01)
        return status

    async def wait_drained(self) -> cluster_pb2.GetStatusResponse:
        """Wait until no request is live, no step in flight and every stage has sent a heartbeat since.

        Fails if a stage still holds active blocks.
        """
        await self.wait_status(_is_idle)
        idle_since = asyncio.get_running_loop().time()

        def is_fresh(status: cluster_pb2.GetStatusResponse) -> bool:
            # Measured before the response; a heartbeat may be older than its age, never younger.
            silence_ms = (asyncio.get_running_loop().time() - idle_since) * 1000
            stages = [worker for worker in status.workers if worker.HasField("stage")]
            return _is_idle(status) and all(
                worker.heartbeat_age.ToMilliseconds() + 50 < silence_ms for worker in stages
            )

        status = await self.wait_status(is_fresh)
        active = {worker.name: worker.kv.blocks_active for worker in status.workers}
        assert not any(active.values()), f"blocks are still active: {active}"
        kv = self.server.engine.scheduler.kv
        if kv is not None:
            kv.check_integrity([])
        return status

    async def _start_workers(self) -> None:
        if self.coordinator_proxy is not None:
            await self.coordinator_proxy.start()
            self.coordinator_proxy.target = self.address
        for index in range(self._num_workers):
            await self.start_worker(f"w{index}", is_proxied=index in self._hop_proxies)
        if self._waits:
            await self.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)

    async def _stop(self) -> None:
        for running in (*self.workers.values(), *self._retired):
            await running.stop()
        if self.coordinator_proxy is not None:
            await self.coordinator_proxy.stop()
        await self.client.__aexit__(None, None, None)
        await self.server.stop()


def _model_of(config: CoordinatorConfig, *, has_text: bool) -> ServedModel:
    """Open the model as the coordinator does, with the slow tokenizer only if `has_text`."""
    model = open_model(config)
    if has_text:
        model.load_text()
    return model


def _is_idle(status: cluster_pb2.GetStatusResponse) -> bool:
    requests = status.requests
    return not (requests.waiting or requests.prefill or requests.decode or requests.steps_in_flight)
