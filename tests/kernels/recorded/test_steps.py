"""Steps of stages by Triton kernels are one copy to a GPU and one back, and nothing waits in between.

On tensors without data: a read of a value, or a mix of devices, raises. Kernels are recorded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint import DType
from stage_worker.assignment import Assignment
from stage_worker.model.kernels import by_triton
from tests.fake_cuda import fake_cuda
from tests.recorded_launches import Launches, record_launches
from tests.unit.stage_worker.test_fake_cuda_families import LAYERS, assigned, frames_of, loaded

pytestmark = pytest.mark.kernels

TRITON_FAMILIES = ("deepseek_v4", "qwen4_exp_text")
_ENTRIES = {"last_rotation_kernel": 2, "joined_kernel": 1}
ATTENTION: dict[int, dict[str, int]] = {
    0: {"last_rotation_kernel": 2, "attend_kernel": 1},
    1: _ENTRIES,
    2: _ENTRIES | {"last_rotation_kernel": 3, "scores_kernel": 1, "choice_kernel": 1},
}
"""Launches of a layer's attention: queries with keys, an indexer's queries, and their output, back."""
BLOCKS = {
    "heads_kernel": 1,
    "index_kernel": 1,
    "block_keys_kernel": 1,
    "scores_kernel": 1,
    "choice_kernel": 1,
    "attend_kernel": 1,
}
NGRAMS = {"lookup_kernel": 1, "advance_kernel": 1, "gates_kernel": 1, "convolution_kernel": 2}
"""With the convolution of Gated DeltaNet."""
POOLED = {0: 0, 1: 0, 2: 2}
"""Of entries and keys of the indexer; of 8 tokens none ends in that step."""


def launched(assignment: Assignment, family: str, launches: Launches) -> list[tuple[str, Counter[str]]]:
    """Kernels of each step by their names; each step is one copy up and one down."""
    frames, found = frames_of(assignment, family), []
    with fake_cuda() as copies:
        executor = loaded(assignment, new_kernels=by_triton)
        executor.begin_epoch(1, stage=assignment.stage)
        for kind, frame in frames:
            copies.counts.clear()
            launches.clear()
            executor.run(frame)
            assert (copies.counts["up"], copies.counts["down"]) == (1, 1), kind
            found.append((kind, Counter(launches.names)))
    return found


@pytest.mark.parametrize("family", TRITON_FAMILIES)
@pytest.mark.parametrize("stage", LAYERS, ids=["FIRST", "MIDDLE", "LAST"])
def test_a_step_is_one_copy_to_the_device_and_one_back(
    family: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = record_launches(monkeypatch)
    assignment = replace(assigned(tmp_path, family, stage), dtype=DType.BF16)
    found = launched(assignment, family, launches)
    assert len(found) == 6 and all(names for _, names in found)


@pytest.mark.parametrize("layer", ATTENTION, ids=["window", "all entries", "chosen entries"])
def test_launches_of_compressed_attention(
    layer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one layer, in steps of decodes: entries end in the first one, and in the last one none does."""
    launches, every = record_launches(monkeypatch), {name for names in ATTENTION.values() for name in names}
    found = replace(assigned(tmp_path, "deepseek_v4", 1), dtype=DType.BF16)
    steps = launched(replace(found, layer_begin=layer, layer_end=layer + 1), "deepseek_v4", launches)
    (_, first), (_, last) = (step for step in steps if step[0] == "decodes")
    assert {name: number for name, number in last.items() if name in every} == ATTENTION[layer]
    assert (first["pooling_kernel"], last["pooling_kernel"]) == (POOLED[layer], 0)


@pytest.mark.parametrize(("layer", "expected"), [(1, BLOCKS), (3, NGRAMS)])
def test_launches_of_blocks_and_ngrams(
    layer: int, expected: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one layer, in steps of decodes."""
    launches = record_launches(monkeypatch)
    found = replace(assigned(tmp_path, "qwen4_exp_text", 1), dtype=DType.BF16)
    steps = launched(replace(found, layer_begin=layer, layer_end=layer + 1), "qwen4_exp_text", launches)
    for names in (step for kind, step in steps if kind == "decodes"):
        assert expected.items() <= names.items()
