"""All limits under attack at once: requests of others go on, and memory stays bounded."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

import pytest
from httpx2 import AsyncClient

from gateway.config import GatewayConfig
from gateway.server import GatewayServer
from tests.attacker import EXPECTED
from tests.integration.calls import until_ready
from tests.integration.cluster import DEADLINE_S, Cluster
from tests.integration.footprint import resident_bytes
from tests.integration.request_cases import mixed_cases
from tests.integration.test_mock_cluster import check, mock_cluster

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
SECONDS = 15
MAX_GROWTH_BYTES = 576 * 2**20
"""256 MiB: 2,000 calls of some 30 KB, 64 MiB of stored traces, 300 connections, what allocators keep.

Beside them 16 MiB of each of 8 messages in the coordinator, 8 in the worker, which are one process here, and
4 bodies; 40 messages and 20 bodies are sent at once.
"""


async def attacked(cluster: Cluster, http: AsyncClient, *arguments: str) -> tuple[dict[str, int], int]:
    """Run the attacker, and requests of two clients meanwhile; return its ends and the peak of memory."""
    attacker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.attacker", *arguments), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    ends = asyncio.create_task(attacker.communicate())
    peak = 0
    while not ends.done():
        check(await cluster.generate_all(mixed_cases(4, max_tokens=20)))
        response = await http.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 5})
        assert response.status_code == 200, response.text
        peak = max(peak, resident_bytes())
        await asyncio.sleep(0.2)
    output, _ = ends.result()
    assert attacker.returncode == 0
    found: dict[str, int] = json.loads(output)
    return found, peak


async def test_requests_go_on_and_memory_is_bounded_under_all_attacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with mock_cluster(2) as cluster:
        config = GatewayConfig(coordinator=cluster.address, listen="127.0.0.1:0")
        gateway = GatewayServer(config, template=None)
        await gateway.start()
        try:
            async with AsyncClient(base_url=f"http://{gateway.address}", timeout=DEADLINE_S) as http:
                await until_ready(http)
                epoch, before = cluster.epoch, resident_bytes()
                worker = cluster.workers["w1"].worker.listen_address
                targets = (cluster.address, str(gateway.address), worker)
                found, peak = await attacked(cluster, http, *targets, str(SECONDS))
        finally:
            await gateway.stop()
        assert cluster.epoch == epoch
        print((peak - before) >> 20, found)
        assert found.keys() >= EXPECTED, found
        assert {end for end in found if end.endswith(": OK")} <= {"watches: OK", "telemetry: OK"}, found
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert peak - before < MAX_GROWTH_BYTES, (before, peak)
