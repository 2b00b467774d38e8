"""Steps that are prepared ahead of their hidden states, on every role."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stage_worker.backends.contract import StageOutput
from stage_worker.backends.model_compute import ModelCompute
from stage_worker.backends.tensor_views import from_wire
from tests.checkpoints import make_checkpoint
from tests.integration.stage_bench import new_assignment
from tests.unit.stage_worker.test_executor import Stage
from wire.errors import StepFault, StepFaultKind
from wire.sampling import StepSampling
from wire.steps import SliceResult, Step, StepResult

SAMPLED = StepSampling(temperature=0.8, seed=7, frequency_penalty=0.5, repetition_penalty=1.2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_layers=3)


@pytest.fixture(params=[0, 1, 2], ids=["FIRST", "MIDDLE", "LAST"])
def stage(request: pytest.FixtureRequest, directory: Path) -> Stage:
    return Stage(new_assignment(directory, stage=request.param))


def scripted_steps(stage: Stage) -> Iterator[Step]:
    """Steps whose sequences end and start while others decode; tokens do not depend on what is sampled."""
    for number, max_tokens in enumerate((2, 9, 4)):
        stage.log.add(tuple(range(number, number + 6)), sampling=SAMPLED, max_tokens=max_tokens)
    index = 0
    while (step := stage.log.scheduler.next_step(0.0)) is not None:
        if (index := index + 1) == 2:
            stage.log.add((9, 8, 7), sampling=SAMPLED, max_tokens=3)
        results = [
            SliceResult(part.sequence, part.restart_count, 11 + part.first_position)
            for part in step.slices
            if part.is_sampled
        ]
        stage.log.complete(StepResult.of(step.epoch, step.step_id, results))
        yield step


def comparable(output: StageOutput) -> object:
    if isinstance(output, StepResult):
        return [result.outcome for result in output.results]
    return [
        from_wire(tensor, device=torch.device("cpu"), dtype=torch.float32).tolist()
        for tensor in output.hidden
    ]


@pytest.mark.matrix(4)
@pytest.mark.parametrize("num_ahead", [1, 3, 12])
def test_steps_prepared_ahead_give_the_outputs_of_steps_one_by_one(stage: Stage, num_ahead: int) -> None:
    steps = list(scripted_steps(stage))
    assert sum(len(step.ends) for step in steps) >= 3
    assert any(step.ends and step.starts for step in steps)
    expected = [comparable(stage.run(step)) for step in steps]
    used = stage.executor.stats
    stage.executor.begin_epoch(1, stage=stage.assignment.stage)
    outputs = []
    for begin in range(0, len(steps), num_ahead):
        ahead = steps[begin : begin + num_ahead]
        for step in ahead:
            stage.executor.prepare(step)
        outputs += [comparable(stage.executor.compute(stage.frame(step))) for step in ahead]
    assert outputs == expected
    assert replace(stage.executor.stats, integrity=used.integrity) == used


def test_a_step_refused_ahead_fails_in_its_turn(stage: Stage) -> None:
    steps = list(scripted_steps(stage))[:4]
    wrong = replace(steps[2], digest=steps[2].digest ^ 1)
    for step in (*steps[:2], wrong, steps[3]):
        stage.executor.prepare(step)
    for step in steps[:2]:
        stage.executor.compute(stage.frame(step))
    with pytest.raises(StepFault, match="KV digest after step 2") as refused:
        stage.executor.compute(stage.frame(wrong))
    assert (refused.value.kind, refused.value.step_id) == (StepFaultKind.KV_DIVERGENCE, 2)
    assert refused.value.request_ids == wrong.request_ids
    with pytest.raises(StepFault, match="epoch 1 is refused since KV digest") as later:
        stage.executor.compute(stage.frame(steps[3]))
    assert (later.value.kind, later.value.step_id) == (StepFaultKind.KV_DIVERGENCE, 3)


def test_a_step_that_fails_in_its_computation_refuses_the_prepared_ones(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = list(scripted_steps(stage))[:3]
    for step in steps[:2]:
        stage.executor.prepare(step)

    def fail(*_: object) -> None:
        raise RuntimeError("made up")

    monkeypatch.setattr(ModelCompute, "begin", fail)
    with pytest.raises(StepFault, match="RuntimeError: made up"):
        stage.executor.compute(stage.frame(steps[0]))
    monkeypatch.undo()
    stage.executor.prepare(steps[2])
    for step in steps[1:]:
        with pytest.raises(StepFault, match="epoch 1 is refused since RuntimeError: made up") as refused:
            stage.executor.compute(stage.frame(step))
        assert refused.value.step_id == step.step_id
        assert refused.value.request_ids == step.request_ids


def test_counters_of_a_stage_count_computed_steps(stage: Stage) -> None:
    steps = list(scripted_steps(stage))[:2]
    for step in steps:
        stage.executor.prepare(step)
    assert stage.executor.stats.num_steps == 0
    assert stage.executor.stats.blocks_active > 0
    stage.executor.compute(stage.frame(steps[0]))
    assert stage.executor.stats.num_steps == 1
