"""Real processes: started by the launcher that users start them with, observed from outside."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from deploy import LocalCluster
from tests.e2e.clusters import START_TIMEOUT_S, Reference, Served, config, make_reference
from tests.e2e.recovery_setup import make_steady_model
from tests.faults.figures import Figures

torch.set_num_threads(1)


@pytest.fixture(scope="package")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("llama") / "model", "llama")


@pytest.fixture(scope="package")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("qwen3") / "model", "qwen3")


@pytest.fixture(scope="package")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that is recomputed in other batches after every recovery."""
    return make_steady_model(tmp_path_factory.mktemp("steady") / "model")


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def served(llama: Reference, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """The llama on three workers with unequal shares, for tests that leave it serving."""
    logs = tmp_path_factory.mktemp("served")
    cluster = LocalCluster(config(llama.directory, 3, "--layers", "1,4,3", log_directory=logs))
    async with cluster:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        yield Served(cluster, llama)


@pytest.fixture
def free_address() -> str:
    """An address of this machine where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


_FIGURES = pytest.StashKey[Figures]()


@pytest.fixture
def figures(pytestconfig: pytest.Config) -> Figures:
    """Shown at the end of the run, and appended as JSON to the file that STAGELINE_RECOVERY_FIGURES names."""
    return pytestconfig.stash.setdefault(_FIGURES, Figures())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = config.stash.get(_FIGURES, Figures())
    if not found.all:
        return
    terminalreporter.section("recoveries")
    for line in found.lines():
        terminalreporter.write_line(line)
    if (file := os.environ.get("STAGELINE_RECOVERY_FIGURES")) is not None:
        with Path(file).open("a") as output:
            output.write(found.json_lines())
