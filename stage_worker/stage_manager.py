"""The worker's side of a plan: loaded stage and current epoch."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from certificates.identity import Identity
from stage_worker.assignment import (
    Assignment,
    ReferenceAccess,
    decode_assignment,
    decode_prefetch,
    decode_request,
    wants,
)
from stage_worker.backends.backend import (
    LoadedStage,
    LoadProgress,
    OtherCheckpoint,
    StageBackend,
    StageLoadError,
    TemporaryLoadError,
)
from stage_worker.backends.contract import EagerReason, GraphCounts, StepObserver
from stage_worker.epoch_session import EpochSession
from stage_worker.handshake import Epoch, decode_epoch, epoch_problem, hop_hello
from stage_worker.hop_payloads import PayloadConnections
from stage_worker.links import LinkMeasurement
from stage_worker.loading.weights_check import Repair, WeightsVerifier
from stage_worker.next_stage_stream import NextStageStream, stream_to_coordinator, stream_to_stage
from stage_worker.policy import WORKER_POLICY
from stage_worker.weights_port import WeightsPort
from stage_worker.weights_prefetch import Reply, WeightsPrefetch
from stageline_rpc.internal.v1 import forward_pb2, join_pb2
from stageline_rpc.v1 import cluster_pb2
from wire.channels import check_protocol_version
from wire.clock import ClusterClock
from wire.errors import InvalidRequest, Overloaded, StaleStream, StepFaultKind
from wire.foreign_text import printable_line
from wire.ids import Incarnation, new_incarnation
from wire.log_context import log_context
from wire.payload_memory import memory_domain
from wire.payload_sockets import PayloadListener
from wire.peer_secrets import HopSecrets, RefusedPeers
from wire.reference import Reference
from wire.stage_calls import HELLO_RETRY_S
from wire.status_codec import encode_integrity
from wire.step_codec import encode_fault
from wire.steps import FaultReport
from wire.tensors import WIRE_DTYPE_TO_MESSAGE, WireDType
from wire.transport import PLAIN, Transport

log = logging.getLogger(__name__)

_EAGER_REASONS = {
    reason: cluster_pb2.EagerReason.Value(f"EAGER_REASON_{reason.name}") for reason in EagerReason
}
MAX_PER_HOST = 4
"""The previous stage has one stream per epoch; streams of recently failed epochs may still be waiting."""
MAX_WAITING = 16
"""Only one of them can be the previous stage. Each holds a connection for up to `epoch_wait_s`."""


class EarlyStreams:
    """Limits streams that wait for their epoch. A rejected previous stage retries."""

    def __init__(self, refused: RefusedPeers) -> None:
        self._refused = refused
        self._num_waiting = Counter[str]()

    @contextmanager
    def waiting(self, host: str) -> Iterator[None]:
        """Hold one of `host`'s places while the block runs. Raises Overloaded when all are taken."""
        self._check(host)
        self._num_waiting[host] += 1
        try:
            yield
        finally:
            self._num_waiting[host] -= 1
            if not self._num_waiting[host]:
                del self._num_waiting[host]

    def _check(self, host: str) -> None:
        if self._num_waiting[host] >= MAX_PER_HOST:
            whose, limit = "streams of this host", MAX_PER_HOST
        elif self._num_waiting.total() >= MAX_WAITING:
            whose, limit = "streams", MAX_WAITING
        else:
            return
        problem = f"{limit} {whose} wait for epochs that have not begun on this stage, the limit is {limit}"
        self._refused.note("a stream", problem, host=host)
        raise Overloaded(f"{problem}: retry when the epoch has begun", retry_after_s=HELLO_RETRY_S)


Order = (
    join_pb2.AssignStage
    | join_pb2.BeginEpoch
    | join_pb2.EndEpoch
    | join_pb2.Serving
    | join_pb2.VerifyWeights
    | join_pb2.ReportStates
    | join_pb2.PrefetchWeights
    | join_pb2.MeasureLinks
)


@dataclass(frozen=True, slots=True)
class _Connected:
    """The worker joined a coordinator that serves the model with this fingerprint."""

    fingerprint: str


@dataclass(frozen=True, slots=True)
class _Disconnected:
    """The coordinator connection broke; the next connection begins a new epoch."""


class StageManager:
    """Owner of the loaded stage and of the epoch's session.

    One task executes orders sequentially and replies on the connection that gave the order. Reports of
    weights that differ go to the current connection, and again to each later one. An order cancels the
    work of the previous order, except a load, which runs to its end.
    """

    def __init__(
        self,
        *,
        coordinator: str,
        backend: StageBackend,
        on_serving: Callable[[bool], None],
        wire_dtype: WireDType | None = None,
        clock: ClusterClock | None = None,
        observers: Sequence[StepObserver] = (),
        weights: WeightsVerifier | None = None,
        weights_port: WeightsPort | None = None,
        payloads: PayloadConnections | None = None,
        transport: Transport = PLAIN,
        refused: RefusedPeers | None = None,
    ) -> None:
        """`coordinator` is the address of `Join` and of LAST's results, as this worker reaches it.

        `on_serving` is called when the coordinator starts or stops serving with this stage. `wire_dtype`
        overrides the coordinator's dtype for hidden states sent by this stage.
        """
        refused = refused or RefusedPeers(time.monotonic)
        self._transport, self._links = transport, LinkMeasurement(transport)
        self._payloads = payloads or PayloadConnections(PayloadListener(refused))
        self._reference_access = ReferenceAccess(refused)
        self._secrets = HopSecrets(refused)
        self._early_streams = EarlyStreams(refused)
        self._coordinator, self._incarnation = coordinator, new_incarnation()
        self._backend = backend
        self._on_serving, self._wire_dtype = on_serving, wire_dtype
        self._clock, self._observers = clock or ClusterClock(), observers
        self._weights, self._weights_port = weights or WeightsVerifier(), weights_port
        self._prefetch = WeightsPrefetch(self._describe_weights)
        self._orders: asyncio.Queue[tuple[Order | _Connected | _Disconnected, Reply]] = asyncio.Queue()
        self._reply: Reply = _drop
        self._rejoin: Callable[[], None] = _stay
        self._loaded: LoadedStage | None = None
        self._loading: Assignment | None = None
        self._load_progress = LoadProgress()
        self._session: EpochSession | None = None
        self._last_epoch, self._epoch_began = 0, asyncio.Event()

    def renew(self) -> Incarnation:
        """Create the incarnation for epochs that begin from now on."""
        self._incarnation = new_incarnation()
        return self._incarnation

    @property
    def last_epoch(self) -> int:
        """Highest epoch that this process took part in."""
        return self._last_epoch

    @property
    def loaded(self) -> LoadedStage | None:
        """The warm stage in memory (read-only), None without one."""
        return self._loaded

    @property
    def is_idle(self) -> bool:
        """An epoch is serving and no frame is queued or being computed."""
        return self._session is not None and self._session.is_idle

    @property
    def memory_domain(self) -> str:
        """The same for workers that share memory with this one; empty if it shares none."""
        return memory_domain() if self._payloads.shares_memory else ""

    @property
    def payload_fallback(self) -> str:
        """Why large hidden states to or from this stage travel over gRPC in this epoch; empty otherwise."""
        return "" if self._session is None else self._session.payload_fallback

    @property
    def is_loading(self) -> bool:
        return self._loading is not None

    def device_failed(self, reason: str) -> None:
        """Report the device failure, unless a failed step already did."""
        if self._session is not None:
            self._session.fail_device(reason)

    def submit(self, order: Order, reply: Reply) -> None:
        """Queue `order`; a new assignment cancels the current load."""
        if isinstance(order, join_pb2.AssignStage):
            self._cancel_load(unless_for=order)
            self._prefetch.cancel()
        self._orders.put_nowait((order, reply))

    def connected(self, reply: Reply, welcome: join_pb2.Welcome, *, rejoin: Callable[[], None]) -> None:
        """Record that the worker joined a coordinator; `reply` sends to it, `rejoin` joins it again."""
        self._reference_access.grant(welcome)
        self._reply, self._rejoin = reply, rejoin
        self._orders.put_nowait((_Connected(welcome.model.fingerprint), reply))

    def disconnected(self) -> None:
        """End the epoch; the loaded stage stays."""
        self._reply, self._rejoin = _drop, _stay
        self._orders.put_nowait((_Disconnected(), _drop))

    async def run(self) -> None:
        """Execute orders until cancelled, then end the epoch and cancel the load."""
        try:
            while True:
                order, reply = await self._orders.get()
                await self._execute(order, reply)
        finally:
            self._cancel_load()
            self._prefetch.cancel()
            self._links.cancel()
            self._weights.close()
            await self._end_session()

    async def accept(
        self, hello: forward_pb2.HopHello, *, host: str, caller: Identity | None = None
    ) -> EpochSession:
        """The session for a peer's stream, once its epoch has begun. Raises ServingError without a change."""
        if hello.epoch > self._last_epoch:
            with self._early_streams.waiting(host):
                await self._wait_begun(hello.epoch)
        self._secrets.check(hello.secret, host=host, caller=caller)
        check_protocol_version(hello.protocol_version)
        if self._session is None:
            raise StaleStream(f"stream of epoch {hello.epoch}, which has ended")
        self._session.accept(hello)
        return self._session

    async def _wait_begun(self, epoch: int) -> None:
        """Wait for the epoch, which the previous stage may learn of first. Raises StaleStream."""
        try:
            async with asyncio.timeout(WORKER_POLICY.epoch_wait_s):
                while epoch > self._last_epoch:
                    await self._epoch_began.wait()
        except TimeoutError:
            raise StaleStream(
                f"epoch {epoch} has not begun on this stage within {WORKER_POLICY.epoch_wait_s:g} s"
            ) from None

    async def reference(self, request: forward_pb2.ComputeReferenceRequest, *, host: str) -> Reference:
        """Compute a reference from this worker's checkpoint, for a caller on `host`. Raises ServingError."""
        access = self._reference_access
        directory = access.check(request.secret, fingerprint=request.fingerprint, host=host)
        if self._loading is not None:
            raise Overloaded("the worker is loading a stage")
        loaded = self._loaded
        held_bytes = 0 if loaded is None else loaded.weight_bytes + loaded.kv_bytes
        if (references := self._backend.references) is None:
            raise InvalidRequest("a mock stage has no weights to compute a reference from")
        return await references.reference(decode_request(request, directory), held_bytes=held_bytes)

    def heartbeat(self) -> join_pb2.Heartbeat:
        """Return the current state; the caller fills in `resident_bytes`."""
        session, loaded = self._session, self._loaded
        heartbeat = join_pb2.Heartbeat(epoch=session.epoch.number if session else 0)
        progress = self._prefetch.progress or self._load_progress
        _describe_fetch(progress, heartbeat, is_prefetch=progress is self._prefetch.progress)
        if loaded is None:
            heartbeat.load_progress = self._load_progress.fraction
            heartbeat.load_problem = printable_line(self._load_progress.problem)
            return heartbeat
        stats = loaded.executor.stats
        heartbeat.weights = self._weights.level
        heartbeat.num_steps = stats.num_steps
        heartbeat.weight_bytes = loaded.weight_bytes
        heartbeat.kv_bytes = loaded.kv_bytes
        heartbeat.kv.blocks_active = stats.blocks_active
        heartbeat.kv.blocks_inactive = stats.blocks_inactive
        heartbeat.kv.blocks_free = stats.blocks_free
        heartbeat.kv.blocks_wanted = stats.blocks_wanted
        heartbeat.kv.blocks_hit = stats.blocks_hit
        heartbeat.kv.states_live = stats.states_live
        heartbeat.kv.states_saved = stats.states_saved
        heartbeat.kv.states_free = stats.states_free
        heartbeat.kv_integrity.CopyFrom(encode_integrity(stats.integrity))
        heartbeat.busy_us = round(stats.busy_s * 1e6)
        heartbeat.load_progress = 1.0
        heartbeat.payload_fallback = self.payload_fallback
        if stats.graphs is not None:
            heartbeat.cuda_graphs.CopyFrom(_encode_graphs(stats.graphs))
        if (session := self._session) is not None:
            heartbeat.hop_transport = session.hop_transport
            heartbeat.same_host_fallback = session.same_host_fallback
        return heartbeat

    async def _execute(self, order: Order | _Connected | _Disconnected, reply: Reply) -> None:
        match order:
            case join_pb2.AssignStage():
                reply(await self._assign(order))
                await self._describe_weights(reply)
            case join_pb2.BeginEpoch():
                await self._begin_epoch(decode_epoch(order), reply)
            case join_pb2.EndEpoch():
                if self._session_of(order.epoch) is not None:
                    await self._end_session()
            case join_pb2.Serving():
                if (session := self._session_of(order.epoch)) is not None:
                    self._on_serving(order.is_serving and session.is_serving)
            case join_pb2.VerifyWeights():
                self._verify_weights(order)
            case join_pb2.ReportStates():
                reply(await self._check_states(order.epoch))
            case join_pb2.MeasureLinks():
                self._links.start(order, reply)
            case join_pb2.PrefetchWeights():
                if self._loading is None:
                    await self._begin_prefetch(order, reply)
            case _Connected(fingerprint):
                await self._describe_weights(reply)
                finding = await self._weights.finding(fingerprint=fingerprint)
                if finding is not None:
                    reply(finding)
            case _Disconnected():
                await self._end_session()

    async def _begin_prefetch(self, message: join_pb2.PrefetchWeights, reply: Reply) -> None:
        if (weights := self._backend.weights) is None:
            log.warning("weights are not prefetched: a mock stage has none")
            return
        order = decode_prefetch(message, coordinator=self._coordinator)
        if (spare := weights.warm_spare) is not None:
            if order is not None:
                await self._end_former_stage()
            elif self._loaded is None:
                self._prefetch.end()
                await spare.drop_warm()
        self._prefetch.start(order, weights, reply)

    async def _end_former_stage(self) -> None:
        """Free the memory of a stage that the present plan does not have."""
        await self._end_session()
        if self._loaded is not None:
            log.info("ended the former stage: its memory is for layers that may be needed")
            self._loaded = None
            self._weights.begin_stage(None)

    def _session_of(self, epoch: int) -> EpochSession | None:
        session = self._session
        return session if session is not None and session.epoch.number == epoch else None

    def _verify_weights(self, order: join_pb2.VerifyWeights) -> None:
        def reply(message: join_pb2.JoinRequest) -> None:
            self._reply(message)

        if (weights := self._backend.weights) is None:
            return  # a mock has nothing to compare
        if not order.plan_id:
            directory = weights.checkpoint_directory(self._reference_access.directory)
            self._weights.verify_checkpoint(order, directory, reply=reply)
        elif (loaded := self._loaded) is not None and loaded.assignment.plan_id == order.plan_id:
            repair = Repair(weights.refetch, lambda: self._rejoin())
            self._weights.verify(order, activity=self._activity, reply=reply, repair=repair)

    async def _check_states(self, epoch: int) -> join_pb2.JoinRequest:
        """Return the hidden states handed on in this epoch, empty if it is over."""
        states = b""
        session, references = self._session_of(epoch), self._backend.references
        if session is not None and references is not None:
            states = await references.project(session.handed_on)
        return join_pb2.JoinRequest(check_states=join_pb2.CheckStates(epoch=epoch, states=states))

    async def _assign(self, message: join_pb2.AssignStage) -> join_pb2.JoinRequest:
        """Load the assigned stage, or keep it if it is already loaded."""
        try:
            assignment = decode_assignment(
                message, wire_dtype=self._wire_dtype, coordinator=self._coordinator
            )
            if self._weights.must_reload:
                assignment = replace(assignment, force_reload=True)
            if not assignment.force_reload and await self._holds(assignment):
                assert self._loaded is not None
                self._loaded = self._loaded.placed(assignment)
            else:
                await self._load(assignment)
        except (ValueError, StageLoadError) as error:
            reason = printable_line(str(error))
            self._load_progress.note_failure(error)
            log.error(
                "failed to load plan %d: %s", message.plan_id, reason, extra=log_context(stage=message.stage)
            )
            if isinstance(error, TemporaryLoadError):
                asyncio.get_running_loop().call_later(WORKER_POLICY.load_again_s, self._rejoin_unless_used)
            return join_pb2.JoinRequest(
                load_failed=join_pb2.LoadFailed(
                    plan_id=message.plan_id, reason=reason, is_final=isinstance(error, OtherCheckpoint)
                )
            )
        assert self._loaded is not None
        self._weights.begin_stage(self._loaded.source)
        if problem := self._weights.problem(self._loaded.source):
            self._loaded = None
            differ = join_pb2.WeightsDiffer(plan_id=message.plan_id, reason=problem)
            return join_pb2.JoinRequest(weights_differ=differ)
        return join_pb2.JoinRequest(loaded=_loaded_message(self._loaded, self._weights.level))

    def _rejoin_unless_used(self) -> None:
        """Join again after an outage or a full disk: several failed loads have excluded the worker."""
        if self._loaded is None and self._loading is None:
            self._rejoin()

    async def _describe_weights(self, reply: Reply) -> None:
        """Tell the coordinator which weights this worker serves, if it does."""
        held = None if self._weights_port is None else await self._weights_port.describe()
        if held is not None:
            reply(join_pb2.JoinRequest(held_weights=held))

    async def _holds(self, assignment: Assignment) -> bool:
        return self._loaded is not None and await self._backend.holds(self._loaded, assignment)

    def _activity(self) -> object | None:
        """Value that changes with every step; None while a step runs or no epoch is serving."""
        loaded, session = self._loaded, self._session
        if loaded is None or session is None or not session.is_idle:
            return None
        return session.epoch.number, loaded.executor.stats.num_steps

    async def _load(self, assignment: Assignment) -> None:
        """End the previous stage, since both may not fit, then load; the backend may keep shared parts."""
        await self._end_session()
        self._loaded = None
        self._weights.begin_stage(None)
        log.info(
            "loading layers [%d, %d) as %s, stage %d of %d",
            assignment.layer_begin,
            assignment.layer_end,
            assignment.role.value,
            assignment.stage,
            assignment.num_stages,
            extra=log_context(stage=assignment.stage),
        )
        self._prefetch.end()
        self._loading = assignment
        self._load_progress = LoadProgress(failure=self._load_progress.failure)
        try:
            loaded = await self._backend.load(assignment, self._load_progress)
        except asyncio.CancelledError:
            self._load_progress.cancel()  # its thread would go on
            raise
        finally:
            self._loading = None
        log.info(
            "loaded in %d ms, warmed up in %d ms, read_bytes=%d",
            loaded.load_ms,
            loaded.warmup_ms,
            loaded.read_bytes,
            extra=log_context(stage=assignment.stage),
        )
        self._loaded = loaded
        self._load_progress.failure = ""

    def _cancel_load(self, *, unless_for: join_pb2.AssignStage | None = None) -> None:
        if self._loading is None:
            return
        if unless_for is None or not wants(unless_for, self._loading, wire_dtype=self._wire_dtype):
            self._load_progress.cancel()

    async def _begin_epoch(self, epoch: Epoch, reply: Reply) -> None:
        await self._end_session()
        assignment = self._loaded.assignment if self._loaded else None
        problem = epoch_problem(epoch, assignment, incarnation=self._incarnation, last_epoch=self._last_epoch)
        if problem is not None:
            log.error(
                "epoch %d cannot begin: %s", epoch.number, problem, extra=log_context(epoch=epoch.number)
            )
            report = FaultReport(
                epoch=epoch.number,
                step_id=0,
                stage=epoch.stage_of(self._incarnation),
                kind=StepFaultKind.EPOCH,
                message=problem,
            )
            reply(join_pb2.JoinRequest(fault=encode_fault(report)))
            return
        loaded = self._loaded
        assert loaded is not None
        self._session = self._new_session(epoch, loaded, reply)
        self._session.start()
        self._secrets.begin_epoch(epoch.incoming_secret, epoch.sender_to(loaded.assignment.stage))
        self._last_epoch = epoch.number
        began, self._epoch_began = self._epoch_began, asyncio.Event()
        began.set()

    def _new_session(self, epoch: Epoch, loaded: LoadedStage, reply: Reply) -> EpochSession:
        def on_ready() -> None:
            stage = loaded.assignment.stage
            log.info(
                "epoch %d: stage %d is ready",
                *(epoch.number, stage),
                extra=log_context(epoch=epoch.number, stage=stage),
            )
            reply(join_pb2.JoinRequest(epoch_ready=join_pb2.EpochReady(epoch=epoch.number)))

        def on_refused(report: FaultReport | None) -> None:
            self._on_serving(False)
            if report is not None:
                reply(join_pb2.JoinRequest(fault=encode_fault(report)))

        return EpochSession(
            epoch=epoch,
            assignment=loaded.assignment,
            executor=loaded.executor,
            backend=self._backend,
            next_stage=self._new_stream(epoch, loaded.assignment),
            on_ready=on_ready,
            on_refused=on_refused,
            clock=self._clock,
            observers=self._observers,
            payloads=self._payloads.incoming(),
        )

    def _new_stream(self, epoch: Epoch, assignment: Assignment) -> NextStageStream:
        hello = hop_hello(epoch, assignment, self._incarnation)
        if assignment.role.has_head:
            return stream_to_coordinator(self._coordinator, hello, self._transport)
        following = assignment.stage + 1
        address = epoch.peers[following].address
        payloads = self._payloads.outgoing(epoch, address)
        return stream_to_stage(following, address, hello, payloads, self._transport)

    async def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._on_serving(False)
            await session.close()


def _encode_graphs(graphs: GraphCounts) -> cluster_pb2.CudaGraphs:
    return cluster_pb2.CudaGraphs(
        num_replayed=graphs.num_replayed,
        eager=[
            cluster_pb2.EagerSteps(reason=_EAGER_REASONS[reason], num_steps=count)
            for reason, count in graphs.eager.items()
            if count
        ],
        sizes=[
            cluster_pb2.GraphSize(
                num_tokens=size.num_tokens, has_prompts=size.has_prompts, num_graphs=size.num_graphs
            )
            for size in graphs.sizes
        ],
        num_failed=graphs.num_failed,
        pool_bytes=graphs.pool_bytes,
    )


def _describe_fetch(progress: LoadProgress, heartbeat: join_pb2.Heartbeat, *, is_prefetch: bool) -> None:
    heartbeat.fetch_detail = progress.fetch_detail
    if progress.fetch is None:
        return
    state = progress.fetch.snapshot()
    if state.done_bytes < state.total_bytes:
        heartbeat.fetch.done_bytes, heartbeat.fetch.total_bytes = state.done_bytes, state.total_bytes
        heartbeat.fetch.bytes_per_second = round(state.rate)
        heartbeat.fetch.is_prefetch = is_prefetch


def _loaded_message(loaded: LoadedStage, level: cluster_pb2.WeightsCheck.ValueType) -> join_pb2.StageLoaded:
    return join_pb2.StageLoaded(
        plan_id=loaded.assignment.plan_id,
        weight_bytes=loaded.weight_bytes,
        kv_bytes=loaded.kv_bytes,
        load_ms=loaded.load_ms,
        read_bytes=loaded.read_bytes,
        warmup_ms=loaded.warmup_ms,
        kernels=loaded.kernels,
        kernels_detail=loaded.kernels_detail,
        wire_dtype=WIRE_DTYPE_TO_MESSAGE[loaded.assignment.sent_dtype],
        weights=level,
        fetched_bytes=loaded.fetched_bytes,
    )


def _drop(message: join_pb2.JoinRequest) -> None:
    """Reply without a connection."""


def _stay() -> None:
    """Rejoin without a connection, which the worker is about to do."""
