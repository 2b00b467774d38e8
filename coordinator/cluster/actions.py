"""What `ClusterState` wants done. Data only."""

from dataclasses import dataclass
from enum import Enum, auto

from coordinator.cluster.membership import WorkerIdentity
from coordinator.planner.plan import Plan, StagePlan
from coordinator.recovery.rejoin import StartTimer


class EndCause(Enum):
    """Why an epoch ends. DEATH: a worker of it is lost, and what it computed may be why. DEVICE: a worker
    reported that its device has failed, and exits; that is hardly what it computed. FAULT: a stage
    refused a step, or its answer did not come. BROKEN: a stream ended for no known reason. NO_PROGRESS: so it
    did in the epochs before, without a token in between, and what is in the steps may be why. REPLANNED: all
    is well, but there is a better plan.
    """

    DEATH = auto()
    DEVICE = auto()
    FAULT = auto()
    BROKEN = auto()
    NO_PROGRESS = auto()
    REPLANNED = auto()


@dataclass(frozen=True, slots=True)
class AssignStage:
    """Tell `worker` to load `stage` of plan `plan_id`. `force_reload`: nothing that it has in memory is
    trusted.
    """

    worker: WorkerIdentity
    plan_id: int
    plan: Plan
    stage: StagePlan
    force_reload: bool = False


@dataclass(frozen=True, slots=True)
class BeginEpoch:
    """Begin `epoch` on all `workers`, in stage order, after `delay_s`; for a self-check if `is_check`."""

    epoch: int
    plan_id: int
    plan: Plan
    workers: tuple[WorkerIdentity, ...]
    delay_s: float
    is_check: bool = False


@dataclass(frozen=True, slots=True)
class StopServing:
    """The epoch is over; nothing of it counts any more."""

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
    """Every stage of `epoch` is ready and connected, and this plan has never been checked."""

    epoch: int
    plan: Plan


@dataclass(frozen=True, slots=True)
class Disconnect:
    """This worker is of no use as it is: end its stream, as if it were lost. It may join again."""

    worker: WorkerIdentity
    reason: str


@dataclass(frozen=True, slots=True)
class LetGo:
    """This worker has no stage and is to exit."""

    worker: WorkerIdentity
    reason: str


@dataclass(frozen=True, slots=True)
class FinishRunning:
    """Start nothing new, and say `ClusterState.drained` when nothing runs any more: `worker` is to leave, and
    nobody can take its layers.
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
