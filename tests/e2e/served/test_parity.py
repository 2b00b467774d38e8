"""The shared cluster gives the tokens of transformers."""

from __future__ import annotations

import pytest

from tests.e2e.clusters import Served, generate_all

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_a_llama_on_three_unequal_workers(served: Served) -> None:
    status = await served.cluster.wait_until_serving(timeout_s=10)
    assert [(worker.layer_begin, worker.layer_end) for worker in status.workers] == [(0, 1), (1, 5), (5, 8)]
    assert await generate_all(served.address, served.reference) == served.reference.expected
