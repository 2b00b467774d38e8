"""A cluster with gateways, for the clients of all modules."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from stageline import Client
from tests.clients.cases import make_cases
from tests.clients.harness import Served, serve_builtin_model, serve_scripted_model


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """The builtin model on two workers, behind two gateways."""
    async with serve_builtin_model(tmp_path_factory.mktemp("served")) as served:
        yield served


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def float32(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """The same in float32: tokens are those of transformers, alone and in any batch."""
    async with serve_builtin_model(tmp_path_factory.mktemp("float32"), "--dtype", "f32") as served:
        yield served


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cases(served: Served) -> list[dict[str, Any]]:
    """Requests, with the output of the gRPC client for them."""
    async with Client(served.coordinator) as client:
        return await make_cases(client)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def scripted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A checkpoint that calls a tool that the client offers, then answers."""
    async with serve_scripted_model(tmp_path_factory.mktemp("scripted")) as served:
        yield served
