"""Log lines and audit records of cluster events, one per event."""

import logging
import time
from collections import abc
from collections.abc import Callable, Iterable

from coordinator.cluster.actions import AssignStage, BeginEpoch, StopServing
from coordinator.cluster.membership import WorkerIdentity
from coordinator.engine.observer import EndCause
from coordinator.planner.plan import Plan, StagePlan
from coordinator.recovery.self_check_verdict import Verdict
from coordinator.scheduler.sequence import Sequence
from stageline_rpc.internal.v1 import join_pb2
from wire.audit import NO_AUDIT, Action, AuditLog, AuditOutcome
from wire.kernels import StageKernels, differing_kernels
from wire.log_context import log_context
from wire.steps import FaultReport

log = logging.getLogger(__name__)


class EventLog:
    """One method per event that the controller handles."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, audit: AuditLog = NO_AUDIT) -> None:
        self._clock, self._audit = clock, audit
        self._stopped_s: float | None = None
        self._differing = ""
        self._loads: dict[str, tuple[int, int, int]] = {}

    def joined(self, worker: WorkerIdentity) -> None:
        self._loads.pop(worker.name, None)
        log.info(
            "worker %s joined from %s (%s)",
            *(worker.name, worker.address, worker.device),
            extra=log_context(worker=worker.name),
        )
        self._record(Action.JOIN, worker.name, address=worker.address, device=worker.device)

    def left(self, worker: str, reason: str) -> None:
        log.info("worker %s left: %s", worker, reason, extra=log_context(worker=worker))
        self._record(Action.LEAVE, worker, problem=reason)

    def assigned(self, action: AssignStage) -> None:
        """Log the plan once, with its first stage."""
        stage = action.stage
        if stage.stage == 0:
            stages = action.plan.stages
            ranges = (f"{_layers(stage)} on {stage.worker}" for stage in stages)
            log.info("plan %d: layers %s", action.plan_id, ", ".join(ranges))
            if problem := action.plan.states_problem:
                log.warning("plan %d: %s", action.plan_id, problem)
        log.debug(
            "assigned worker %s stage %d (%s), layers %s",
            *(action.worker.name, stage.stage, stage.role.value, _layers(stage)),
            extra=log_context(worker=action.worker.name, stage=stage.stage),
        )

    def loaded(self, worker: str, loaded: join_pb2.StageLoaded) -> None:
        """A stage that was loaded for an earlier plan is a debug line."""
        load = (loaded.load_ms, loaded.warmup_ms, loaded.read_bytes)
        is_kept, self._loads[worker] = self._loads.get(worker) == load, load
        duration_ms = loaded.load_ms + loaded.warmup_ms
        kernels = f", {loaded.kernels} kernels" if loaded.kernels else ""
        log.log(
            logging.DEBUG if is_kept else logging.INFO,
            "worker %s is ready (%d ms%s)",
            *(worker, duration_ms, kernels),
            extra=log_context(worker=worker),
        )

    def load_failed(self, worker: str, reason: str) -> None:
        log.error("worker %s could not load its stage: %s", worker, reason, extra=log_context(worker=worker))

    def foreign_fault(self, worker: str, stage: int) -> None:
        log.warning(
            "ignored fault report of worker %s for stage %d: the worker does not run that stage",
            *(worker, stage),
            extra=log_context(worker=worker),
        )

    def weights_differ(self, worker: str, reason: str) -> None:
        log.error(
            "weights of worker %s differ from the checkpoint, its tokens may have been wrong: %s",
            *(worker, reason),
            extra=log_context(worker=worker),
        )

    def drain_started(self, worker: str, *, by_worker: bool) -> None:
        requester = "the worker" if by_worker else "an operator"
        log.info("worker %s drains, requested by %s", worker, requester, extra=log_context(worker=worker))
        if by_worker:
            self._record(Action.DRAIN, worker)

    def finishing_requests(self, worker: str) -> None:
        """Log that a draining worker waits for running requests, because no other can take its layers."""
        log.debug(
            "worker %s drains after its running requests have finished",
            worker,
            extra=log_context(worker=worker),
        )

    def unexpected_message(self, worker: str, message: str | None) -> None:
        log.warning("ignored message %s of worker %s", message, worker, extra=log_context(worker=worker))

    def step_fault(self, report: FaultReport, in_step: Iterable[Sequence], worker: str | None) -> None:
        """Log a fault; an error if its requests may be the cause.

        `in_step` are the sequences of the step, which the report may not name; `worker` runs the stage.
        """
        named = (*(sequence.key.request_id for sequence in in_step), *report.request_ids)
        log.log(
            logging.ERROR if report.kind.blames_requests else logging.WARNING,
            "step fault: %s",
            report,
            extra=log_context(
                epoch=report.epoch,
                step=report.step_id,
                stage=report.stage,
                worker=worker,
                request_ids=dict.fromkeys(named),
            ),
        )

    def epoch_begins(self, action: BeginEpoch) -> None:
        log.debug(
            "epoch %d begins on %d workers",
            *(action.epoch, len(action.workers)),
            extra=log_context(epoch=action.epoch),
        )

    def checked(self, epoch: int, verdict: Verdict, *, duration_s: float | None = None) -> None:
        level = logging.INFO if verdict.is_good else logging.ERROR
        extra = log_context(epoch=epoch, stage=verdict.stage, duration_s=duration_s)
        log.log(level, "self-check %s", verdict.text, extra=extra)

    def reference_dropped(self, worker: str) -> None:
        log.warning(
            "the reference of worker %s is dropped, it may be wrong: refused plans are checked again",
            worker,
            extra=log_context(worker=worker),
        )

    def serving(self, epoch: int, plan: Plan) -> None:
        """Log that an epoch serves, with the time since the last one."""
        stopped_s, self._stopped_s = self._stopped_s, None
        duration_s = None if stopped_s is None else self._clock() - stopped_s
        pause = "" if duration_s is None else f", again after {duration_s:.2f} s"
        log.info(
            "serving: epoch %d, %d stages%s",
            *(epoch, len(plan.stages), pause),
            extra=log_context(epoch=epoch, duration_s=duration_s),
        )

    def steps_limited(self, text: str) -> None:
        """Log smaller step limits after a stage ran out of memory."""
        log.warning("%s", text)

    def kernels(self, stages: abc.Sequence[StageKernels | None]) -> None:
        """Warn if stages use different kernels, once per difference."""
        differing = differing_kernels(stages)
        if differing and differing != self._differing:
            log.warning("%s: the slowest limits throughput, and rounding differs between stages", differing)
        self._differing = differing

    def ledger_broken(self, epoch: int, problem: str) -> None:
        log.error(
            "ended epoch %d: the coordinator's KV accounting is inconsistent: %s",
            *(epoch, problem),
            extra=log_context(epoch=epoch),
        )

    def epoch_over(self, action: StopServing, *, was_serving: bool) -> None:
        """Log the end of an epoch; from a serving one, measure the pause until the next."""
        if was_serving:
            self._stopped_s = self._clock()
        level = logging.INFO if action.cause is EndCause.REPLANNED else logging.WARNING
        log.log(
            level, "epoch %d is over: %s", action.epoch, action.reason, extra=log_context(epoch=action.epoch)
        )

    def _record(self, action: Action, worker: str, **facts: str) -> None:
        self._audit.record(action, AuditOutcome.OK, who=f"worker {worker}", worker=worker, **facts)


def _layers(stage: StagePlan) -> str:
    first, last = stage.layer_begin, stage.layer_end - 1
    return str(first) if first == last else f"{first}-{last}"
