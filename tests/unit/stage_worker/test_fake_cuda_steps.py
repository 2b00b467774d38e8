"""Steps on a GPU that does not exist: nothing waits for it, and each step is one copy up and one down."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.fake_cuda import DEVICE, FakeCudaQueue, fake_cuda
from tests.integration.stage_bench import GREEDY, Log, hidden_for, new_assignment
from tests.staged import staged_executor
from wire.frames import Frame
from wire.sampling import StepSampling
from wire.steps import SliceResult, Step, StepResult

HIDDEN_SIZE = 64
SAMPLINGS = {
    "greedy": (GREEDY,),
    "unfiltered": (StepSampling(temperature=1.0, seed=7),),
    "filtered": (
        GREEDY,
        StepSampling(temperature=0.7, top_p=0.9, top_k=40, seed=3),
        StepSampling(temperature=1.3, min_p=0.1, typical_p=0.9, seed=4),
        StepSampling(temperature=1.0, seed=5),
    ),
}


def steps(log: Log, samplings: tuple[StepSampling, ...]) -> list[tuple[str, Step]]:
    """A prompt in two chunks, prompts of several sequences, decodes, and decodes beside a prompt."""
    log.begin(1)
    log.add(tuple(range(40)), sampling=samplings[0], max_tokens=4)
    found = []

    def run(kind: str) -> None:
        step = log.scheduler.next_step(0.0)
        assert step is not None
        answers = [SliceResult(part.sequence, 0, 5) for part in step.slices if part.is_sampled]
        log.complete(StepResult.of(step.epoch, step.step_id, answers))
        found.append((kind, step))

    run("chunk")
    run("last chunk")
    for sampling in samplings:
        log.add((1, 2, 3), sampling=sampling, max_tokens=6)
    run("mixed")
    run("decodes")
    log.add((9,), sampling=samplings[-1], max_tokens=3)
    run("mixed with one token")
    run("decodes")
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("samplings", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("stage", [0, 1, 2], ids=["FIRST", "MIDDLE", "LAST"])
def test_a_step_is_one_copy_to_the_device_and_one_back(
    stage: int, samplings: tuple[StepSampling, ...], family: str, tmp_path: Path
) -> None:
    assignment = new_assignment(make_checkpoint(tmp_path, family, num_layers=3), stage=stage)
    frames = [
        (kind, Frame(step, hidden_for(step, HIDDEN_SIZE) if stage else ()))
        for kind, step in steps(Log(assignment), samplings)
    ]
    with fake_cuda() as copies:
        executor = staged_executor(assignment, FakeCudaQueue(), DEVICE)
        executor.begin_epoch(1, stage=stage)
        for kind, frame in frames:
            copies.counts.clear()
            executor.run(frame)
            assert (copies.counts["up"], copies.counts["down"]) == (1, 1), kind
