"""Logits with a KV cache equal those of a full forward pass within rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint import Checkpoint
from tests.checkpoints import make_checkpoint
from tests.unit.stage_worker.model.pipeline import Pipeline
from tests.unit.stage_worker.model.test_parity import random_sequences

NUM_PREFILL, NUM_DECODED = 29, 8
MODELS = {"llama": {}, "mistral": {"sliding_window": 13}}


def full_forward(checkpoint: Checkpoint) -> Tensor:
    """Logits of all tokens, computed in one step without any history."""
    (sequence,) = random_sequences([NUM_PREFILL + NUM_DECODED])
    return Pipeline(checkpoint).step([(sequence, len(sequence.tokens))])[0]


def prefill_and_decode(checkpoint: Checkpoint, *, shift: int = 0) -> Tensor:
    """The same logits: a prefill in two chunks, then one token at a time, with falsified positions."""
    (sequence,) = random_sequences([NUM_PREFILL + NUM_DECODED])
    pipeline = Pipeline(checkpoint, cuts=(4,))
    pipeline.fill(0)  # a skipped slot shows as a wrong value, not as NaN
    parts = [pipeline.step([(sequence, num_tokens)])[0] for num_tokens in (16, NUM_PREFILL - 16)]
    parts += [pipeline.step([(sequence, 1)], shift=shift)[0] for _ in range(NUM_DECODED)]
    return torch.cat(parts)


@pytest.mark.parametrize("family", MODELS)
def test_prefill_and_decode_equal_a_full_forward(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, family, **MODELS[family]))
    expected = full_forward(checkpoint)
    assert expected.std() > 0.1
    torch.testing.assert_close(prefill_and_decode(checkpoint), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", MODELS)
def test_a_position_off_by_one_exceeds_the_tolerance(family: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, family, **MODELS[family]))
    wrong = prefill_and_decode(checkpoint, shift=1)
    errors = (wrong - full_forward(checkpoint)).abs().amax(dim=1)
    assert float(errors[:NUM_PREFILL].max()) < 1e-5
    assert float(errors[NUM_PREFILL:].min()) > 1e-4
