"""Mock stages without a network: an assignment, its executor, and a step log that builds valid steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from checkpoint import DType
from stage_worker.assignment import Assignment, ModelShape
from stage_worker.backends.contract import HandedOn, StageOutput
from stage_worker.backends.mock_compute import MockCompute
from stage_worker.executor import StepExecutor
from tests.integration.stage_bench import Log
from wire.frames import Frame
from wire.ids import StageRole
from wire.steps import Step
from wire.tensors import HiddenStates

HIDDEN_SIZE = 6
VOCAB_SIZE = 50
EOS = (7, 8)


def mock_assignment(*, stage: int, num_stages: int = 3, **changes: Any) -> Assignment:
    """One layer for each stage, blocks of four tokens."""
    assignment = Assignment(
        plan_id=1,
        stage=stage,
        num_stages=num_stages,
        role=StageRole.of_stage(stage, num_stages),
        layer_begin=stage,
        layer_end=stage + 1,
        model_directory="",
        fingerprint="mock-1",
        dtype=DType.BF16,
        block_size=4,
        num_blocks=32,
        max_step_tokens=32,
        max_step_sequences=8,
        max_sequence_tokens=64,
        model_shape=ModelShape(hidden_size=HIDDEN_SIZE, vocab_size=VOCAB_SIZE, eos_token_ids=EOS),
    )
    return replace(assignment, **changes)


class MockStages:
    """All stages of a pipeline in a row, in epoch 1."""

    def __init__(self, num_stages: int) -> None:
        assignments = [mock_assignment(stage=stage, num_stages=num_stages) for stage in range(num_stages)]
        self.executors = [StepExecutor(assignment, MockCompute(assignment)) for assignment in assignments]
        for stage, executor in enumerate(self.executors):
            executor.begin_epoch(1, stage=stage)
        self.log = Log(assignments[0])
        self.log.begin(1)

    def run(self, step: Step) -> list[StageOutput]:
        """Outputs of each stage for the step; each stage gets the output of the previous one."""
        outputs = list[StageOutput]()
        hidden: HiddenStates = ()
        for executor in self.executors:
            output = executor.run(Frame(step, hidden))
            hidden = output.hidden if isinstance(output, HandedOn) else ()
            outputs.append(output)
        return outputs
