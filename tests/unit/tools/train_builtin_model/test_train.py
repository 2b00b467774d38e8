from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tools.train_builtin_model.settings import ModelShape, TrainingSettings
from tools.train_builtin_model.train import train

TINY = ModelShape(
    vocab_size=300,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    max_positions=128,
)


def tiny_settings(*, seed: int = 0) -> TrainingSettings:
    return TrainingSettings(
        num_steps=4,
        seed=seed,
        batch_tokens=128,
        row_tokens=32,
        long_row_tokens=64,
        long_share=0.5,
        warmup_steps=2,
        tokenizer_documents=50,
    )


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    losses = [train(TINY, tiny_settings(), tmp_path / name) for name in ("first", "second")]
    assert losses[0] == losses[1]
    assert files_of(tmp_path / "first") == files_of(tmp_path / "second")


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    for seed in (0, 1):
        train(TINY, tiny_settings(seed=seed), tmp_path / str(seed))
    weights = [files_of(tmp_path / str(seed))["model.safetensors"] for seed in (0, 1)]
    assert weights[0] != weights[1]


def test_training_resumes_from_existing_weights_and_tokenizer(tmp_path: Path) -> None:
    first = train(TINY, tiny_settings(), tmp_path / "first")
    going_on = replace(tiny_settings(seed=1), num_steps=40)
    second = train(TINY, going_on, tmp_path / "second", start=tmp_path / "first")
    files = [files_of(tmp_path / name) for name in ("first", "second")]
    assert files[0]["tokenizer.json"] == files[1]["tokenizer.json"]
    assert files[0]["model.safetensors"] != files[1]["model.safetensors"]
    assert second < first
    assert b"--steps 40 --seed 1 --from first" in files[1]["README.md"]


def test_training_restores_torch_settings(tmp_path: Path) -> None:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    train(TINY, tiny_settings(), tmp_path)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


def test_rows_grow_longer_in_the_last_steps() -> None:
    settings = tiny_settings()
    assert [settings.row_length(step) for step in range(4)] == [32, 32, 64, 64]


def test_a_batch_of_broken_rows_is_rejected() -> None:
    with pytest.raises(ValueError, match="1000 tokens in rows of 256"):
        TrainingSettings(batch_tokens=1000)


def test_heads_that_do_not_divide_the_width_are_rejected() -> None:
    with pytest.raises(ValueError, match="width 100 does not divide into 8 heads"):
        ModelShape(hidden_size=100, num_heads=8)
