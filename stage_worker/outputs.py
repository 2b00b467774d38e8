"""What a stage makes of one frame."""

from dataclasses import dataclass

from wire.steps import StepResult
from wire.tensors import TensorView


@dataclass(frozen=True, slots=True)
class HandedOn:
    """The same step, byte for byte, with the hidden states that this stage has computed for it."""

    step_id: int
    step_bytes: bytes
    hidden: TensorView | None


StageOutput = HandedOn | StepResult
