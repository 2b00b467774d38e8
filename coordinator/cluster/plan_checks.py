"""Runs self-checks for the controller: in epochs of their own, and in a serving one that is idle."""

import asyncio
import time
from collections.abc import Callable, Coroutine

from coordinator.cluster.actions import Action, CheckPlan
from coordinator.cluster.cluster_state import ClusterState
from coordinator.cluster.connections import Connections
from coordinator.cluster.event_log import EventLog
from coordinator.cluster.phase import ClusterPhase
from coordinator.cluster.pipeline import Pipeline
from coordinator.cluster.self_check import CheckedEpoch, SelfCheck
from coordinator.planning.plan import Plan
from coordinator.requests.engine import Engine
from coordinator.scheduling.kv_log import KvLog
from stageline_rpc.v1 import cluster_pb2
from wire.steps import Step, StepResult
from wire.wire_dtypes import ScaledDType, WireDType

NOT_ANSWERED = "a step of the self-check was not answered in time"


class PlanChecks:
    """One at a time. An epoch that ends takes its check with it."""

    def __init__(
        self,
        check: SelfCheck,
        state: ClusterState,
        engine: Engine,
        *,
        connections: Connections,
        pipeline: Pipeline,
        events: EventLog,
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
        self._carry_out = carry_out
        self._fail_epoch = fail_epoch
        self._spawn = spawn
        self._task: asyncio.Task[None] | None = None
        self._sends_in: int | None = None
        self._is_idle_check = False

    def begin(self, action: CheckPlan) -> None:
        """Checks a plan in an epoch that is for nothing else."""
        self.check.begin()
        self._task = self._spawn(self._check_plan(action))

    def look_around(self) -> None:
        """Begins the next check where it is due and nobody has to wait for it; to be called now and then."""
        is_busy = self._task is not None and not self._task.done()
        is_checked = self._state.phase is ClusterPhase.SERVING and not self._state.has_mock_stages
        if is_checked and not is_busy and not self._engine.registry.live and self.check.is_due():
            assert self._state.plan is not None
            self._task = self._spawn(self._check_idle(self._state.epoch, self._state.plan))

    def take(self, epoch: int, result: StepResult) -> bool:
        """A result has come; False when it is not one of the check's."""
        if epoch != self._sends_in:
            return False
        if self._is_idle_check:
            self._engine.note_lent_answer()
        self.check.take(result)
        return True

    def take_states(self, worker: str, message: cluster_pb2.CheckStates) -> None:
        """What a stage has handed on in the epoch that is checked."""
        record = self._state.workers.find(worker)
        if record is not None and record.stage is not None and message.epoch == self._state.epoch:
            self.check.take_states(record.stage.stage, message.states)

    def end(self) -> None:
        """The epoch is over."""
        self._sends_in = None
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def close(self) -> None:
        """Nothing is checked any more."""
        self.end()
        self.check.close()

    async def _check_plan(self, action: CheckPlan) -> None:
        epoch, plan = action.epoch, action.plan
        wire_dtype = self._wire_dtype(plan)
        known = await self.check.reference(plan, wire_dtype, self._connections.reference_sources)
        self._sends_in, self._is_idle_check = epoch, False
        checked = CheckedEpoch(
            epoch=epoch,
            plan=plan,
            kv=KvLog(num_blocks=plan.num_blocks, block_size=plan.block_size, window=plan.window),
            first_step_id=0,
            send=self._pipeline.send,
            ask_states=self._ask_states,
        )
        try:
            verdict = await self.check.run(checked, known)
        except TimeoutError:
            self._fail_epoch(epoch, NOT_ANSWERED)
            return
        self._sends_in = None
        self._events.checked(epoch, verdict)
        problem = None if verdict.is_good else verdict.text
        self._carry_out(self._state.checked(epoch, problem, stage=verdict.stage))
        await self.check.keep_reference()

    async def _check_idle(self, epoch: int, plan: Plan) -> None:
        """In the present epoch, whose cache stays; requests that come meanwhile wait for its few steps. A
        step that is overdue ends the epoch like any other, and the check with it.
        """
        wire_dtype = self._wire_dtype(plan)
        known = await self.check.reference(plan, wire_dtype, self._connections.reference_sources)
        lent = self._engine.lend_epoch()
        if lent is None:
            return
        kv, first_step_id = lent
        self._sends_in, self._is_idle_check, num_sent = epoch, True, 0

        def send(step: Step) -> None:
            nonlocal num_sent
            num_sent += 1
            self._engine.note_lent_step(step)
            self._pipeline.send(step)

        checked = CheckedEpoch(
            epoch=epoch,
            plan=plan,
            kv=kv,
            first_step_id=first_step_id,
            send=send,
            ask_states=None,
            is_watched=True,
        )
        began_s = time.monotonic()
        try:
            verdict = await self.check.run(checked, known)
        except Exception:
            # Requests wait for the epoch, which only a new one gives back now.
            self._fail_epoch(epoch, "the self-check ended with an unexpected error")
            raise
        self._sends_in = None
        self._events.checked(epoch, verdict, duration_s=time.monotonic() - began_s)
        if verdict.is_good:
            self._engine.take_epoch_back(next_step_id=first_step_id + num_sent)
        else:
            self._carry_out(self._state.doubted(epoch, f"the self-check {verdict.text}"))
        await self.check.keep_reference()

    def _ask_states(self) -> None:
        ask = cluster_pb2.CoordinatorMessage(report_states=cluster_pb2.ReportStates(epoch=self._state.epoch))
        for record in self._state.stage_workers[:-1]:
            self._connections[record.identity.name].send(ask)

    def _wire_dtype(self, plan: Plan) -> WireDType:
        """The coarsest of what any stage hands hidden states on in."""
        names = [stage.worker for stage in plan.stages[:-1]]
        used = [connection.wire_dtype for name in names if (connection := self._connections.get(name))]
        return max((each for each in used if each is not None), key=_coarseness, default=plan.dtype)


def _coarseness(dtype: WireDType) -> tuple[int, bool]:
    return -dtype.size_bytes, dtype is ScaledDType.F8_E4M3
