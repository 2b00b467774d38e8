"""Actions that `ClusterState` returns and `Controller` carries out. Data only."""

from dataclasses import dataclass

from coordinator.cluster.membership import WorkerIdentity
from coordinator.engine.observer import EndCause
from coordinator.planner.plan import Plan, StagePlan
from coordinator.recovery.rejoin import StartTimer


@dataclass(frozen=True, slots=True)
class AssignStage:
    """Order `worker` to load `stage` of plan `plan_id`; with `force_reload` it discards cached weights."""

    worker: WorkerIdentity
    plan_id: int
    plan: Plan
    stage: StagePlan
    force_reload: bool = False


@dataclass(frozen=True, slots=True)
class BeginEpoch:
    """Begin `epoch` on `workers` (in stage order) after `delay_s`; for a self-check if `is_check`."""

    epoch: int
    plan_id: int
    plan: Plan
    workers: tuple[WorkerIdentity, ...]
    delay_s: float
    is_check: bool = False


@dataclass(frozen=True, slots=True)
class StopServing:
    """Stop the epoch and discard its results."""

    epoch: int
    reason: str
    cause: EndCause


@dataclass(frozen=True, slots=True)
class StartServing:
    """Start to serve: every stage of `epoch` is ready and connected."""

    epoch: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """Start the self-check of the plan: every stage of `epoch` is ready and connected."""

    epoch: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Treat a worker that does not get ready as lost and close its stream. It may rejoin."""

    worker: WorkerIdentity
    reason: str


@dataclass(frozen=True, slots=True)
class DismissWorker:
    """Order a drained worker without a stage to exit."""

    worker: WorkerIdentity
    reason: str


@dataclass(frozen=True, slots=True)
class FinishRunning:
    """Admit no new requests, and call `ClusterState.drained` when the running ones have finished.

    `worker` drains, and no other worker can take its layers.
    """

    worker: WorkerIdentity


Action = (
    AssignStage
    | BeginEpoch
    | StopServing
    | StartServing
    | CheckPlan
    | Disconnect
    | DismissWorker
    | FinishRunning
    | StartTimer
)
