"""Stages share one process here, so more than one torch thread per stage only adds contention."""

import shutil
from pathlib import Path

import pytest
import torch

from builtin_model import MODEL_DIRECTORY
from tests.checkpoints import make_checkpoint

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 Llama of three layers."""
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_layers=3)


@pytest.fixture(scope="session")
def varied_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 Llama of three layers, wide enough that its greedy tokens vary."""
    return make_checkpoint(
        tmp_path_factory.mktemp("varied") / "model", "llama", num_layers=3, initializer_range=0.3
    )


@pytest.fixture(scope="session")
def worded_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 Llama of three layers and many positions with the built-in model's tokenizer. It
    generates any text, invalid UTF-8 included, and no end-of-sequence token.
    """
    directory = make_checkpoint(
        tmp_path_factory.mktemp("worded") / "model",
        "llama",
        num_layers=3,
        initializer_range=0.3,
        vocab_size=1536,
        max_position_embeddings=4096,
    )
    for path in MODEL_DIRECTORY.glob("tokenizer*"):
        shutil.copy(path, directory)
    return directory
