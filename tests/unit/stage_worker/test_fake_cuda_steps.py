"""Steps on a GPU that does not exist: nothing waits for it, and each step is one copy up and one down.

With graphs, a step is one launch between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from checkpoint import Checkpoint
from kvcache.states import CopyState, TakeState
from stage_worker.assignment import Assignment
from stage_worker.backends.step_graphs import Graph, GraphRecorder
from stage_worker.executor import StepExecutor
from stage_worker.model import indexer, row_orders
from stage_worker.model.choice_work import ChoiceGroup
from stage_worker.model.kernels import by_triton
from tests import torch_kernels
from tests.checkpoints import make_checkpoint
from tests.fake_cuda import DEVICE, FakeCudaQueue, fake_cuda
from tests.families import make_family
from tests.integration.stage_bench import GREEDY, Log, hidden_for, new_assignment
from tests.staged import staged_executor
from tests.torch_kernels import use_torch_kernels
from wire.frames import Frame
from wire.sampling import GrammarSpec, StepSampling
from wire.steps import SliceResult, Step, StepResult, TokenLogprobs

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
    "top-p": (StepSampling(temperature=1.0, top_p=0.9, seed=1),),
    "min-p": (StepSampling(temperature=1.0, min_p=0.1, seed=1),),
    "bias": (replace(GREEDY, logit_bias=((3, 1.5), (9, -2.0))), GREEDY),
    "penalties": (
        StepSampling(temperature=0.8, top_k=5, repetition_penalty=1.2, seed=1),
        replace(GREEDY, frequency_penalty=0.5, presence_penalty=-0.5),
    ),
    "masks": (
        StepSampling(temperature=1.0, allowed_token_ids=(3, 4, 5), seed=2),
        replace(GREEDY, bad_words=((7,), (5, 8)), min_tokens=3, min_tokens_hold_back=(2,)),
    ),
    "edits and filters": (
        StepSampling(temperature=0.7, top_p=0.9, logit_bias=((3, 1.0),), bad_words=((4,),), seed=2),
        StepSampling(temperature=0.7, min_p=0.1, frequency_penalty=0.3, seed=2),
        StepSampling(temperature=1.0, seed=5),
    ),
}
NEED_A_LOOK = {
    "log-probabilities": (replace(GREEDY, logprobs=0), GREEDY),
    "scored prompt": (replace(GREEDY, prompt_logprobs=1), GREEDY),
    "grammar": (replace(GREEDY, grammar=GrammarSpec(definition="x", tokenizer_checksum=1)), GREEDY),
    "bad parameters": (replace(GREEDY, top_p=2.0), StepSampling(temperature=1.0)),
}
"""After the step, but not before."""
LOGPROBS = TokenLogprobs(5, -1.0, 1, ())


def with_scored_chunks(step: Step) -> Step:
    chunks = [
        replace(chunk, inference_step=replace(chunk.inference_step, is_scored=True)) for chunk in step.chunks
    ]
    return replace(step, chunks=tuple(chunks))


def steps(log: Log, samplings: tuple[StepSampling, ...], *, epoch: int = 1) -> list[tuple[str, Step]]:
    """A prompt in two chunks, prompts of several sequences, decodes, and decodes beside a prompt."""
    log.begin(epoch)
    log.add(tuple(range(40)), sampling=samplings[0], max_tokens=4)
    found, with_logprobs = [], set()

    def run(kind: str) -> None:
        step = log.scheduler.next_step(0.0)
        assert step is not None
        with_logprobs.update(start.sequence for start in step.starts if start.sampling.logprobs is not None)
        answers = [
            SliceResult(part.sequence, 0, 5, LOGPROBS if part.sequence in with_logprobs else None)
            for part in step.slices
            if part.is_sampled
        ]
        log.complete(StepResult.of(step.epoch, step.step_id, answers))
        found.append((kind, with_scored_chunks(step) if samplings[0].prompt_logprobs else step))

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


@pytest.mark.matrix(6)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("samplings", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("stage", [0, 1, 2], ids=["FIRST", "MIDDLE", "LAST"])
def test_a_step_is_one_copy_to_the_device_and_one_back(
    stage: int, samplings: tuple[StepSampling, ...], family: str, tmp_path: Path
) -> None:
    for kind, copies in copies_of(samplings, stage, tmp_path, family, StepExecutor.run):
        assert copies == (1, 1), kind


STATES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "granitemoehybrid+dense": {"layer_types": ["mamba", "attention", "mamba"]},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense"] * 3,
    },
    "falcon_h1": {},
}
"""Families with recurrent layers on the first and last of three stages."""


@pytest.mark.matrix(2)
@pytest.mark.parametrize("family", STATES)
@pytest.mark.parametrize("stage", [0, 2], ids=["FIRST", "LAST"])
def test_a_step_with_states_is_one_copy_to_the_device_and_one_back(
    stage: int, family: str, tmp_path: Path
) -> None:
    """By torch's operators; changes of slots are copies on the device."""
    for kind, copies in copies_of(SAMPLINGS["greedy"], stage, tmp_path, family, StepExecutor.run):
        assert copies == (1, 1), kind


CHOICES: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"first_k_dense_replace": 99},
    "glm_moe_dsa": {"mlp_layer_types": ["dense"] * 3, "indexer_types": ["full", "shared", "full"]},
}
"""Families whose queries choose 24 of up to 46 tokens, without experts, which torch's operators wait for."""


@pytest.mark.parametrize("family", CHOICES)
def test_a_step_with_choices_is_one_copy_to_the_device_and_one_back(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stage of a layer with an indexer and, in one of the families, a layer that shares its choice."""
    use_torch_kernels(monkeypatch)
    monkeypatch.setattr(row_orders, "head_order", lambda *_: None)  # of weights, while they are loaded
    widths = []
    choose = torch_kernels.choose_tokens

    def seen(scores: Tensor, group: ChoiceGroup, top_k: int) -> Tensor:
        widths.append(top_k)
        return choose(scores, group, top_k)

    monkeypatch.setattr(indexer.load_triton("choices"), "choose", seen)
    model = make_family(tmp_path / "model", family, num_layers=3, **CHOICES[family])
    assignment = replace(new_assignment(model, stage=0), layer_end=2)
    with fake_cuda() as copies:
        executor = staged_executor(assignment, FakeCudaQueue(), DEVICE, new_kernels=by_triton)
        executor.begin_epoch(1, stage=0)
        for kind, step in steps(Log(assignment), SAMPLINGS["greedy"]):
            copies.counts.clear()
            executor.run(Frame(step, ()))
            assert (copies.counts["up"], copies.counts["down"]) == (1, 1), kind
    assert len(widths) >= 4
    assert set(widths) == {24}


@pytest.mark.matrix(2)
@pytest.mark.parametrize("samplings", NEED_A_LOOK.values(), ids=NEED_A_LOOK.keys())
def test_rows_that_need_a_look_wait_for_the_device_after_their_step_only(
    samplings: tuple[StepSampling, ...], tmp_path: Path
) -> None:
    def begin(executor: StepExecutor, frame: Frame) -> None:
        executor.prepare(frame.step)
        assert executor.begin(frame).refusal is None

    for kind, copies in copies_of(samplings, 2, tmp_path, "llama", begin):
        assert copies == (1, 1), kind


def copies_of(
    samplings: tuple[StepSampling, ...],
    stage: int,
    directory: Path,
    family: str,
    run: Callable[[StepExecutor, Frame], object],
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Copies to the device and back of each step that `run` computes or begins."""
    assignment, width = stage_of(directory, family, stage)
    frames = [
        (kind, Frame(step, hidden_for(step, width) if stage else ()))
        for kind, step in steps(Log(assignment), samplings)
    ]
    with fake_cuda() as copies:
        executor = staged_executor(assignment, FakeCudaQueue(), DEVICE)
        executor.begin_epoch(1, stage=stage)
        for kind, frame in frames:
            copies.counts.clear()
            run(executor, frame)
            yield kind, (copies.counts["up"], copies.counts["down"])


def stage_of(directory: Path, family: str, stage: int) -> tuple[Assignment, int]:
    """A stage of one layer of three, and the width of hidden states."""
    if family not in STATES:
        return new_assignment(make_checkpoint(directory, family, num_layers=3), stage=stage), HIDDEN_SIZE
    model = make_family(directory / "model", family, num_layers=3, **STATES[family])
    width = Checkpoint.open(model).config.hidden_size
    return replace(new_assignment(model, stage=stage), num_states=4), width


class CountedGraphs(GraphRecorder, Graph):
    """Runs what is recorded, where waiting raises, and counts replays."""

    def __init__(self) -> None:
        self.num_recorded = self.num_launches = 0

    def capture(self, run: Callable[[], None]) -> Graph:
        self.num_recorded += 1
        run()
        return self

    def replay(self) -> None:
        self.num_launches += 1

    @property
    def num_bytes(self) -> int:
        return 0

    def synchronize(self) -> None:
        raise AssertionError("nothing failed")


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    ("family", "stage"),
    [*itertools.product(["llama", "qwen3"], [0, 1, 2]), *itertools.product(STATES, [0, 2])],
)
def test_a_recorded_step_is_one_launch(
    family: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside it, a step copies its data to the graph's buffer, and its results from there; LAST samples steps
    with prompts beside the graph. Before it, slots of states that begin are zeroed or copied. Prompts of
    latent attention, which torch's operators compute, are not recorded.
    """
    use_torch_kernels(monkeypatch)
    found, width = stage_of(tmp_path, family, stage)
    assignment = replace(found, max_step_tokens=64)
    samplings = SAMPLINGS["greedy"]
    frames = [
        Frame(step, hidden_for(step, width) if stage else ())
        for epoch in (1, 2)
        for _, step in steps(Log(assignment), samplings, epoch=epoch)
    ]
    recorder = CountedGraphs()
    with fake_cuda() as copies:
        executor = staged_executor(
            assignment, FakeCudaQueue(), DEVICE, recorder=recorder, new_kernels=by_triton
        )
        for frame in frames:
            if frame.step.step_id == 0:
                executor.begin_epoch(frame.step.epoch, stage=stage)
                num_recorded = recorder.num_recorded
            copies.counts.clear()
            recorder.num_launches = 0
            executor.run(frame)
            assert (copies.counts["up"], copies.counts["down"]) == (1, 1)
            if frame.step.epoch == 2 and not (family == "kimi_linear" and frame.step.chunks):
                assert recorder.num_launches == 1
                is_whole = stage < 2 or not frame.step.chunks
                begun = [one for one in frame.step.signals if isinstance(one.signal, TakeState | CopyState)]
                most = 40 + 16 * len(begun)  # views count, too
                assert not is_whole or copies.counts["operations"] < most
    assert recorder.num_recorded == num_recorded > 1
