"""What a step with Triton kernels allocates is what the planner counts for it.

On the CPU, by the storages of all tensors that torch's operators return while they are referenced; a GPU's
allocator rounds them up.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from checkpoint import Blueprint, Checkpoint, DType
from coordinator.planner import stage_memory
from coordinator.planner.plan import DeviceKind, StepLimits
from coordinator.planner.stage_memory import StageMemory
from kvcache.pages import KvPages
from stage_worker.assignment import Assignment
from stage_worker.backends.model_compute import ModelCompute
from stage_worker.executor import StepExecutor
from stage_worker.loading.stage_pages import new_pages
from stage_worker.loading.warmup import run_largest_step
from stage_worker.model import DecoderStage
from stage_worker.model.kernels import by_triton
from stage_worker.model.triton_kernels import choices, launch
from tests.checkpoints import make_checkpoint
from tests.families import make_family
from tests.integration.stage_bench import new_assignment

pytestmark = pytest.mark.kernels

CPU = torch.device("cpu")
LIMITS = StepLimits(max_step_tokens=64, max_step_sequences=4, max_sequence_tokens=96)
LEAST_SHARE = 0.8
"""Of the counted bytes: products, norms and gates follow each other, and few are there at once."""
LEAST_SHARE_OF_CHOICES = 0.3


class LiveBytes(TorchDispatchMode):
    """Bytes of storages that came into being and are referenced, now and at most.

    Left out are kernels, whose interpreter uses torch's operators itself, and arrays of the host, which a GPU
    has in its buffers.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: set[int]) -> None:
        """`held` are the storages that exist already."""
        super().__init__()
        self.now = self.most = 0
        self._known, self._is_in_kernel = set(held), False
        start = launch.Launch.__call__

        def unseen(launched: launch.Launch, *arguments: Any) -> None:
            self._is_in_kernel = True
            start(launched, *arguments)
            self._is_in_kernel = False

        monkeypatch.setattr(launch.Launch, "__call__", unseen)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not self._is_in_kernel and func is not torch.ops.aten.lift_fresh.default:
            for leaf in tree_leaves(found):
                if isinstance(leaf, Tensor):
                    self._add(leaf.untyped_storage())
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += num_bytes
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._remove, key, num_bytes)

    def _remove(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def bytes_of_the_largest_step(
    assignment: Assignment, config: Blueprint, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    """What a stage allocates, and what the planner counts."""
    model = DecoderStage(
        config,
        layer_begin=assignment.layer_begin,
        layer_end=assignment.layer_end,
        has_embeddings=assignment.role.has_embeddings,
        has_head=assignment.role.has_head,
        dtype=assignment.dtype,
        device=CPU,
        kernels=by_triton(config),
    )
    model.load(Checkpoint.open(Path(assignment.model_directory)))
    pages = new_pages(assignment, config, CPU)
    assert isinstance(pages, KvPages)
    executor = StepExecutor(assignment, ModelCompute(model, pages))
    held = {pages.store(0).untyped_storage()._cdata}
    if pages.index is not None:
        held.add(pages.index.store(0).untyped_storage()._cdata)
    with LiveBytes(monkeypatch, held) as live:
        run_largest_step(executor, assignment, config)
    memory = StageMemory(config=config, dtype=dtype, limits=LIMITS, block_size=16, num_stages=3)
    return live.most, memory.activation_bytes(assignment.role, 256, DeviceKind.GPU_IN_PLACE)


def assigned(directory: Path, stage: int) -> Assignment:
    limits = {name: getattr(LIMITS, name) for name in LIMITS.__slots__}
    return replace(new_assignment(directory, stage=stage), num_blocks=256, block_size=16, **limits)


@pytest.mark.parametrize("stage", [1, 2], ids=["MIDDLE", "LAST"])
def test_the_largest_step_needs_what_the_plan_counts(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, "llama", num_layers=3))
    most, counted = bytes_of_the_largest_step(
        assigned(tmp_path, stage), checkpoint.config, DType.F32, monkeypatch
    )
    assert LEAST_SHARE * counted <= most <= counted


def test_the_largest_step_with_choices_needs_no_more_than_the_plan_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a group of queries at a time, less than of all that are counted as absorbed."""
    for module in (choices, stage_memory):
        monkeypatch.setattr(module, "CHOICE_PART", 64)
    directory = make_family(tmp_path / "model", "deepseek_v32", num_layers=3, first_k_dense_replace=99)
    config = Checkpoint.open(directory).config
    assignment = replace(assigned(directory, 1), dtype=DType.BF16)
    most, counted = bytes_of_the_largest_step(assignment, config, DType.BF16, monkeypatch)
    assert LEAST_SHARE_OF_CHOICES * counted <= most <= counted, (most, counted)
