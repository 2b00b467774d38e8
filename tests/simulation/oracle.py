"""The invariants under any schedule; violations are kept in `problems`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from coordinator.cluster.checks import PlanChecks
from coordinator.cluster.transitions import ClusterPhase
from coordinator.server import CoordinatorServer
from kvcache import IntegrityBroken, combined_digest
from tests.simulation.virtual_loop import BEGAN_S
from wire.errors import StepFaultKind
from wire.steps import FaultReport, StepResult

if TYPE_CHECKING:
    from tests.simulation.network import Network

_OF_NO_STEP = (StepFaultKind.NEIGHBOUR, StepFaultKind.EPOCH)
_OF_DEVICES = (StepFaultKind.DEVICE, StepFaultKind.OUT_OF_MEMORY)
EACH_RESULTS = 8
"""Number of results between two checks of the ledger."""


class Oracle:
    """Watches the coordinator and the orders to stages."""

    def __init__(self, network: Network) -> None:
        loop = network.loop
        self.problems: list[str] = []
        self._network = network
        self.num_results = 0
        self.num_device_faults = 0
        self._loop = loop
        self._epochs: dict[str, int] = {}
        self._answered: dict[int, int] = {}
        self._served_s = loop.time()

    def note(self, problem: str) -> None:
        """Something does not hold."""
        self.problems.append(f"{self._loop.time() - BEGAN_S:.4f} s: {problem}")

    def watch(self, server: CoordinatorServer, is_bad: Callable[[str], bool]) -> None:
        """Check every accepted result, the time without a serving epoch, and that no bad worker serves."""
        self._server = server
        complete = server.engine.complete

        def checked(result: StepResult) -> int:
            state = server.controller.state
            if state.phase is not ClusterPhase.SERVING or result.epoch != state.epoch:
                self.note(
                    f"a result of epoch {result.epoch} counts in epoch {state.epoch}, {state.phase.name}"
                )
            num_tokens = complete(result)
            self._note_answer(result)
            self.num_results += 1
            if num_tokens:
                self._served_s = self._loop.time()
            if self.num_results % EACH_RESULTS == 0:
                self._check_ledger()
                bad = [worker.identity.name for worker in state.stage_workers if is_bad(worker.identity.name)]
                if bad and state.phase is ClusterPhase.SERVING:
                    self.note(f"{bad} serve, whose weights are bad")
            return num_tokens

        report_fault = server.controller.report_fault

        def judged(report: FaultReport) -> None:
            is_present = report.epoch == server.controller.state.epoch
            has_cause = (
                self._network.num_tampered
                or (report.kind is StepFaultKind.OVERDUE and self._network.num_stalls)
                or (report.kind in _OF_DEVICES and self.num_device_faults)
            )
            if is_present and report.kind not in _OF_NO_STEP and not has_cause:
                self.note(f"a fault without a cause: {report}")
            report_fault(report)

        untyped: Any = server.engine
        untyped.complete = checked
        if server.controller.checks is not None:
            self._watch_checks(server.controller.checks)
        untyped = server.controller
        untyped.report_fault = judged

    def _note_answer(self, result: StepResult) -> None:
        if result.step_id != self._answered.get(result.epoch, -1) + 1:
            self.note(f"step {result.step_id} follows {self._answered.get(result.epoch, -1)}")
        self._answered[result.epoch] = result.step_id

    def _watch_checks(self, checks: PlanChecks) -> None:
        """Their results count among those of the epoch."""
        take = checks.take

        def taken(epoch: int, result: StepResult) -> bool:
            is_taken = take(epoch, result)
            if is_taken:
                self._note_answer(result)
            return is_taken

        untyped: Any = checks
        untyped.take = taken

    @property
    def unserved_s(self) -> float:
        """Since the last token that counted."""
        return self._loop.time() - self._served_s

    def epoch_begins(self, worker: str, epoch: int) -> None:
        """A stage forgets everything but its weights."""
        if epoch <= self._epochs.get(worker, 0):
            self.note(f"epoch {epoch} begins on {worker} after epoch {self._epochs[worker]}")
        self._epochs[worker] = epoch

    def check_idle(self, executors: list[Any]) -> None:
        """Check, after all requests ended, that no resource is held and that all replicas are equal."""
        engine = self._server.engine
        scheduler, kv = engine.scheduler, engine.scheduler.kv
        if engine.registry.live or scheduler.queue or scheduler.running or scheduler.num_steps_in_flight:
            self.note(
                f"{len(engine.registry.live)} requests, {len(scheduler.queue)} queued and "
                f"{len(scheduler.running)} running sequences, {scheduler.num_steps_in_flight} steps are left"
            )
        if engine.totals.orphaned:
            self.note(f"{engine.totals.orphaned} orphans")
        if kv is None:
            self.note("no epoch serves")
            return
        self._check_ledger()
        if kv.num_active or kv.has_pending:
            self.note(f"the ledger has {kv.num_active} active blocks and pending signals: {kv.has_pending}")
        if kv._states is not None and kv._states.pool.num_live:
            self.note(f"the ledger has {kv._states.pool.num_live} live states")
        for stage, executor in enumerate(executors):
            tables, states = executor._tables, executor._states
            try:
                executor.check_integrity()
            except IntegrityBroken as error:
                self.note(f"stage {stage}: {error}")
            if tables.pool.num_active or len(tables) or len(executor._sequences):
                self.note(
                    f"stage {stage} has {tables.pool.num_active} active blocks, {len(tables)} tables, "
                    f"{len(executor._sequences)} sequences"
                )
            if states is not None and (states.pool.num_live or len(states)):
                self.note(f"stage {stage} has {states.pool.num_live} live states of {len(states)} sequences")
            digest = combined_digest([tables.digest] + ([] if states is None else [states.digest]))
            if digest != kv.digest:
                self.note(f"stage {stage} has digest {digest:016x}, the ledger {kv.digest:016x}")

    def _check_ledger(self) -> None:
        scheduler = self._server.engine.scheduler
        if scheduler.kv is None:
            return
        try:
            scheduler.kv.check_integrity([sequence.kv for sequence in scheduler.running])
        except IntegrityBroken as error:
            self.note(f"ledger: {error}")


class Listener(logging.Handler):
    """Unexpected exceptions are logged by the product and survived; here they are problems."""

    def __init__(self, oracle: Oracle, *, is_tracing: bool) -> None:
        super().__init__(logging.INFO if is_tracing else logging.ERROR)
        self._oracle = oracle
        self._is_tracing = is_tracing

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self._oracle.note(f"{record.name}: {record.getMessage()}: {record.exc_info[1]!r}")
        if self._is_tracing:
            now_s = self._oracle._loop.time() - BEGAN_S
            print(f"{now_s:9.4f} {record.levelname:7} {record.name:38} {record.getMessage()}")
