"""The staged decoder gives the logits of transformers on the same checkpoint."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from checkpoint import Checkpoint
from tests.checkpoints import edit_config, load_reference, make_checkpoint
from tests.unit.stage_worker.model.pipeline import Pipeline, Running

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 64}
MIXED_WINDOWS = {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 3}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("llama", {"head_dim": 24}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}},
    ),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama yarn mscale": ("llama", {"rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7}}),
    "llama yarn untruncated": (
        "llama",
        {"rope_parameters": YARN | {"truncate": False, "beta_fast": 16.0, "attention_factor": 1.3}},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 13}),
    "qwen2": ("qwen2", {}),
    "qwen2 windows tied": ("qwen2", MIXED_WINDOWS | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 windows": ("qwen3", MIXED_WINDOWS),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
}


def make_pair(directory: Path, model: str) -> tuple[Checkpoint, PreTrainedModel]:
    family, overrides = MODELS[model]
    make_checkpoint(directory, family, **overrides)
    return Checkpoint.open(directory), load_reference(directory)


@torch.inference_mode()
def reference_logits(reference: PreTrainedModel, tokens: list[int]) -> Tensor:
    logits: Tensor = reference(torch.tensor([tokens])).logits[0]
    return logits


def random_sequences(lengths: list[int], vocab_size: int = 128) -> list[Running]:
    generator = random.Random(3)
    return [Running([generator.randrange(vocab_size) for _ in range(n)]) for n in lengths]


def compute_in_chunks(pipeline: Pipeline, sequences: list[Running], chunks: list[int]) -> list[Tensor]:
    """All logits of each sequence: odd prefill chunks side by side, then decodes beside later prefills."""
    parts: list[list[Tensor]] = [[] for _ in sequences]
    rounds = 0
    while any(s.num_computed < len(s.tokens) for s in sequences):
        work, owners = [], []
        for index, s in enumerate(sequences):
            left = len(s.tokens) - s.num_computed
            if left:
                wanted = 1 if left <= 12 else chunks[(rounds + index) % len(chunks)]
                work.append((s, min(wanted, left)))
                owners.append(index)
        for index, logits in zip(owners, pipeline.step(work), strict=True):
            parts[index].append(logits)
        rounds += 1
    return [torch.cat(part) for part in parts]


@pytest.mark.matrix(6)
@pytest.mark.parametrize("model", MODELS)
def test_chunked_prefill_and_mixed_decode_give_the_logits_of_transformers(model: str, tmp_path: Path) -> None:
    checkpoint, reference = make_pair(tmp_path, model)
    pipeline = Pipeline(checkpoint, cuts=(3, 4))
    sequences = random_sequences([61, 1, 9, 34, 16])
    for s, logits in zip(sequences, compute_in_chunks(pipeline, sequences, [7, 5, 1, 11]), strict=True):
        expected = reference_logits(reference, s.tokens)
        assert expected.std() > 0.1
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "family",
    ["llama", "gemma2", *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen3", "cohere2"))],
)
def test_a_stored_head_is_used_where_the_config_ties_it(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family, num_layers=3, tie_word_embeddings=False)
    edit_config(tmp_path, tie_word_embeddings=True)
    pipeline = Pipeline(Checkpoint.open(tmp_path), cuts=(1,))
    reference = load_reference(tmp_path)
    (sequence,) = random_sequences([24])
    (logits,) = compute_in_chunks(pipeline, [sequence], [9])
    torch.testing.assert_close(logits, reference_logits(reference, sequence.tokens), atol=1e-4, rtol=0)


@pytest.mark.parametrize("cuts", [(), (1,), (7,), (2, 5), (1, 2, 3, 4, 5, 6, 7)])
def test_every_cut_gives_the_same_logits(cuts: tuple[int, ...], tmp_path: Path) -> None:
    checkpoint, reference = make_pair(tmp_path, "qwen2 windows tied")
    sequences = random_sequences([40, 23])
    results = compute_in_chunks(Pipeline(checkpoint, cuts), sequences, [9])
    for s, logits in zip(sequences, results, strict=True):
        torch.testing.assert_close(logits, reference_logits(reference, s.tokens), atol=1e-4, rtol=0)


@pytest.mark.matrix(2)
@pytest.mark.parametrize("model", ["llama", "mistral window", "qwen2", "qwen3 windows"])
def test_greedy_tokens_equal_generate(model: str, tmp_path: Path) -> None:
    checkpoint, reference = make_pair(tmp_path, model)
    pipeline = Pipeline(checkpoint, cuts=(5,))
    sequence = random_sequences([17])[0]
    inputs = torch.tensor([sequence.tokens])
    generated = reference.generate(  # type: ignore[operator]
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=48, do_sample=False, pad_token_id=0
    )
    logits = pipeline.step([(sequence, 17)])[0]
    for _ in range(48):
        sequence.tokens.append(int(logits[-1].argmax()))
        logits = pipeline.step([(sequence, 1)])[0]
    assert sequence.tokens == generated[0].tolist()
    assert len(set(sequence.tokens)) > 10


def test_a_position_off_by_one_on_a_later_stage_is_seen_in_the_logits(tmp_path: Path) -> None:
    """Shows that the parity tests above can fail: the same run, with positions shifted behind stage 0."""
    checkpoint, reference = make_pair(tmp_path, "llama")
    sequence = random_sequences([30])[0]
    expected = reference_logits(reference, sequence.tokens)
    pipeline = Pipeline(checkpoint, cuts=(4,))
    pipeline.fill(0)  # a skipped slot shows as a wrong value, not as NaN
    right = pipeline.step([(sequence, 29)])[0]
    wrong = pipeline.step([(sequence, 1)], shift=1)[0]
    torch.testing.assert_close(right, expected[:29], atol=1e-4, rtol=0)
    assert bool(torch.isfinite(wrong).all())
    assert not torch.allclose(wrong, expected[29:], atol=1e-2)


def test_bf16_logits_are_close_to_transformers(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "llama", dtype="bfloat16", initializer_range=0.05)
    pipeline = Pipeline(Checkpoint.open(directory), cuts=(4,))
    sequence = random_sequences([33])[0]
    (logits,) = compute_in_chunks(pipeline, [sequence], [16])
    expected = reference_logits(load_reference(directory), sequence.tokens).float()
    assert (logits - expected).abs().max() < 0.1 * expected.std()
