"""Every family and dtype: stages on a GPU compute what transformers computes on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint import Checkpoint, DType, Experts, GatedDelta
from tests.checkpoints import load_reference
from tests.families import FAMILIES, make_family
from tests.gpu.devices import queue_of
from tests.local_pipeline import LocalPipeline
from tests.unit.stage_worker.model.pipeline import Pipeline
from tests.unit.stage_worker.model.test_families import NUM_TOKENS, cuts_of, greedy_tokens
from tests.unit.stage_worker.model.test_parity import (
    compute_in_chunks,
    random_sequences,
    reference_logits,
)

pytestmark = pytest.mark.gpu

MOST_F32, MOST_DELTA_F32 = 1e-4, 5e-4
"""Largest difference of a logit, in units of their standard deviation; products in TF32 exceed both.

The second is that of Gated DeltaNet, which transformers computes in chunks of another size: on a CPU up to
3.3e-4.
"""
MOST_RMS = {DType.BF16: 0.03, DType.F16: 0.004}
"""Root mean square of differences to float32 with the same weights, in units of the standard deviation.

On a CPU, bfloat16 has 0.005 to 0.015 and float16 an eighth of it, as 3 more bits of a product should.
"""
MOST_OF_OWN = 1.5
"""Of what transformers' own computation in that dtype has on a CPU, where that is more: Gemma 4, with its
norms, soft caps and scaled outputs, has 0.06 in bfloat16, and 0.11 beside experts.
"""
STORED = {DType.F32: "float32", DType.BF16: "bfloat16", DType.F16: "float16"}
NOT_IN_TRANSFORMERS = {("deepseek_v4", DType.F16)}
"""It keeps weights of compressors in float32 then, and multiplies float16 by them."""
MOST_CUTS = 3


@pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_in_float32(
    family: str, dtype: DType, prepared: torch.device, tmp_path: Path
) -> None:
    width = {} if dtype is DType.F32 else {"initializer_range": 0.08}
    directory = make_family(tmp_path / "model", family, dtype=STORED[dtype], **width)
    checkpoint = Checkpoint.open(directory)
    reference = load_reference(directory).float()
    sequences = random_sequences([61, 1, 9, 34, 16])
    pipeline = Pipeline(checkpoint, cuts=(1, 3), device=prepared)
    found = [logits.cpu() for logits in compute_in_chunks(pipeline, sequences, [7, 5, 1, 11])]
    expected = [reference_logits(reference, sequence.tokens) for sequence in sequences]
    assert all(logits.std() > 0.1 for logits in expected)
    if dtype is DType.F32:
        has_delta = any(isinstance(kind.mixer, GatedDelta) for kind in checkpoint.config.kinds)
        assert max(map(_largest, found, expected)) < (MOST_DELTA_F32 if has_delta else MOST_F32)
    else:
        has_experts = any(isinstance(kind.feed_forward, Experts) for kind in checkpoint.config.kinds)
        most = MOST_RMS[dtype]
        if (family, dtype) not in NOT_IN_TRANSFORMERS:
            same = load_reference(directory)
            own = [reference_logits(same, sequence.tokens).float() for sequence in sequences]
            most = max(most, MOST_OF_OWN * _typical(own, expected, has_experts=has_experts))
        assert _typical(found, expected, has_experts=has_experts) < most


def _largest(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.std())


def _typical(found: list[Tensor], expected: list[Tensor], *, has_experts: bool) -> float:
    """Of all tokens; of the median token with experts, of which rounding may choose another one."""
    squares = torch.cat(
        [
            ((logits - exact) / exact.std()).square().mean(dim=1)
            for logits, exact in zip(found, expected, strict=True)
        ]
    )
    return float((squares.median() if has_experts else squares.mean()).sqrt())


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers_at_every_cut(
    family: str, prepared: torch.device, tmp_path: Path
) -> None:
    """Through executors, with chunks, prefix hits (two prompts share their beginning) and preemption."""
    directory = make_family(tmp_path / "model", family)
    long, short, other = (sequence.tokens for sequence in random_sequences([70, 1, 23]))
    prompts = [long, short, other, [*long[:40], *other]]
    expected = [greedy_tokens(directory, prompt) for prompt in prompts]
    assert len(set(expected[0])) > 8, "a degenerate model proves nothing"
    has_windows = all(Checkpoint.open(directory).config.layer_windows)
    for cut in cuts_of(Checkpoint.open(directory).config)[:MOST_CUTS]:
        pipeline = LocalPipeline(
            directory,
            cut,
            block_size=16,
            max_step_tokens=32,
            num_blocks=8 if has_windows else 17,
            device=str(prepared),
            queue=queue_of(prepared),
        )
        assert pipeline.generate(prompts, max_tokens=NUM_TOKENS) == expected, cut
