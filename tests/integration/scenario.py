"""A short, fixed scenario for one stage: the same frames in every epoch, except the epoch number."""

from collections.abc import Iterator

import torch

from stage_worker.assignment import Assignment
from stage_worker.backends.contract import HandedOn, StageOutput
from stage_worker.backends.tensor_views import from_wire
from stage_worker.loading.stage_loader import WorkerResources, load_stage
from tests.frame_messages import encode_frame
from tests.integration.doubles import PredecessorDouble
from tests.integration.stage_bench import Log, StageBench, hidden_for
from wire.frames import Frame
from wire.ids import RequestId
from wire.step_codec import encode_step
from wire.steps import SliceResult, Step, StepResult
from wire.tensors import HiddenStates

PROMPTS = ((1, 2, 3, 4, 5), (9, 8, 7, 6, 5))
REQUESTS = tuple(RequestId(bytes([index] * 16)) for index in (1, 2))
HIDDEN_SIZE = 64
NUM_STEPS = 5
"""A prefill of both prompts and four decodes, which reach a new block."""

Comparable = list[object] | torch.Tensor
"""Outcomes of a step on LAST, else hidden states."""


class ScriptedLog:
    """Builds the frames. Tokens are scripted, independent of the tokens sampled by LAST."""

    def __init__(self, assignment: Assignment, epoch: int) -> None:
        self._takes_hidden = not assignment.role.has_embeddings
        self._log = Log(assignment)
        self._log.begin(epoch)
        for request_id, prompt in zip(REQUESTS, PROMPTS, strict=True):
            self._log.add(prompt, request_id=request_id)

    def next_frame(self) -> tuple[Step, HiddenStates]:
        """The next step, with hidden states if the stage receives any."""
        step = self._log.step()
        self._log.complete(StepResult.of(step.epoch, step.step_id, tuple(_scripted_results(step))))
        return step, hidden_for(step, HIDDEN_SIZE) if self._takes_hidden else ()


async def run_scenario(bench: StageBench) -> list[Comparable]:
    """Run a new epoch on the bench; return the output per frame."""
    log = ScriptedLog(bench.assignment, await bench.begin_epoch())
    predecessor = await bench.predecessor()
    outputs = [await run_frame(bench, predecessor, *log.next_frame()) for _ in range(NUM_STEPS)]
    await predecessor.close()
    return outputs


async def run_frame(
    bench: StageBench, predecessor: PredecessorDouble, step: Step, hidden: HiddenStates
) -> Comparable:
    """Send one frame; return the stage's output."""
    to_first = bench.assignment.role.has_embeddings
    await predecessor.send(encode_frame(encode_step(step), step.step_id, hidden, to_first=to_first))
    return comparable_of(await bench.output())


def expected_outputs(assignment: Assignment) -> list[Comparable]:
    """Outputs of the same stage computed in this thread, without worker and network."""
    resources = WorkerResources(device=torch.device("cpu"), memory_bytes=1 << 30, model_directory=None)
    executor = load_stage(assignment, resources).executor
    executor.begin_epoch(1, stage=assignment.stage)
    log = ScriptedLog(assignment, 1)
    outputs = []
    for _ in range(NUM_STEPS):
        step, hidden = log.next_frame()
        outputs.append(comparable_of(_content(executor.run(Frame(step, hidden)))))
    return outputs


def _scripted_results(step: Step) -> Iterator[SliceResult]:
    for step_slice in step.slices:
        if step_slice.is_sampled:
            yield SliceResult(step_slice.sequence, step_slice.restart_count, 11 + step_slice.first_position)


def _content(output: StageOutput) -> HiddenStates | StepResult:
    return output.hidden if isinstance(output, HandedOn) else output


def comparable_of(output: HiddenStates | StepResult) -> Comparable:
    if isinstance(output, StepResult):
        return [entry.outcome for entry in output.results]
    return from_wire(output[0], device=torch.device("cpu"), dtype=torch.float32)


def assert_same(outputs: list[Comparable], expected: list[Comparable]) -> None:
    """Assert equal tokens, and hidden states equal up to the summation order of threads."""
    assert len(outputs) == len(expected)
    for output, wanted in zip(outputs, expected, strict=True):
        if isinstance(wanted, torch.Tensor):
            torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-5)
        else:
            assert output == wanted
