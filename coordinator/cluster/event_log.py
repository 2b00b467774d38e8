"""The log of a cluster's life: one line for each event, and none for what passes between them."""

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from coordinator.cluster.actions import AssignStage, BeginEpoch, EndCause, StopServing
from coordinator.cluster.connections import StageKernels, differing_kernels
from coordinator.cluster.membership import WorkerIdentity
from coordinator.planner.plan import Plan, StagePlan
from coordinator.recovery.self_check_verdict import Verdict
from coordinator.scheduler.sequence import Sequence
from stageline_rpc.internal.v1 import join_pb2
from wire.log_context import log_context
from wire.steps import FaultReport

log = logging.getLogger(__name__)


class EventLog:
    """One method per event that the controller handles."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
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

    def left(self, worker: str, reason: str) -> None:
        log.info("worker %s left: %s", worker, reason, extra=log_context(worker=worker))

    def assigned(self, action: AssignStage) -> None:
        """One line for the plan, which is that of its first stage."""
        stage = action.stage
        if stage.stage == 0:
            stages = action.plan.stages
            ranges = (f"{_layers(stage)} on {stage.worker}" for stage in stages)
            log.info("plan %d: layers %s", action.plan_id, ", ".join(ranges))
        log.debug(
            "worker %s gets stage %d (%s), layers %s",
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
            "ignored a fault that worker %s reports of stage %d, which it does not run",
            *(worker, stage),
            extra=log_context(worker=worker),
        )

    def weights_differ(self, worker: str, reason: str) -> None:
        log.error(
            "worker %s has other weights than the coordinator, tokens may have been wrong: %s",
            *(worker, reason),
            extra=log_context(worker=worker),
        )

    def leaving(self, worker: str, *, asks_itself: bool) -> None:
        """A drain begins."""
        wish = "wants to leave" if asks_itself else "is to leave"
        log.info("worker %s %s", worker, wish, extra=log_context(worker=worker))

    def finishing(self, worker: str) -> None:
        """Nobody can take the layers of a worker that is to leave."""
        log.debug("worker %s leaves when what runs is finished", worker, extra=log_context(worker=worker))

    def unexpected(self, worker: str, message: str | None) -> None:
        log.warning(
            "worker %s sent %s, which is not expected", worker, message, extra=log_context(worker=worker)
        )

    def faulty(self, report: FaultReport, in_step: Iterable[Sequence], worker: str | None) -> None:
        """`in_step` are the sequences of the faulty step, which its stage may not have been able to tell;
        `worker` has the stage. That a stage does not reach the next one may be the end of that one only.
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

    def beginning(self, action: BeginEpoch) -> None:
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
        """An epoch serves: the first one, or the end of a recovery."""
        stopped_s, self._stopped_s = self._stopped_s, None
        duration_s = None if stopped_s is None else self._clock() - stopped_s
        pause = "" if duration_s is None else f", again after {duration_s:.2f} s"
        log.info(
            "serving: epoch %d, %d stages%s",
            *(epoch, len(plan.stages), pause),
            extra=log_context(epoch=epoch, duration_s=duration_s),
        )

    def limited(self, text: str) -> None:
        """A stage has run out of memory."""
        log.warning("%s", text)

    def computing(self, stages: Items[StageKernels | None]) -> None:
        """Warns where stages compute differently, once for as long as the difference is the same."""
        differing = differing_kernels(stages)
        if differing and differing != self._differing:
            log.warning("%s: the slowest sets the pace, and rounding differs from stage to stage", differing)
        self._differing = differing

    def ledger_broken(self, epoch: int, problem: str) -> None:
        log.error(
            "epoch %d ends: the coordinator's KV accounting is broken: %s",
            *(epoch, problem),
            extra=log_context(epoch=epoch),
        )

    def over(self, action: StopServing, *, was_serving: bool) -> None:
        """An epoch is over: a recovery begins, unless one has begun already."""
        if was_serving:
            self._stopped_s = self._clock()
        level = logging.INFO if action.cause is EndCause.REPLANNED else logging.WARNING
        log.log(
            level, "epoch %d is over: %s", action.epoch, action.reason, extra=log_context(epoch=action.epoch)
        )


def _layers(stage: StagePlan) -> str:
    first, last = stage.layer_begin, stage.layer_end - 1
    return str(first) if first == last else f"{first}-{last}"
