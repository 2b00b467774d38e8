"""Actions that `ClusterState` returns and `Controller` carries out. Data only."""

from dataclasses import dataclass
from enum import Enum, auto

from coordinator.cluster.membership import WorkerIdentity
from coordinator.planner.plan import Plan, StagePlan
from coordinator.recovery.rejoin import StartTimer


class EndCause(Enum):
    """Why an epoch ends.

    DEATH: one of its workers was lost, possibly because of what it computed. DEVICE: a worker reported a
    failed device and exits, hardly because of what it computed. FAULT: a stage refused a step, or its answer
    is overdue. BROKEN: a stream ended for no known reason. NO_PROGRESS: several epochs in a row were BROKEN
    without a token in between, possibly because of the contents of their steps. REPLANNED: a better plan
    exists.
    """

    DEATH = auto()
    DEVICE = auto()
    FAULT = auto()
    BROKEN = auto()
    NO_PROGRESS = auto()
    REPLANNED = auto()


@dataclass(frozen=True, slots=True)
class AssignStage:
    """Tell `worker` to load `stage` of plan `plan_id`. With `force_reload` it discards the weights that it
    holds.
    """

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
    """The epoch is over; results of it are void."""

    epoch: int
    reason: str
    cause: EndCause


@dataclass(frozen=True, slots=True)
class StartServing:
    """Every stage of `epoch` is ready and connected."""

    epoch: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """Every stage of `epoch` is ready and connected, and the plan has to pass a self-check first."""

    epoch: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Disconnect:
    """End the stream of a worker that does not get ready, as if it were lost. It may rejoin."""

    worker: WorkerIdentity
    reason: str


@dataclass(frozen=True, slots=True)
class LetGo:
    """Tell a drained worker without a stage to exit."""

    worker: WorkerIdentity
    reason: str


@dataclass(frozen=True, slots=True)
class FinishRunning:
    """Start nothing new, and call `ClusterState.drained` when the running requests have finished: `worker`
    drains, and no other worker can take its layers.
    """

    worker: WorkerIdentity


Action = (
    AssignStage
    | BeginEpoch
    | StopServing
    | StartServing
    | CheckPlan
    | Disconnect
    | LetGo
    | FinishRunning
    | StartTimer
)
