"""Stages of these tests share one process: more than one torch thread each only makes them wait."""

from pathlib import Path

import pytest
import torch

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
