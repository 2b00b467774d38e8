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
from coordinator.planner import choice_memory
from coordinator.planner.plan import DeviceKind, StepLimits
from coordinator.planner.stage_memory import StageMemory
from kvcache.pages import KvPages, PageGroups
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
LAYERS_WITH_ENTRIES = {
    "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
    "mlp_layer_types": ["moe", "moe", "moe"],
}


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
    executor = StepExecutor(assignment, ModelCompute(model, pages))
    with LiveBytes(monkeypatch, storages_of(pages)) as live:
        run_largest_step(executor, assignment, config)
    return live.most, counted_bytes(config, dtype, assignment)


def counted_bytes(config: Blueprint, dtype: DType, assignment: Assignment) -> int:
    memory = StageMemory(config=config, dtype=dtype, limits=LIMITS, block_size=16, num_stages=3)
    return memory.activation_bytes(assignment.role, 256, DeviceKind.GPU_IN_PLACE)


def storages_of(pages: KvPages | PageGroups) -> set[int]:
    """Those of pages, of keys of indexers, and of rows beside pages."""
    found: list[Tensor] = []
    for group in pages.groups:
        found += [group.store(layer) for layer in range(group.num_layers)]
        found += [] if group.index is None else [group.index.store(0)]
        found += [rows.blocks(layer) for rows in group.rows.values() for layer in rows.layers]
    return {tensor.untyped_storage()._cdata for tensor in found}


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


_OF_HY_4 = {
    "mlp_layer_types": ["dense"] * 3,
    "indexer_types": ["full"] * 3,
    "hidden_size": 512,
    "intermediate_size": 64,
}
"""Streams take most of the memory."""


@pytest.mark.parametrize(
    ("family", "changes"), [("deepseek_v32", {"first_k_dense_replace": 99}), ("hy_v4", _OF_HY_4)]
)
def test_the_largest_step_with_choices_needs_no_more_than_the_plan_counts(
    family: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a group of queries at a time, less than of all that are counted as absorbed."""
    for module in (choices, choice_memory):
        monkeypatch.setattr(module, "CHOICE_PART", 64)
    directory = make_family(tmp_path / "model", family, num_layers=3, **changes)
    config = Checkpoint.open(directory).config
    assignment = replace(assigned(directory, 1), dtype=DType.BF16)
    most, counted = bytes_of_the_largest_step(assignment, config, DType.BF16, monkeypatch)
    assert LEAST_SHARE_OF_CHOICES * counted <= most <= counted, (most, counted)


@pytest.mark.parametrize("layers", [(0, 1), (1, 2), (2, 3)], ids=["window", "all entries", "chosen entries"])
def test_the_largest_step_with_entries_needs_no_more_than_the_plan_counts(
    layers: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 60 tokens and decodes, of which queries choose 5 of up to 24 entries."""
    for module in (choices, choice_memory):
        monkeypatch.setattr(module, "CHOICE_PART", 16)
    directory = make_family(tmp_path / "model", "deepseek_v4", num_layers=3, **LAYERS_WITH_ENTRIES)
    config = Checkpoint.open(directory).config
    begin, end = layers
    found = replace(assigned(directory, 1), dtype=DType.BF16, layer_begin=begin, layer_end=end)
    assignment = replace(found, other_num_blocks=(256,))
    own = replace(config, layers=config.layers[begin:end] * 3)
    most, _ = bytes_of_the_largest_step(assignment, config, DType.BF16, monkeypatch)
    counted = counted_bytes(own, DType.BF16, assignment)
    assert LEAST_SHARE_OF_CHOICES * counted <= most <= counted, (most, counted)


def test_the_largest_step_with_choices_of_blocks_needs_no_more_than_the_plan_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 64 tokens, of which queries choose 8 blocks of 3."""
    for module in (choices, choice_memory):
        monkeypatch.setattr(module, "CHOICE_PART", 16)
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    changed = {"ple_layer_ids": [], "layer_types": kinds}
    directory = make_family(tmp_path / "model", "qwen4_exp_text", num_layers=3, **changed)
    config = Checkpoint.open(directory).config
    assignment = replace(assigned(directory, 1), dtype=DType.BF16)
    most, counted = bytes_of_the_largest_step(assignment, config, DType.BF16, monkeypatch)
    assert LEAST_SHARE_OF_CHOICES * counted <= most <= counted, (most, counted)
