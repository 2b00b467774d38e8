"""What goes into a stage and what comes out of it. Made for every step, and not modified after that."""

from dataclasses import dataclass

from wire.frames import Frame
from wire.steps import StageTime, StepResult
from wire.tensors import TensorView


@dataclass(slots=True)
class ReceivedFrame:
    """A frame whose last chunk was there at `at_s` on the clock of `time.monotonic`."""

    frame: Frame
    at_s: float


@dataclass(slots=True)
class HandedOn:
    """The same step, byte for byte, with the hidden states that this stage has computed for it."""

    step_id: int
    step_bytes: bytes
    hidden: TensorView | None


StageOutput = HandedOn | StepResult
"""What a stage makes of one frame."""


@dataclass(slots=True)
class TimedOutput:
    """An output with what each stage so far has spent on its step; nothing where that is not known."""

    output: StageOutput
    stage_times: tuple[StageTime, ...]
