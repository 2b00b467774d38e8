"""Layers by transformers take the memory that a plan counts, when they are loaded and in the largest step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import Checkpoint, DType
from checkpoint.implementation import Implementation
from coordinator.planner.plan import StageRole
from coordinator.planner.planner import StepLimits
from coordinator.planner.stage_memory import StageMemory
from stage_worker.validation import SliceLayout
from tests.checkpoints import make_checkpoint
from tests.live_bytes import LiveBytes
from tests.step_layouts import layout_for
from tests.unit.stage_worker.model.pipeline import NanPages
from tests.unit.transformers_stage.test_families import new_stage

NUM_TOKENS, BLOCK, NUM_LAYERS = 256, 16, 2
WIDTHS: dict[str, Any] = {
    "num_layers": NUM_LAYERS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "head_dim": 32,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "helium": {},
    "phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 6, "moe_intermediate_size": 256},
    "gpt_oss": {"num_local_experts": 16, "num_experts_per_tok": 4},
}
"""Dense, and mixtures without and with a row; gpt-oss has biases and a gate of its own."""
MIXTURES = ("phimoe", "mixtral", "qwen3_moe")
"""Files have a tensor for each expert, transformers one for all."""


def open_family(directory: Path, family: str, *, dtype: str = "float32") -> Checkpoint:
    return Checkpoint.open(make_checkpoint(directory, family, dtype=dtype, **WIDTHS | FAMILIES[family]))


@pytest.mark.matrix(2)
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_are_in_memory_once_while_they_are_loaded(family: str, dtype: str, tmp_path: Path) -> None:
    """In files of the run dtype, bf16, and in those of another. What is not of experts may be there twice."""
    checkpoint = open_family(tmp_path, family, dtype=dtype)
    stage = new_stage(checkpoint.config, 0, NUM_LAYERS, dtype=DType.BF16)
    with LiveBytes() as live:
        stage.load(checkpoint)
    experts = sum(
        entry.num_bytes for name, entry in checkpoint.tensors.items() if ".experts." in name
    )  # of both layers
    others = sum(entry.num_bytes for entry in checkpoint.tensors.values()) - experts
    assert experts > 4 * others
    assert 0.95 * stage.weight_bytes < live.peak <= stage.weight_bytes + others


@pytest.mark.matrix(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_a_step_takes_at_most_what_a_plan_counts(family: str, dtype: DType, tmp_path: Path) -> None:
    checkpoint = open_family(tmp_path, family)
    config = checkpoint.config
    stage = new_stage(config, 0, NUM_LAYERS, dtype=dtype)
    stage.load(checkpoint)
    windows = dict.fromkeys(config.layer_windows)
    num_blocks = NUM_TOKENS // BLOCK
    pages = NanPages.of(
        config.page_shape(next(iter(windows))), NUM_LAYERS, num_blocks, BLOCK, stage.torch_dtype
    )
    part = SliceLayout(first_position=0, num_tokens=NUM_TOKENS, pages=tuple(range(num_blocks)))
    layout = layout_for(stage, [part], block_size=BLOCK)
    hidden = torch.randn(NUM_TOKENS, config.hidden_size).to(stage.torch_dtype)
    with LiveBytes() as live:
        stage.forward(hidden, layout, pages)
    memory = StageMemory(
        config=config,
        dtype=dtype,
        limits=StepLimits(max_step_tokens=NUM_TOKENS, max_step_sequences=1, max_sequence_tokens=NUM_TOKENS),
        block_size=BLOCK,
        num_stages=1,
        implementation=Implementation.TRANSFORMERS,
    )
    planned = memory.activation_bytes(StageRole.MIDDLE, num_blocks)
    assert planned / 6 < live.peak <= planned
