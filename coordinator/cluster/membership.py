"""Members of the cluster: worker records, holds, losses and quarantine. Pure."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from statistics import median_low

from coordinator.planner.plan import DeviceKind, StagePlan
from coordinator.planner.rates import settled
from coordinator.recovery.policy import RecoveryPolicy
from wire.addresses import parse_address
from wire.device_rates import DeviceRates
from wire.errors import HandshakeMismatch
from wire.gpu import Gpu
from wire.ids import Incarnation


class WorkerState(Enum):
    """State of one worker.

    JOINING: held because it was lost repeatedly. SUSPECT: silent within its lease, avoided by plans, or a
    possible cause of a failed self-check.
    """

    JOINING = auto()
    SPARE = auto()
    LOADING = auto()
    READY = auto()
    SUSPECT = auto()
    DRAINING = auto()
    LOST = auto()
    QUARANTINED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """Contents of a worker's hello."""

    name: str
    incarnation: Incarnation
    address: str
    device: str
    memory_bytes: int
    last_epoch: int
    pid: int
    is_mock: bool = False
    supports_bf16: bool = True
    supports_f16: bool = False
    gpu: Gpu | None = None
    reads_pages_in_place: bool = False
    rates: DeviceRates | None = None
    warm_spare_bytes: int = 0
    memory_domain: str = ""
    host_memory_bytes: int = 0

    @property
    def hosts(self) -> frozenset[str]:
        """Names of its host: two workers with a common one are on the same host."""
        return frozenset((parse_address(self.address).host, self.memory_domain)) - {""}

    @property
    def device_kind(self) -> DeviceKind:
        """Where it computes."""
        if self.gpu is None:
            return DeviceKind.HOST
        return DeviceKind.GPU_IN_PLACE if self.reads_pages_in_place else DeviceKind.GPU


@dataclass(slots=True)
class WorkerRecord:
    """A worker that joined, live or lost. `detail` is the reason for its state."""

    identity: WorkerIdentity
    rates: DeviceRates | None = None
    """As told, or by an earlier process of this name if similar."""
    state: WorkerState = WorkerState.SPARE
    detail: str = ""
    stage: StagePlan | None = None
    num_failed_loads: int = 0
    is_silent: bool = False
    is_draining: bool = False
    is_dismissed: bool = False
    is_avoided: bool = False
    produced_non_finite: bool = False
    has_wrong_weights: bool = False
    is_culprit: bool = False
    """Quarantined because of a failed self-check."""
    doubts: tuple[str, ...] = ()
    """Problems of failed plans that the worker may have caused."""

    @property
    def is_live(self) -> bool:
        return self.state is not WorkerState.LOST

    @property
    def is_usable(self) -> bool:
        """Whether plans may use it. A quarantined worker must rejoin first."""
        out = (WorkerState.LOST, WorkerState.QUARANTINED, WorkerState.JOINING)
        return self.state not in out and not self.is_draining and not self.is_avoided

    @property
    def is_held(self) -> bool:
        """Whether plans may use it only if there is no plan without it."""
        return self.state is WorkerState.JOINING and not self.is_draining and not self.is_avoided

    def quarantine(self, reason: str) -> None:
        """Exclude the worker from plans until it rejoins."""
        self.state, self.detail = WorkerState.QUARANTINED, reason

    def readmit(self) -> None:
        """End the quarantine."""
        self.state, self.detail, self.is_culprit = WorkerState.SPARE, "", False

    def fail_to_load(self, reason: str, *, max_failures: int) -> bool:
        """Count a failed load; returns True if the worker is now quarantined."""
        self.num_failed_loads += 1
        self.detail = f"could not load its stage: {reason}"
        if self.num_failed_loads >= max_failures:
            self.quarantine(self.detail)
        return self.num_failed_loads >= max_failures

    @property
    def shown_detail(self) -> str:
        """The reason for `shown_state`."""
        return self.detail or next(reversed(self.doubts), "")

    @property
    def shown_state(self) -> WorkerState:
        """The state that operators see."""
        if self.state in (WorkerState.LOST, WorkerState.QUARANTINED):
            return self.state
        if self.is_draining:
            return WorkerState.DRAINING
        is_doubtful = bool(self.doubts) and self.stage is None
        is_suspect = self.is_silent or self.is_avoided or is_doubtful
        return WorkerState.SUSPECT if is_suspect else self.state


class Members:
    """Workers by name, and their losses."""

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._policy = policy
        self._records: dict[str, WorkerRecord] = {}
        self._lost: dict[str, WorkerRecord] = {}
        self._losses = Counter[str]()

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(list(self._records.values()))

    def __getitem__(self, name: str) -> WorkerRecord:
        return self._records[name]

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def get(self, name: str) -> WorkerRecord | None:
        """The live or lost worker with this name."""
        return self._records.get(name)

    def find_process(self, name: str, incarnation: Incarnation) -> WorkerRecord | None:
        """The record of this worker process; None if it is lost or replaced."""
        record = self._records.get(name)
        if record is None or not record.is_live or record.identity.incarnation != incarnation:
            return None
        return record

    def find_live(self, name: str) -> WorkerRecord | None:
        """The live worker with this name."""
        record = self._records.get(name)
        return record if record is not None and record.is_live else None

    def without(self, name: str) -> "Members":
        """The other workers, with the same records."""
        others = Members(self._policy)
        others._records = {known: record for known, record in self._records.items() if known != name}
        return others

    def check_may_join(self, identity: WorkerIdentity, *, is_mock_model: bool) -> None:
        """Raise HandshakeMismatch for a mock worker among real ones, or a real one among mocks.

        Tokens of a mixed pipeline would look like real ones. `Controller.join` checks the name.
        """
        kinds = {True: "a mock stage", False: "a real stage"}
        what = f"kind of worker {identity.name}"
        if is_mock_model and not identity.is_mock:
            raise HandshakeMismatch(what, expected="a mock stage, for a mock model", got=kinds[False])
        for other in (record.identity for record in self if record.is_live):
            if other.name != identity.name and other.is_mock != identity.is_mock:
                expected = f"{kinds[other.is_mock]}, as worker {other.name} is"
                raise HandshakeMismatch(what, expected=expected, got=kinds[identity.is_mock])

    def add(self, identity: WorkerIdentity) -> float:
        """Add a worker that joined; returns its hold in seconds before it is used.

        A worker that is lost more often than others is held, because each loss costs an epoch.
        """
        hold_s = self._hold_s(identity.name)
        before = self._records.get(identity.name) or self._lost.get(identity.name)
        rates = settled(identity.rates, None if before is None else before.rates)
        record = WorkerRecord(identity, rates)
        self._lost.pop(identity.name, None)
        if hold_s:
            record.state = WorkerState.JOINING
            record.detail = (
                f"lost {self._losses[identity.name]} times; it waits {hold_s:g} s before it is used"
            )
        self._records[identity.name] = record
        return hold_s

    def _hold_s(self, name: str) -> float:
        policy = self._policy
        num_excess = self._losses[name] - self._usual_losses(name) - policy.tolerated_losses
        if num_excess < 1:
            return 0.0
        return min(policy.max_hold_s, policy.first_hold_s * 2.0 ** min(num_excess - 1, 10))

    def set_silent(self, name: str, incarnation: Incarnation, *, is_silent: bool) -> None:
        """Mark whether heartbeats of a worker are missing within its lease."""
        record = self.find_process(name, incarnation)
        if record is not None:
            record.is_silent = is_silent

    def release(self, name: str, incarnation: Incarnation) -> bool:
        """End the hold of a worker; False if it is not held."""
        record = self.find_process(name, incarnation)
        if record is None or record.state is not WorkerState.JOINING:
            return False
        record.state, record.detail = WorkerState.SPARE, ""
        return True

    def dismiss(self) -> list[WorkerRecord]:
        """Return draining workers without a stage, each once."""
        leaving = [
            record for record in self if record.is_live and record.is_draining and record.stage is None
        ]
        dismissed = [record for record in leaving if not record.is_dismissed]
        for record in dismissed:
            record.is_dismissed = True
        return dismissed

    def record_loss(self, name: str) -> None:
        """Count the loss of a worker that had a stage."""
        self._losses[name] += 1

    def _usual_losses(self, name: str) -> int:
        """Lower median of the losses of the other workers."""
        others = {*self._records, *self._lost} - {name}
        return median_low(self._losses[other] for other in others) if others else 0

    def halve_losses(self) -> None:
        """Halve the losses of every worker."""
        self._losses = Counter({name: count // 2 for name, count in self._losses.items() if count > 1})

    def readmit_avoided(self) -> None:
        """Readmit workers that plans avoided, after a loss.

        Few workers are left, connections may work now, and workers with non-finite results reload.
        """
        for record in self:
            record.is_avoided = False

    def on_steady(self) -> None:
        """Reset all losses after a steady window."""
        self._losses.clear()

    def remove(self, name: str) -> None:
        del self._records[name]

    @property
    def lost(self) -> tuple[WorkerRecord, ...]:
        """Lost workers that had a stage and have not rejoined, the latest last."""
        return tuple(self._lost.values())

    @property
    def lost_text(self) -> str:
        """The lost workers for `detail`; empty if there are none."""
        return "".join(f"; worker {record.identity.name} is lost" for record in self.lost)

    def forget_lost(self) -> None:
        """Forget lost workers, after all stages serve again."""
        self._lost.clear()

    def release_stages(self) -> None:
        """Release the stages of all workers and remove lost workers."""
        for record in self:
            if record.state is WorkerState.LOST:
                self.remove(record.identity.name)
                self._remember_lost(record)
            record.stage = None
            if record.state in (WorkerState.LOADING, WorkerState.READY):
                record.state = WorkerState.SPARE

    def _remember_lost(self, record: WorkerRecord) -> None:
        if record.stage is not None and not record.is_draining:
            record.detail = f"{record.detail}; it had {record.stage.layers_text}"
            self._lost[record.identity.name] = record
            for name in list(self._lost)[: -self._policy.max_remembered_losses]:
                del self._lost[name]

    @property
    def quarantine_text(self) -> str:
        """The quarantined workers and reasons for `detail`; empty if there are none."""
        quarantined = [record for record in self if record.state is WorkerState.QUARANTINED]
        return "".join(f"; worker {record.identity.name} is out: {record.detail}" for record in quarantined)
