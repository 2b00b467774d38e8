"""Tests that do not disturb a cluster share one; a parallel run assigns this folder to one process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from deploy import LocalCluster
from tests.e2e.clusters import START_TIMEOUT_S, Reference, Served, config


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def served(llama: Reference, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """The llama on three workers with unequal layer counts."""
    logs = tmp_path_factory.mktemp("served")
    cluster = LocalCluster(config(llama.directory, 3, "--layers", "1,4,3", log_directory=logs))
    async with cluster:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        yield Served(cluster, llama)
