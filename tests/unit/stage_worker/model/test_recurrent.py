"""Recurrent layers served: chunks of any size, snapshots, forks and restarts give the same tokens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from checkpoint import Checkpoint, UnsupportedModel
from checkpoint.implementation import Implementation
from kvcache import CopyState, SavedState, SlotChange
from kvcache.state_store import StateStore
from tests.families import make_family
from tests.local_pipeline import LocalPipeline, Request, Run
from tests.unit.stage_worker.model.test_families import greedy_tokens
from tests.unit.stage_worker.model.test_parity import random_sequences
from wire.errors import StepFault, StepFaultKind
from wire.steps import Prefill, Step

NUM_TOKENS = 12
FAMILIES = ("qwen3_5_text", "granitemoehybrid", "kimi_linear", "falcon_h1", "qwen4_exp_text")


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each recurrent mixer, one with such a mixer beside attention, and one with states of two
    shapes, token ids among them.
    """
    return make_family(tmp_path_factory.mktemp("recurrent") / "model", request.param)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return random_sequences([45])[0].tokens


@pytest.fixture(scope="module")
def expected(directory: Path, prompt: list[int]) -> list[int]:
    return greedy_tokens(directory, prompt)[:NUM_TOKENS]


@pytest.mark.matrix(1, full=5)
@pytest.mark.parametrize("max_step_tokens", [1, 2, 3])
def test_chunks_shorter_than_the_convolution(
    directory: Path, prompt: list[int], expected: list[int], max_step_tokens: int
) -> None:
    pipeline = LocalPipeline(
        directory,
        (1, 1, 1, 1, 1),
        block_size=1,
        max_step_tokens=max_step_tokens,
        num_blocks=200,
        num_states=40,
    )
    assert pipeline.generate([prompt], max_tokens=NUM_TOKENS) == [expected]


def first_positions(run_steps: list[Step], run: Run) -> list[int]:
    """Where the prefill of each sequence begins."""
    found: dict[Any, int] = {}
    for step in run_steps:
        for part in step.slices:
            if isinstance(part.inference_step, Prefill):
                found.setdefault(part.sequence, part.first_position)
    return [found[sequence.key] for sequence in run.sequences]


@pytest.mark.matrix(1)
def test_prefix_hits_begin_at_snapshots_and_nowhere_else(
    directory: Path, prompt: list[int], expected: list[int]
) -> None:
    """A fork (the same prompt), a prompt that leaves it between snapshots, and one before the first."""
    pipeline = LocalPipeline(
        directory, (2, 3), block_size=4, max_step_tokens=64, num_states=16, grid_tokens=16
    )
    steps: list[Step] = []
    pipeline.on_step = lambda step, run: steps.append(step)
    others = [[*prompt[:31], 1, 2], [*prompt[:15], 3]]
    requests = [Request(prompt=prompt, max_tokens=NUM_TOKENS)]
    requests += [Request(prompt=tokens, max_tokens=NUM_TOKENS, arrives_at=40) for tokens in (prompt, *others)]
    run = pipeline.serve(requests)
    assert run.tokens[:2] == [expected, expected]
    assert run.tokens[2:] == [greedy_tokens(directory, tokens)[:NUM_TOKENS] for tokens in others]
    assert first_positions(steps, run) == [0, 44, 16, 0]


@pytest.mark.matrix(2)
def test_a_wrong_snapshot_would_change_the_tokens(
    directory: Path, prompt: list[int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above would see if a copy were left out."""
    pipeline = LocalPipeline(directory, (5,), block_size=4, grid_tokens=16)
    change = StateStore.change
    monkeypatch.setattr(
        StateStore,
        "change",
        lambda store, changes: change(store, [SlotChange(one.target, None) for one in changes]),
    )
    requests = [Request(prompt=prompt, max_tokens=NUM_TOKENS, arrives_at=at) for at in (0, 40)]
    first, second = pipeline.serve(requests).tokens
    assert first == expected != second


@pytest.mark.matrix(2)
def test_a_lost_epoch_restarts_from_the_tokens(
    directory: Path, prompt: list[int], expected: list[int]
) -> None:
    """Stages begin an epoch with whatever the slots held, and with other slots in use."""
    pipeline = LocalPipeline(directory, (1, 4), block_size=4, grid_tokens=16)
    pipeline.generate([random_sequences([30])[0].tokens, [5, 6, 7]], max_tokens=5)
    assert pipeline.generate([prompt], max_tokens=NUM_TOKENS) == [expected]


def test_a_state_of_another_position_is_a_fault(directory: Path, prompt: list[int]) -> None:
    pipeline = LocalPipeline(directory, (5,), block_size=4, max_step_tokens=16, grid_tokens=16)
    seen: list[StepFault] = []

    def falsify(step: Step, run: Run) -> None:
        """The second chunk follows a save that names another position."""
        for entry in step.signals:
            if isinstance(entry.signal, CopyState):
                entry.signal.position += 4

    pipeline.on_step = falsify
    with pytest.raises(StepFault) as fault:
        pipeline.generate([prompt], max_tokens=2)
    seen.append(fault.value)
    assert seen[0].kind is StepFaultKind.KV_SIGNAL
    assert re.search("has seen 16 tokens", seen[0].message)


def test_a_save_that_a_stage_does_not_make_is_a_divergence(directory: Path, prompt: list[int]) -> None:
    pipeline = LocalPipeline(directory, (5,), block_size=4, max_step_tokens=16, grid_tokens=16)

    def falsify(step: Step, run: Run) -> None:
        step.signals = tuple(
            entry
            for entry in step.signals
            if not (isinstance(entry.signal, CopyState) and isinstance(entry.signal.target, SavedState))
        )

    pipeline.on_step = falsify
    with pytest.raises(StepFault) as fault:
        pipeline.generate([prompt], max_tokens=2)
    assert fault.value.kind is StepFaultKind.KV_DIVERGENCE


def test_the_transformers_backend_refuses_recurrent_states(directory: Path) -> None:
    with pytest.raises(UnsupportedModel, match="has recurrent states"):
        Implementation.choose("transformers", Checkpoint.open(directory).config)
