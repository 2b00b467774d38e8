"""What a stage computes for a step that is legal; everything else of a step is the same on every stage."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from stage_worker.device_errors import DeviceError
from stage_worker.slice_layout import SliceLayout
from wire.errors import StepFaultKind
from wire.frames import Frame
from wire.ids import SequenceKey
from wire.steps import SliceResult, StartRecord
from wire.tensors import TensorView

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
