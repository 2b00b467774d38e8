"""Contract between a worker and its stage computation, without torch. Times are `time.monotonic`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from checkpoint import BoundaryTensor
from kvcache import SlotChange
from stage_worker.assignment import Assignment
from stage_worker.validation import SliceLayout
from wire.errors import StepFaultKind
from wire.frames import Frame
from wire.ids import SequenceKey
from wire.steps import SliceResult, StageTime, StartRecord, Step, StepResult
from wire.tensors import HiddenStates


class DeviceError(Exception):
    """The device can no longer compute in this process; the text has the reason."""


class DeviceHung(DeviceError):
    """The device has not ended its work in time."""


class KernelChoice(Enum):
    """Which functions compute a stage.

    AUTO takes the fastest functions that the device, dtype and model allow, PLAIN only torch's operators,
    COMPILED the compiled functions, failing where they are unavailable.
    """

    AUTO = "auto"
    PLAIN = "plain"
    COMPILED = "compiled"


class CudaGraphs(Enum):
    """Whether a stage on a GPU records its steps as CUDA graphs: AUTO where possible, OFF never."""

    AUTO = "auto"
    OFF = "off"


class KernelsUnavailable(ValueError):
    """The compiled kernels were requested but are unavailable; the text has the reason."""


@dataclass(slots=True)
class ReceivedFrame:
    """A frame with the times of its first byte (`began_s`) and of its completion (`at_s`)."""

    frame: Frame
    at_s: float
    began_s: float


@dataclass(slots=True)
class HandedOn:
    """The hidden states that this stage computed for a step; empty for a step without slices."""

    step_id: int
    step_checksum: int
    hidden: HiddenStates


@dataclass(slots=True)
class StepTiming:
    """Times of one step on one stage; `hop_s` is from output to first byte, None if not reported."""

    began_s: float
    received_s: float
    started_s: float
    ready_s: float
    hop_s: float | None


StageOutput = HandedOn | StepResult
"""Output of a stage for one frame."""


@dataclass(slots=True)
class TimedOutput:
    """An output with stage times; `ready_at_us` is on the coordinator's clock since 1970, in microseconds."""

    output: StageOutput
    stage_times: tuple[StageTime, ...]
    ready_at_us: int
    timing: StepTiming


class StepObserver:
    """Methods default to no-ops; they run on the event loop after sending, and must take microseconds
    only.
    """

    def epoch_began(self, assignment: Assignment, epoch: int) -> None:
        """The stage begins to serve, without sequences."""

    def step_done(self, frame: Frame, output: TimedOutput, sent_s: float) -> None:
        """A step was computed, and its output passed to the transport at `sent_s`."""

    def epoch_over(self) -> None:
        """Discard the state of this epoch."""


Computed = HiddenStates | StepResult
"""Hidden states for the next stage; on LAST, the result without stage times."""


Finish = Callable[[], Computed]
"""Waits for the end of a step; raises StepFault. Called once, in step order, by any one thread."""


class EagerReason(Enum):
    """Why a step of a stage with CUDA graphs ran eagerly.

    FIRST: its size is recorded with it. NO_SIZE: no size has room for it. LIMIT: the graphs have reached the
    limit of their number or memory. FAILED: its size could not be recorded.
    """

    FIRST = "first"
    NO_SIZE = "no_size"
    LIMIT = "limit"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSize:
    """Steps of up to `num_tokens` tokens, decodes only unless `has_prompts`.

    `num_graphs` are recorded, by attention work.
    """

    num_tokens: int
    has_prompts: bool
    num_graphs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCounts:
    """CUDA graphs of a stage, and its steps since it was loaded.

    `num_replayed` steps replayed a graph, `eager` ones did not, by reason. `sizes` are recorded, `num_failed`
    graphs could not be. `pool_bytes` is memory that the graphs hold.
    """

    num_replayed: int = 0
    eager: Mapping[EagerReason, int] = field(default_factory=dict)
    sizes: tuple[GraphSize, ...] = ()
    num_failed: int = 0
    pool_bytes: int = 0

    @property
    def num_eager(self) -> int:
        return sum(self.eager.values())

    @property
    def num_recorded(self) -> int:
        return sum(size.num_graphs for size in self.sizes)


class StageCompute(ABC):
    """The layers of a model, or a mock of them. Used by one executor, in step order.

    `boundary` are the tensors that it takes from the stage before, and hands to the next one. `depth` steps
    may be begun before the first of them is finished; with 1, `begin` computes the step.
    """

    depth: int = 1

    boundary: tuple[BoundaryTensor, ...]
    vocab_size: int

    @abstractmethod
    def begin_epoch(self, *, stage: int) -> None:
        """Drop all sequences and set the stage's number."""

    @abstractmethod
    def start(self, record: StartRecord) -> None:
        """Start or restart a sequence."""

    @abstractmethod
    def end(self, sequence: SequenceKey) -> None: ...

    def prepare(self, step: Step, layouts: Sequence[SliceLayout]) -> object:
        """Do what the next step needs before its hidden states arrive. Raises StepFault.

        `layouts` are in the order of its slices, and belong to the block tables as they are now. Earlier
        steps may not have been computed yet. Returns what `compute` takes; by default the layouts.
        """
        return list(layouts)

    def change_states(self, changes: Sequence[SlotChange]) -> None:  # noqa: B027
        """Change slots of recurrent states, in order, before the step that follows is computed.

        Nothing to do without recurrent layers on the stage.
        """

    @abstractmethod
    def compute(self, frame: Frame, prepared: object) -> Computed:
        """Compute a step with what `prepare` returned for it. Raises StepFault."""

    def begin(self, frame: Frame, prepared: object) -> Finish:
        """Begin to compute a step, with what `prepare` returned for it; see `depth`. Raises StepFault."""
        computed = self.compute(frame, prepared)
        return lambda: computed

    def take_late_rows(self, *, may_wait: bool) -> tuple[SliceResult, ...]:
        """Take the results of rows that were late in earlier results, on LAST, when a step is finished.

        May wait a moment for one if it `may_wait`. By default no row is late.
        """
        return ()

    @property
    def graphs(self) -> GraphCounts | None:
        """CUDA graphs since the stage was loaded; None for a stage without."""
        return None

    def fault_kind(self, error: Exception) -> StepFaultKind:
        """Classify `error`, which is not a StepFault: out of memory, device, or internal."""
        if isinstance(error, MemoryError):
            return StepFaultKind.OUT_OF_MEMORY
        return StepFaultKind.DEVICE if isinstance(error, DeviceError) else StepFaultKind.INTERNAL

    def free_memory(self) -> None:  # noqa: B027
        """Return unused cached memory to the device."""
