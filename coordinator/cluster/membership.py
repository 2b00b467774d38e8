"""Workers of the cluster and which of them may get a stage. Pure."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from statistics import median_low

from coordinator.planner.plan import StagePlan
from coordinator.recovery.policy import RecoveryPolicy
from wire.errors import HandshakeMismatch
from wire.ids import Incarnation


class WorkerState(Enum):
    """State of one worker. JOINING: held because it was lost repeatedly. SUSPECT: silent, but within its
    lease, or possibly the cause of a failed plan and used last.
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


@dataclass(slots=True)
class WorkerRecord:
    """A worker that has joined, live or lost. `detail` is the reason for its state."""

    identity: WorkerIdentity
    state: WorkerState = WorkerState.SPARE
    detail: str = ""
    stage: StagePlan | None = None
    num_failed_loads: int = 0
    is_silent: bool = False
    is_draining: bool = False
    is_dismissed: bool = False
    is_left_out: bool = False
    produced_non_finite: bool = False
    has_wrong_weights: bool = False
    is_culprit: bool = False
    """Quarantined because of a failed self-check."""
    doubts: tuple[str, ...] = ()
    """How plans failed that it may be the cause of."""

    @property
    def is_live(self) -> bool:
        return self.state is not WorkerState.LOST

    @property
    def is_usable(self) -> bool:
        """Can get a stage. A quarantined worker cannot until it rejoins."""
        out = (WorkerState.LOST, WorkerState.QUARANTINED, WorkerState.JOINING)
        return self.state not in out and not self.is_draining and not self.is_left_out

    @property
    def is_held(self) -> bool:
        """Can get a stage only where there is no plan without it."""
        return self.state is WorkerState.JOINING and not self.is_draining and not self.is_left_out

    def quarantine(self, reason: str) -> None:
        """Excludes it from plans until it rejoins."""
        self.state, self.detail = WorkerState.QUARANTINED, reason

    def readmit(self) -> None:
        """Ends a quarantine."""
        self.state, self.detail, self.is_culprit = WorkerState.SPARE, "", False

    def fail_to_load(self, reason: str, *, max_failures: int) -> bool:
        """Counts a failed load; True once it is quarantined."""
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
        is_suspect = self.is_silent or self.is_left_out or is_doubtful
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
        """The worker with this name, live or lost."""
        return self._records.get(name)

    def live(self, name: str, incarnation: Incarnation) -> WorkerRecord | None:
        """The record of this process; None once it is lost or replaced."""
        record = self._records.get(name)
        is_it = record is not None and record.is_live and record.identity.incarnation == incarnation
        return record if is_it else None

    def find(self, name: str) -> WorkerRecord | None:
        """The live worker with this name."""
        record = self._records.get(name)
        return record if record is not None and record.is_live else None

    def check_may_join(self, identity: WorkerIdentity, *, is_mock_model: bool) -> None:
        """Raises HandshakeMismatch for a mock stage among real ones, or a real one among mocks: tokens of a
        pipeline with both would look like real ones. `Controller.join` decides who may have a name.
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
        """Adds a worker that has joined. Returns its hold in seconds before it is used: a worker that is lost
        repeatedly, while the others are not, would cost an epoch each time.
        """
        hold_s = self._hold_s(identity.name)
        record = WorkerRecord(identity)
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

    def note_silence(self, name: str, incarnation: Incarnation, *, is_silent: bool) -> None:
        """Marks a worker whose heartbeats are missing, or arrive again, within its lease."""
        record = self.live(name, incarnation)
        if record is not None:
            record.is_silent = is_silent

    def release(self, name: str, incarnation: Incarnation) -> bool:
        """Ends the hold of a worker; False if it is not held."""
        record = self.live(name, incarnation)
        if record is None or record.state is not WorkerState.JOINING:
            return False
        record.state, record.detail = WorkerState.SPARE, ""
        return True

    def dismiss(self) -> list[WorkerRecord]:
        """Draining workers without a stage; each is returned once."""
        leaving = [
            record for record in self if record.is_live and record.is_draining and record.stage is None
        ]
        dismissed = [record for record in leaving if not record.is_dismissed]
        for record in dismissed:
            record.is_dismissed = True
        return dismissed

    def note_loss(self, name: str) -> None:
        """Counts the loss of a worker that had a stage."""
        self._losses[name] += 1

    def _usual_losses(self, name: str) -> int:
        """Lower median of the losses of the other workers."""
        others = {*self._records, *self._lost} - {name}
        return median_low(self._losses[other] for other in others) if others else 0

    def forget_half(self) -> None:
        """Halves the losses of every worker."""
        self._losses = Counter({name: count // 2 for name, count in self._losses.items() if count > 1})

    def try_all_again(self) -> None:
        """Readmits workers that plans avoided: few are left, connections may work now, and those with
        non-finite results reload their layers.
        """
        for record in self:
            record.is_left_out = False

    def note_steady(self) -> None:
        """Forgets all losses after a steady window."""
        self._losses.clear()

    def remove(self, name: str) -> None:
        del self._records[name]

    @property
    def lost(self) -> tuple[WorkerRecord, ...]:
        """Lost workers that had a stage and have not rejoined, the latest last."""
        return tuple(self._lost.values())

    @property
    def missed(self) -> str:
        """The lost workers as text; empty if there are none."""
        return "".join(f"; worker {record.identity.name} is lost" for record in self.lost)

    def forget_lost(self) -> None:
        """All stages serve again."""
        self._lost.clear()

    def release_stages(self) -> None:
        """Takes every stage back and removes lost workers."""
        for record in self:
            if record.state is WorkerState.LOST:
                self.remove(record.identity.name)
                self._note_lost(record)
            record.stage = None
            if record.state in (WorkerState.LOADING, WorkerState.READY):
                record.state = WorkerState.SPARE

    def _note_lost(self, record: WorkerRecord) -> None:
        if record.stage is not None and not record.is_draining:
            record.detail = f"{record.detail}; it had {record.stage.layers_text}"
            self._lost[record.identity.name] = record
            for name in list(self._lost)[: -self._policy.max_remembered_losses]:
                del self._lost[name]

    @property
    def quarantine(self) -> str:
        """The quarantined workers and the reasons as text; empty if there are none."""
        out = [record for record in self if record.state is WorkerState.QUARANTINED]
        return "".join(f"; worker {each.identity.name} is out: {each.detail}" for each in out)
