"""Models in these tests are tiny: one thread computes them faster than several that wait for each other."""

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint

NUM_LAYERS = 3


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 Llama of three layers."""
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_layers=NUM_LAYERS)
