"""Steps of DeepSeek V4 and of Qwen3.8-Flash-Next on a GPU that does not exist, see `tests.fake_cuda`.

All tensors of a step are on the device: an operation that mixes devices raises. Numbers that the loading of
weights checks are 1, as a device without data has none.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint import Checkpoint
from kvcache import KvGroup, KvWindow
from stage_worker.assignment import Assignment
from stage_worker.executor import StepExecutor
from stage_worker.model import block_indexer, experts, joined_attention, row_orders, weight_reads
from stage_worker.model.choice_work import ChoiceGroup
from stage_worker.model.kernels import by_triton
from tests import torch_kernels
from tests.fake_cuda import DEVICE, FakeCudaQueue, fake_cuda
from tests.families import make_family
from tests.integration.stage_bench import GREEDY, NUM_BLOCKS, Log, hidden_for, new_assignment
from tests.staged import staged_executor
from tests.torch_kernels import use_torch_kernels
from tests.unit.stage_worker.test_fake_cuda_steps import steps
from wire.frames import Frame

LAYERS = {0: (0, 2), 1: (1, 4), 2: (3, 5)}
"""Of each stage: with and without entries, n-grams and recurrent states."""
FAMILIES = ("deepseek_v4", "qwen4_exp_text")
OTHER_GROUPS = {"deepseek_v4": (KvGroup(NUM_BLOCKS, KvWindow(9, 32)),)}


def assigned(directory: Path, family: str, stage: int, **changes: Any) -> Assignment:
    model = make_family(directory / "model", family, **changes)
    begin, end = LAYERS[stage]
    others = tuple(group.num_blocks for group in OTHER_GROUPS.get(family, ()))
    found = replace(new_assignment(model, stage=stage), layer_begin=begin, layer_end=end)
    return replace(found, other_num_blocks=others, num_states=4)


def frames_of(assignment: Assignment, family: str) -> list[tuple[str, Frame]]:
    width = Checkpoint.open(Path(assignment.model_directory)).config.residual_width
    log = Log(assignment, other_groups=OTHER_GROUPS.get(family, ()))
    return [
        (kind, Frame(step, hidden_for(step, width, dtype=assignment.dtype) if assignment.stage else ()))
        for kind, step in steps(log, (GREEDY,))
    ]


def loaded(assignment: Assignment, **options: Any) -> StepExecutor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "__int__", lambda _: 1)
        patch.setattr(row_orders, "head_order", lambda *_: None)
        patch.setattr(weight_reads, "_fill", lambda _: None)  # tables on the host have no data here
        return staged_executor(assignment, FakeCudaQueue(), DEVICE, **options)


def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the two operations for which torch's operators wait, by others of the same results' shapes."""

    def chosen(scores: Tensor, count: int, hidden: Any) -> Tensor:
        for begin, mask in hidden:
            scores.narrow(1, begin, mask.shape[1]).add_(mask)
        return scores.topk(count, dim=-1).indices.to(torch.int32)

    def products(x: Tensor, counts: Tensor, matrices: Tensor, biases: Tensor | None = None) -> Tensor:
        assert x.device == counts.device == matrices.device == DEVICE and biases is None
        return x.new_empty(len(x), matrices.shape[1])

    monkeypatch.setattr(joined_attention, "chosen_tokens", chosen)
    monkeypatch.setattr(block_indexer, "chosen_tokens", chosen)
    monkeypatch.setattr(experts, "separate_products", products)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stage", LAYERS, ids=["FIRST", "MIDDLE", "LAST"])
def test_torchs_operators_compute_a_step_between_one_copy_up_and_one_back(
    family: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one more of each for the layer with n-grams, whose table is on the host."""
    without_waiting(monkeypatch)
    assignment = assigned(tmp_path, family, stage)
    frames = frames_of(assignment, family)
    expected = (2, 2) if family == "qwen4_exp_text" else (1, 1)
    with fake_cuda() as copies:
        executor = loaded(assignment)
        executor.begin_epoch(1, stage=stage)
        for kind, frame in frames:
            copies.counts.clear()
            executor.run(frame)
            assert (copies.counts["up"], copies.counts["down"]) == expected, kind


@pytest.mark.parametrize("stage", LAYERS, ids=["FIRST", "MIDDLE", "LAST"])
def test_kernels_choose_blocks_between_one_copy_up_and_one_back(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 of up to 15 blocks, in prompts and decodes, where a stage has attention; without n-grams, whose rows
    torch's operators copy from the host.
    """
    without_waiting(monkeypatch)
    chosen: list[tuple[int, bool]] = []
    choose = torch_kernels.choose_tokens

    def seen(scores: Tensor, group: ChoiceGroup, top_k: int, *, has_last: bool = False) -> Tensor:
        chosen.append((top_k, has_last))
        return choose(scores, group, top_k, has_last=has_last)

    monkeypatch.setattr(torch_kernels, "choose_tokens", seen)
    use_torch_kernels(monkeypatch)
    assignment = assigned(tmp_path, "qwen4_exp_text", stage, ple_layer_ids=[])
    frames = frames_of(assignment, "qwen4_exp_text")
    with fake_cuda() as copies:
        executor = loaded(assignment, new_kernels=by_triton)
        executor.begin_epoch(1, stage=stage)
        for kind, frame in frames:
            copies.counts.clear()
            executor.run(frame)
            assert (copies.counts["up"], copies.counts["down"]) == (1, 1), kind
    kinds = Checkpoint.open(Path(assignment.model_directory)).config.layers
    num_attending = sum(layer.mixer.index_width > 0 for layer in kinds[slice(*LAYERS[stage])])
    assert len(chosen) >= 4 * num_attending
    assert set(chosen) == ({(8, True)} if num_attending else set())
