"""Compressed attention takes the memory that a plan counts, as weights and in the largest steps."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint import Blueprint, Checkpoint, DType
from coordinator.planner.plan import StepLimits
from coordinator.planner.stage_memory import StageMemory
from tests.families import make_family
from tests.live_bytes import LiveBytes
from tests.unit.stage_worker.model.pipeline import Pipeline
from tests.unit.stage_worker.model.test_parity import random_sequences
from wire.ids import StageRole

BLOCK, NUM_BLOCKS = 64, 96
SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
CHOICE: dict[str, Any] = {"layer_types": ["sliding_attention", SPARSE], "index_head_dim": 16}
KINDS: dict[str, dict[str, Any]] = {
    "scores of heads": CHOICE | {"index_topk": 128, "index_n_heads": 64},
    "chosen entries": CHOICE | {"index_topk": 256, "index_n_heads": 2},
    "all entries": {"layer_types": ["sliding_attention", HEAVY], "compress_rates": {SPARSE: 4, HEAVY: 2}},
}
"""Of what the largest part is: layers whose indexer chooses among 512 entries, and one whose queries see all
of 1024.
"""


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    given = {
        "num_layers": 2,
        "mlp_layer_types": ["moe", "moe"],
        "num_attention_heads": 2,
        "head_dim": 64,
        "partial_rotary_factor": 0.125,
        "o_groups": 1,
        "max_position_embeddings": 4096,
        "dtype": "bfloat16",
    }
    directory = tmp_path_factory.mktemp("memory") / request.param
    return Checkpoint.open(make_family(directory, "deepseek_v4", **given | KINDS[request.param]))


def planned_bytes(config: Blueprint, limits: StepLimits) -> int:
    memory = StageMemory(config=config, dtype=DType.BF16, limits=limits, block_size=BLOCK, num_stages=1)
    return memory.activation_bytes(StageRole.ONLY, NUM_BLOCKS)


def test_decodes_take_what_a_plan_counts(checkpoint: Checkpoint) -> None:
    """Three sequences of 2000 tokens."""
    sequences = random_sequences([1990] * 3)
    pipeline = Pipeline(checkpoint, block_size=BLOCK)
    for sequence in sequences:
        pipeline.step([(sequence, len(sequence.tokens) - 1)])
    with LiveBytes() as live:
        pipeline.step([(sequence, 1) for sequence in sequences])
    limits = StepLimits(max_step_tokens=3, max_step_sequences=3, max_sequence_tokens=2048)
    planned = planned_bytes(checkpoint.config, limits)
    assert planned / 4 < live.peak <= planned


def test_a_chunk_takes_what_a_plan_counts(checkpoint: Checkpoint) -> None:
    (sequence,) = random_sequences([2000])
    pipeline = Pipeline(checkpoint, block_size=BLOCK)
    pipeline.step([(sequence, 1700)])
    with LiveBytes() as live:
        pipeline.step([(sequence, 300)])
    limits = StepLimits(max_step_tokens=300, max_step_sequences=1, max_sequence_tokens=2048)
    planned = planned_bytes(checkpoint.config, limits)
    assert planned / 4 < live.peak <= planned
