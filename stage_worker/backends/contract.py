"""Contract between a worker and what computes its stage. Knows no torch.

Times are on the clock of `time.monotonic`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from stage_worker.assignment import Assignment
from stage_worker.validation import SliceLayout
from wire.errors import StepFaultKind
from wire.frames import Frame
from wire.ids import SequenceKey
from wire.steps import SliceResult, StageTime, StartRecord, StepResult
from wire.tensors import TensorView

DEVICE_FAILED_EXIT_CODE = 3
"""Exit code of a worker whose device has failed: start it again."""


class DeviceError(Exception):
    """The device cannot compute any more in this process; the text has the reason."""


class KernelChoice(Enum):
    """AUTO takes the fastest functions that the device, dtype and model allow. PLAIN takes torch's operators
    only. COMPILED takes the compiled functions, and fails where they cannot be used.
    """

    AUTO = "auto"
    PLAIN = "plain"
    COMPILED = "compiled"


class KernelsUnavailable(ValueError):
    """The compiled kernels were asked for and cannot be used; the text has the reason."""


@dataclass(slots=True)
class ReceivedFrame:
    """A frame whose first byte was there at `began_s`, and which was whole and checked at `at_s`."""

    frame: Frame
    at_s: float
    began_s: float


@dataclass(slots=True)
class HandedOn:
    """The same step, byte for byte, with the hidden states that this stage has computed for it."""

    step_id: int
    step_bytes: bytes
    hidden: TensorView | None


@dataclass(slots=True)
class StepTiming:
    """When a stage has done what for one step. `hop_s`: from the sender having it ready to the first byte
    here, None where the sender does not tell.
    """

    began_s: float
    received_s: float
    started_s: float
    ready_s: float
    hop_s: float | None


StageOutput = HandedOn | StepResult
"""What a stage makes of one frame."""


@dataclass(slots=True)
class TimedOutput:
    """An output with what each stage so far has spent on its step; nothing where that is not known.

    `ready_at_us`: when it was ready to send, in microseconds of the coordinator's clock since 1970.
    """

    output: StageOutput
    stage_times: tuple[StageTime, ...]
    ready_at_us: int
    timing: StepTiming


class StepObserver:
    """Every method does nothing by itself. They run on the event loop, after the output has been sent, so
    each takes microseconds. Times are on the clock of `time.monotonic`.
    """

    def epoch_began(self, assignment: Assignment, epoch: int) -> None:
        """This stage serves; it knows no sequences."""

    def step_done(self, frame: Frame, output: TimedOutput, sent_s: float) -> None:
        """A step was computed, and its output handed to the transport at `sent_s`."""

    def epoch_over(self) -> None:
        """Whatever was begun in this epoch is void."""


Computed = TensorView | tuple[SliceResult, ...]
"""Hidden states for the next stage; from LAST one result per slice that is sampled or scored, in order."""


class StageCompute(ABC):
    """The layers of a model, or what stands for them. Used by one executor, in step order."""

    hidden_size: int
    vocab_size: int

    @abstractmethod
    def begin_epoch(self, *, stage: int) -> None:
        """Forgets all sequences; from now on this is stage number `stage`."""

    @abstractmethod
    def start(self, record: StartRecord) -> None:
        """A sequence begins, or begins again."""

    @abstractmethod
    def end(self, sequence: SequenceKey) -> None:
        """A sequence is over."""

    @abstractmethod
    def compute(self, frame: Frame, layouts: Sequence[SliceLayout]) -> Computed:
        """The work of a step with slices, whose `layouts` follow them. Raises StepFault."""

    def fault_kind(self, error: Exception) -> StepFaultKind:
        """Whether `error`, which is no StepFault, is one of memory, of the device, or of our own code."""
        if isinstance(error, MemoryError):
            return StepFaultKind.OUT_OF_MEMORY
        return StepFaultKind.DEVICE if isinstance(error, DeviceError) else StepFaultKind.INTERNAL

    def free_memory(self) -> None:  # noqa: B027
        """Returns memory that is cached and not used to the device."""
