"""Stages on a GPU compute what transformers computes, for every cut of the layers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint import Checkpoint, DType
from kvcache.pages import KvPages
from stage_worker.backends.transfers import CudaQueue
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.layer_weights import TORCH_DTYPES
from stage_worker.validation import SliceLayout
from tests.checkpoints import load_reference, make_checkpoint
from tests.e2e.clusters import random_prompt, reference_tokens
from tests.families import make_family
from tests.gpu.devices import queue_of
from tests.local_pipeline import LocalPipeline
from tests.step_layouts import layout_for

pytestmark = pytest.mark.gpu

NUM_LAYERS = 4
CUTS = [(4,), (1, 3), (2, 2), (3, 1), (1, 2, 1), (1, 1, 1, 1)]
PROMPTS = [random_prompt(length) for length in (1, 15, 16, 17, 101)]
NUM_NEW_TOKENS = 48
BLOCK_SIZE, NUM_BLOCKS = 16, 16
MOST_TIMES_ROUNDING = 1.5
"""The error in bf16, as a multiple of transformers' own in bf16 (0.95 and 0.98 on a CPU)."""


@pytest.fixture(scope="module", params=["llama", "qwen3", "deepseek_v3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: str) -> Path:
    """DeepSeek V3 has no layers with experts, which bfloat16 may choose otherwise."""
    overrides: dict[str, Any] = {"tie_word_embeddings": False} if request.param == "llama" else {}
    made = tmp_path_factory.mktemp(request.param) / "model"
    if request.param == "deepseek_v3":
        return make_family(made, request.param, num_layers=NUM_LAYERS, first_k_dense_replace=NUM_LAYERS)
    return make_checkpoint(
        made, request.param, num_layers=NUM_LAYERS, seed=3, initializer_range=0.3, **overrides
    )


@pytest.mark.parametrize("layers", CUTS, ids=str)
def test_greedy_tokens_in_float32_equal_transformers(
    directory: Path, layers: tuple[int, ...], prepared: torch.device
) -> None:
    reference = load_reference(directory)
    expected = [reference_tokens(reference, prompt) for prompt in PROMPTS]
    pipeline = LocalPipeline(directory, layers, device=str(prepared), queue=queue_of(prepared))
    assert pipeline.generate(PROMPTS, max_tokens=NUM_NEW_TOKENS) == expected


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_logits_of_prompt_and_decodes_are_within_the_dtype_error(
    directory: Path, dtype: DType, prepared: torch.device
) -> None:
    tokens = random_prompt(120)
    reference = load_reference(directory)
    with torch.no_grad():
        exact = reference(torch.tensor([tokens])).logits[0].float()
        rounded = reference.bfloat16()(torch.tensor([tokens])).logits[0].float()
    found = _logits(directory, dtype, prepared, tokens, num_prompt=100)
    most = MOST_TIMES_ROUNDING * _rms(rounded - exact, exact) if dtype is DType.BF16 else 1e-4
    assert _rms(found - exact, exact) < most


def _rms(error: Tensor, exact: Tensor) -> float:
    return float((error / exact.std()).square().mean().sqrt())


def _logits(
    directory: Path, dtype: DType, device: torch.device, tokens: list[int], *, num_prompt: int
) -> Tensor:
    """Float32 on the CPU, [tokens, vocabulary]: the prompt in one chunk, then one token at a time."""
    checkpoint = Checkpoint.open(directory)
    config = checkpoint.config
    stage = DecoderStage(
        config,
        layer_begin=0,
        layer_end=NUM_LAYERS,
        has_embeddings=True,
        has_head=True,
        dtype=dtype,
        device=device,
    )
    stage.load(checkpoint, copies=None if device.type == "cpu" else CudaQueue(device))
    shape = config.page_shape(config.layer_windows[0])
    pages = KvPages(
        num_layers=NUM_LAYERS,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=shape.heads,
        head_dim=shape.width,
        num_parts=shape.parts,
        dtype=TORCH_DTYPES[dtype],
        device=device,
    )
    bounds = [0, *range(num_prompt, len(tokens) + 1)]
    rows = []
    with torch.inference_mode():
        for first, end in itertools.pairwise(bounds):
            owned = tuple(range(-(-end // BLOCK_SIZE)))
            layout = layout_for(
                stage,
                [SliceLayout(first_position=first, num_tokens=end - first, pages=owned)],
                block_size=BLOCK_SIZE,
            )
            hidden = stage.forward(stage.embed(torch.tensor(tokens[first:end])), layout, pages)
            rows.append(stage.logits(hidden).float().cpu())
    return torch.cat(rows)
