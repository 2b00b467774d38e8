"""Fixtures of real processes, started by the same launcher as users'."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.e2e.clusters import Reference, make_reference
from tests.e2e.recovery_setup import make_steady_model
from tests.faults.figures import FIGURE, Figures
from tests.ports import unused_address

torch.set_num_threads(1)


@pytest.fixture(scope="package")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("llama") / "model", "llama")


@pytest.fixture(scope="package")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("qwen3") / "model", "qwen3")


@pytest.fixture(scope="package")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model with tokens independent of the batch, for recomputation after recoveries."""
    return make_steady_model(tmp_path_factory.mktemp("steady") / "model")


@pytest.fixture
def free_address() -> str:
    """A free address of this machine."""
    return unused_address()


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Iterator[Figures]:
    """Durations shown at the end of the run, collected through the test's report from any process."""
    recorded = Figures()
    yield recorded
    request.node.user_properties += [(FIGURE, asdict(figure)) for figure in recorded.all]
