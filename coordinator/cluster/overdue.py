"""An answer that does not come, as the fault of the stage where its step was last seen."""

from collections.abc import Sequence

from coordinator.cluster.worker_connection import WorkerConnection
from coordinator.requests.engine import Engine
from wire.errors import StepFaultKind
from wire.steps import FaultReport

_MIN_UNKNOWN_S = 10.0
_WARMUPS = 8
"""How many times the warm-up of all stages the first steps may take, before anything is known of steps."""


def overdue_fault(engine: Engine, workers: Sequence[WorkerConnection | None]) -> FaultReport | None:
    """The fault of the oldest step in flight, if its answer is overdue. `workers` are those of the stages, in
    order; None for one that is gone.
    """
    warmup_s = sum(each.warmup_ms for each in workers if each is not None) / 1000
    overdue = engine.overdue_step(unknown_s=max(_MIN_UNKNOWN_S, _WARMUPS * warmup_s))
    if overdue is None:
        return None
    step = overdue.step
    # Heartbeats tell how many steps of the epoch a stage has computed.
    missing = (each is None or each.heartbeat.num_steps <= step.step_id for each in workers)
    stage = next((index for index, is_missing in enumerate(missing) if is_missing), len(workers) - 1)
    return FaultReport(
        epoch=step.epoch,
        step_id=step.step_id,
        stage=stage,
        kind=StepFaultKind.OVERDUE,
        message=f"no answer for {overdue.waited_s:.1f} s, where {overdue.limit_s:.1f} s is the limit",
        request_ids=step.request_ids,
    )
