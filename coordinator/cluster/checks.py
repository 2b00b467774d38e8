"""Checks of a serving cluster: KV ledger, weights, self-checks."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpoint import Blueprint, Checkpoint, CheckpointError, stage_tensor_names
from checkpoint.dtypes import ScaledDType
from checkpoint.errors import FileChanged
from checkpoint.hashes import CACHE_FOLDER, HashCache, Hashes, TensorHasher, Urgency, hash_when_idle
from coordinator.cluster.actions import Action, CheckPlan
from coordinator.cluster.connections import Connections
from coordinator.cluster.event_log import EventLog
from coordinator.cluster.membership import WorkerIdentity, WorkerState
from coordinator.cluster.pipeline import Pipeline
from coordinator.cluster.state_machine import ClusterState
from coordinator.cluster.transitions import ClusterPhase
from coordinator.engine.engine import Engine
from coordinator.model import ServedModel
from coordinator.planner.plan import Plan, StagePlan
from coordinator.recovery.self_check import CheckedEpoch, ReferenceSource, SelfCheck
from coordinator.recovery.self_check_verdict import KnownReference, NoReference, Verdict
from coordinator.scheduler.kv_manager import KvCacheManager
from kvcache import IntegrityMonitor, IntegrityReport
from stageline_rpc.internal.v1 import join_pb2
from wire.steps import Step, StepResult
from wire.tensors import WireDType

log = logging.getLogger(__name__)


class LedgerCheck:
    """Checks the engine's KV ledger against its sequences; methods return the problem, or an empty text."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._monitor = IntegrityMonitor()

    @property
    def report(self) -> IntegrityReport:
        """Result of the last check."""
        return self._monitor.report

    def restart(self) -> None:
        """Start over with the empty ledger of a new epoch."""
        self._monitor.restart()

    def after_step(self) -> str:
        """Check after every few answered steps."""
        return self._run() if self._monitor.count_step() else ""

    def when_idle(self) -> str:
        """Check if nothing runs. Call periodically; idle time is measured from call to call."""
        scheduler = self._engine.scheduler
        is_idle = not scheduler.running and not scheduler.num_steps_in_flight
        return self._run() if self._monitor.is_due_when_idle() and is_idle else ""

    def _run(self) -> str:
        scheduler = self._engine.scheduler
        kv = scheduler.kv
        if kv is None:
            return ""
        active = [sequence.kv for sequence in scheduler.running]
        return self._monitor.run(lambda: kv.check_integrity(active))


Send = Callable[[WorkerIdentity, join_pb2.JoinResponse], None]


@dataclass(frozen=True, slots=True)
class _Question:
    """Weights to compare: of `stage` in a plan, or the whole checkpoint of `worker`."""

    worker: WorkerIdentity
    stage: StagePlan | None
    plan_id: int
    idle_s: float


Stages = Iterable[tuple[WorkerIdentity, StagePlan]]


class WeightsCheck:
    """Compares every byte of the workers' weights with the coordinator's checkpoint.

    Hashes the checkpoint once, then sends the hashes to the workers of each serving plan, for comparison when
    idle, and of a plan that failed its self-check, for comparison at once. Workers hash their own
    files and report differences; heartbeats report equality.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        activity: Callable[[], object | None],
        send: Send,
        idle_s: float,
        cache_directory: Path | None,
    ) -> None:
        """Hashing waits for idle `activity` (see `hash_when_idle`) until a plan fails.

        `cache_directory` is the user's cache, None for no cache.
        """
        self._model = model
        self._activity = activity
        self._send = send
        self._idle_s = idle_s
        self._cache = None if cache_directory is None else HashCache(cache_directory / CACHE_FOLDER)
        self._hashes: Hashes = {}
        self._is_urgent = False
        self._served_plan_id = 0
        self._questions: dict[tuple[str, bool], _Question] = {}
        """Pending comparisons by worker name, and whether of its stage only."""

    async def run(self) -> None:
        """Hash the checkpoint; return when done, or when it cannot be hashed."""
        try:
            hasher = await asyncio.get_running_loop().run_in_executor(None, self._new_hasher)
            self._hashes = await hash_when_idle(hasher, self._seen_activity, idle_s=self._idle_s)
        except CheckpointError as error:
            log.warning("weights are compared by samples only, the checkpoint cannot be hashed: %s", error)
            return
        log.info("hashed %d tensors of the checkpoint, read_bytes=%d", len(self._hashes), hasher.read_bytes)
        self._ask()

    def plan_serves(self, plan_id: int, stages: Stages) -> None:
        """Ask the plan's workers once, in its first epoch."""
        if plan_id != self._served_plan_id:
            self._served_plan_id = plan_id
            self._add(_Question(worker, stage, plan_id, self._idle_s) for worker, stage in stages)

    def plan_failed(self, plan_id: int, stages: Stages, source: WorkerIdentity | None) -> None:
        """Compare the weights of the failed plan's workers, and of `source`, which computed the reference."""
        self._is_urgent = True
        self._add(_Question(worker, stage, plan_id, 0.0) for worker, stage in stages)
        if source is not None:
            self._add([_Question(source, None, 0, 0.0)])

    def _add(self, questions: Iterable[_Question]) -> None:
        for question in questions:
            self._questions[question.worker.name, question.stage is not None] = question
        self._ask()

    def _seen_activity(self) -> object | None:
        return Urgency.AT_ONCE if self._is_urgent else self._activity()

    def _new_hasher(self) -> TensorHasher:
        assert self._model.directory is not None, "a mock has no weights to compare"
        checkpoint = Checkpoint.open(self._model.directory)
        if checkpoint.fingerprint != self._model.fingerprint:
            raise FileChanged(f"{checkpoint.path} has changed since the coordinator started")
        config = checkpoint.config
        names = _tensor_names(config, None)
        return TensorHasher(checkpoint, names, files=self._model.files, cache=self._cache)

    def _ask(self) -> None:
        if not self._hashes:
            return
        questions, self._questions = self._questions, {}
        for question in questions.values():
            self._send(question.worker, self._encode(question))

    def _encode(self, question: _Question) -> join_pb2.JoinResponse:
        names = _tensor_names(self._model.config, question.stage)
        verify = join_pb2.VerifyWeights(
            plan_id=question.plan_id,
            idle_ms=round(question.idle_s * 1000),
            tensors=[join_pb2.TensorHash(name=name, xxh3_128=self._hashes[name]) for name in names],
        )
        return join_pb2.JoinResponse(verify_weights=verify)


def _tensor_names(config: Blueprint, stage: StagePlan | None) -> list[str]:
    """Return the tensor names of a stage, or of the whole model for None."""
    if stage is None:
        return stage_tensor_names(config, 0, config.num_layers, has_embeddings=True, has_head=True)
    return stage_tensor_names(
        config,
        stage.layer_begin,
        stage.layer_end,
        has_embeddings=stage.role.has_embeddings,
        has_head=stage.role.has_head,
    )


NOT_ANSWERED = "a step of the self-check was not answered in time"
UNEXPECTED_ERROR = "the self-check ended with an unexpected error"


class PlanChecks:
    """Runs self-checks, one at a time. A check is cancelled when its epoch ends."""

    def __init__(
        self,
        check: SelfCheck,
        state: ClusterState,
        engine: Engine,
        *,
        connections: Connections,
        pipeline: Pipeline,
        events: EventLog,
        weights: WeightsCheck | None,
        carry_out: Callable[[list[Action]], None],
        fail_epoch: Callable[[int, str], None],
        spawn: Callable[[Coroutine[None, None, None]], asyncio.Task[None]],
    ) -> None:
        self.check = check
        self._state = state
        self._engine = engine
        self._connections = connections
        self._pipeline = pipeline
        self._events = events
        self._weights = weights
        self._carry_out = carry_out
        self._fail_epoch = fail_epoch
        self._spawn = spawn
        self._task: asyncio.Task[None] | None = None
        self._sends_in: int | None = None
        self._is_idle_check = False
        self._num_lent_steps = 0

    def begin(self, action: CheckPlan) -> None:
        """Check a plan in a separate epoch."""
        self.check.begin()
        self._task = self._spawn(self._check_plan(action))

    def tick(self) -> None:
        """Start the next idle check if it is due and no request is live. Call periodically."""
        is_busy = self._task is not None and not self._task.done()
        is_checked = self._state.phase is ClusterPhase.SERVING and not self._state.has_mock_stages
        if is_checked and not is_busy and not self._engine.has_live_requests and self.check.is_due():
            assert self._state.plan is not None
            self._task = self._spawn(self._check_idle(self._state.epoch, self._state.plan))

    def take(self, epoch: int, result: StepResult) -> bool:
        """Take a step result; return False if no check of this epoch waits for it."""
        if epoch != self._sends_in:
            return False
        if self._is_idle_check:
            self._engine.record_lent_result()
        self.check.take(result)
        return True

    def take_states(self, worker: str, message: join_pb2.CheckStates) -> None:
        """Take the hidden states that a stage sent in the checked epoch."""
        stage = self._state.stage_of(worker)
        if stage is not None and message.epoch == self._state.epoch:
            self.check.take_states(stage.stage, message.states)

    def end(self) -> None:
        """Cancel the check of an epoch that has ended."""
        self._sends_in = None
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def close(self) -> None:
        """Cancel the running check and reference computations."""
        self.end()
        self.check.close()

    async def _check_plan(self, action: CheckPlan) -> None:
        """Check a plan. Without a verdict its epoch fails, and the check is repeated in the next one."""
        epoch, plan = action.epoch, action.plan
        try:
            known = await self.check.reference(plan, self._wire_dtype(plan), self._reference_sources())
            self._sends_in, self._is_idle_check = epoch, False
            verdict = await self._verdict_on(action, known)
        except Exception:
            self._fail_epoch(epoch, UNEXPECTED_ERROR)
            raise
        if verdict is None:
            self._fail_epoch(epoch, NOT_ANSWERED)
            return
        self._sends_in = None
        self._events.checked(epoch, verdict)
        if verdict.is_good:
            self._carry_out(self._state.checked(epoch, None))
        else:
            self._refuse(action, verdict, known.worker if isinstance(known, KnownReference) else "")
        await self.check.keep_reference()

    async def _verdict_on(self, action: CheckPlan, known: KnownReference | NoReference) -> Verdict | None:
        """Run the check in its epoch; None if a step was not answered."""
        plan = action.plan
        checked = CheckedEpoch(
            epoch=action.epoch,
            plan=plan,
            kv=KvCacheManager(
                num_blocks=plan.num_blocks,
                block_size=plan.block_size,
                window=plan.window,
                other_groups=plan.other_groups,
                num_states=plan.num_states,
            ),
            first_step_id=0,
            send=self._pipeline.send,
            ask_states=self._ask_states,
        )
        try:
            return await self.check.run(checked, known)
        except TimeoutError:
            return None

    def _refuse(self, action: CheckPlan, verdict: Verdict, source: str) -> None:
        """Reject a plan that failed against the reference of `source`, "" if no worker computed it.

        The weights of the plan and of `source` are compared with the coordinator's checkpoint.
        """
        plan = action.plan
        if self._weights is not None:
            workers = (record.identity for record in self._state.stage_workers)
            connection = self._connections.get(source)
            self._weights.plan_failed(
                self._state.plan_id,
                zip(workers, plan.stages, strict=True),
                None if connection is None else connection.identity,
            )
        blamed = "" if verdict.stage is None else plan.stages[verdict.stage].worker
        is_dropped = self.check.record_failure(blamed)
        self._carry_out(self._state.checked(action.epoch, verdict.text, stage=verdict.stage, source=source))
        if is_dropped:
            self._drop_reference(source)

    def worker_left(self, name: str) -> None:
        """Drop the reference of a lost worker if plans have failed against it."""
        if self.check.source_left(name):
            self._drop_reference(name)

    def weights_differ(self, name: str) -> None:
        """Discard the references of a worker with wrong weights."""
        self._spawn(self.check.discard_references(name))

    def _drop_reference(self, source: str) -> None:
        self._events.reference_dropped(source)
        self._carry_out(self._state.reference_dropped(source))

    def _reference_sources(self) -> Sequence[ReferenceSource]:
        """Return the workers that may compute a reference: all but quarantined ones."""
        records = self._state.workers
        excluded = {record.identity.name for record in records if record.state is WorkerState.QUARANTINED}
        return [source for source in self._connections.reference_sources if source.worker not in excluded]

    async def _check_idle(self, epoch: int, plan: Plan) -> None:
        """Check the current epoch, whose cache stays; requests that arrive wait for its few steps.

        An overdue step ends the epoch as usual, and the check with it.
        """
        wire_dtype = self._wire_dtype(plan)
        known = await self.check.reference(plan, wire_dtype, self._reference_sources())
        lent = self._engine.lend_epoch()
        if lent is None:
            return
        kv, first_step_id = lent
        self._sends_in, self._is_idle_check, self._num_lent_steps = epoch, True, 0
        checked = CheckedEpoch(
            epoch=epoch,
            plan=plan,
            kv=kv,
            first_step_id=first_step_id,
            send=self._send_lent,
            ask_states=None,
            is_watched=True,
        )
        began_s = time.monotonic()
        verdict = await self._run_lent(checked, known)
        self._sends_in = None
        self._events.checked(epoch, verdict, duration_s=time.monotonic() - began_s)
        if verdict.is_good:
            self._engine.reclaim_epoch(next_step_id=first_step_id + self._num_lent_steps)
        else:
            self._carry_out(self._state.doubted(epoch, f"the self-check {verdict.text}"))
        await self.check.keep_reference()

    def _send_lent(self, step: Step) -> None:
        self._num_lent_steps += 1
        self._engine.record_lent_step(step)
        self._pipeline.send(step)

    async def _run_lent(self, epoch: CheckedEpoch, known: KnownReference | NoReference) -> Verdict:
        """Run the check; an error ends the lent epoch, because waiting requests need a new one."""
        try:
            return await self.check.run(epoch, known)
        except Exception:
            self._fail_epoch(epoch.epoch, UNEXPECTED_ERROR)
            raise

    def _ask_states(self) -> None:
        ask = join_pb2.JoinResponse(report_states=join_pb2.ReportStates(epoch=self._state.epoch))
        for record in self._state.stage_workers[:-1]:
            self._connections[record.identity.name].send(ask)

    def _wire_dtype(self, plan: Plan) -> WireDType:
        """Return the coarsest dtype in which any stage sends hidden states."""
        names = [stage.worker for stage in plan.stages[:-1]]
        used = [connection.wire_dtype for name in names if (connection := self._connections.get(name))]
        return max((dtype for dtype in used if dtype is not None), key=_coarseness, default=plan.dtype)


def _coarseness(dtype: WireDType) -> tuple[int, bool]:
    return -dtype.size_bytes, dtype is ScaledDType.F8_E4M3
