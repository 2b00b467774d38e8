"""What goes into a stage and what comes out of it. Made for every step, and not modified after that.

Times are on the clock of `time.monotonic`.
"""

from dataclasses import dataclass

from wire.frames import Frame
from wire.steps import StageTime, StepResult
from wire.tensors import TensorView


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
