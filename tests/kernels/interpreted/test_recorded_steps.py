"""Steps padded for CUDA graphs, with Triton kernels: outputs and pages equal those of steps as they are.

Products of more rows round differently: float32 values with a spread of about 3 differ by at most 1e-4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import Checkpoint
from stage_worker.backends.step_graphs import Graph, GraphRecorder
from stage_worker.model import attention_work
from stage_worker.model.kernels import by_triton
from tests.fake_device import FakeQueue
from tests.families import make_family
from tests.integration.stage_bench import GREEDY, Log, new_assignment
from tests.staged import staged_executor
from wire.frames import Frame
from wire.steps import SliceResult, Step, StepResult

pytestmark = pytest.mark.kernels
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {},
    "deepseek_v3": {"first_k_dense_replace": 99},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "granitemoehybrid+dense": {"layer_types": ["mamba", "attention", "mamba"]},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense"] * 3,
    },
    "falcon_h1": {},
}


@dataclass(frozen=True)
class _Repeated(Graph):
    run: Callable[[], None]
    counts: list[int]

    def replay(self) -> None:
        self.counts[0] += 1
        self.run()


class Repeats(GraphRecorder):
    """Runs what was recorded again, on the same buffers; kernels in the interpreter are no operators."""

    def __init__(self) -> None:
        self.counts = [0]

    def capture(self, run: Callable[[], None]) -> Graph:
        return _Repeated(run, self.counts)

    @property
    def num_bytes(self) -> int:
        return 0

    def synchronize(self) -> None:
        raise AssertionError("nothing failed")


def steps(log: Log) -> list[Step]:
    """A prompt, a prompt beside decodes, and decodes, the longer ones with several parts of keys."""
    log.begin(1)
    log.add(tuple(range(20)), sampling=GREEDY, max_tokens=9)
    found = []
    while (step := log.scheduler.next_step(0.0)) is not None:
        if len(found) == 1:
            log.add((5, 6, 7), sampling=GREEDY, max_tokens=7)
        answers = [SliceResult(part.sequence, 0, 5) for part in step.slices if part.is_sampled]
        log.complete(StepResult.of(step.epoch, step.step_id, answers))
        found.append(step)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_steps_equal_steps_as_they_are(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_work, "KEY_SPLIT", 8)
    directory = make_family(tmp_path / "model", family, num_layers=3, **FAMILIES[family])
    num_states = 4 if Checkpoint.open(directory).config.is_recurrent else 0
    given = new_assignment(directory, stage=0, num_stages=1)
    assignment = replace(given, max_step_tokens=64, num_states=num_states)
    recorder, cpu = Repeats(), torch.device("cpu")
    eager = staged_executor(assignment, FakeQueue(), cpu, new_kernels=by_triton)
    recorded = staged_executor(assignment, FakeQueue(), cpu, new_kernels=by_triton, recorder=recorder)
    for executor in (eager, recorded):
        executor.begin_epoch(1, stage=0)
    for step in steps(Log(assignment)):
        outputs = [executor.run(Frame(step, ())) for executor in (eager, recorded)]
        assert outputs[0] == outputs[1]
    assert recorder.counts[0] >= 2
    owned = [executor._compute._pages for executor in (eager, recorded)]
    both = ([pages._store for pages in one.groups] for one in owned)
    for expected, found in zip(*both, strict=True):
        torch.testing.assert_close(found[:, :-1], expected[:, :-1], rtol=0, atol=1e-4)
    states = [[] if one.states is None else one.states._parts for one in owned]
    assert num_states == 0 or all(part.any() for part in states[0])
    for expected, found in zip(*states, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
