"""Hundreds of requests that end in every possible way leak nothing."""

import asyncio
import logging
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import coordinator.scheduler.sequence
import stage_worker.validation
from stageline_rpc.v1 import cluster_pb2
from tests.integration.calls import Caller, StatusCode
from tests.integration.cluster import DEADLINE_S, TEST_POLICY, Cluster
from tests.integration.footprint import Footprint, resident_bytes
from tests.integration.request_cases import SoloRuns
from tests.integration.storm import BEHAVIOURS, Storm

pytestmark = pytest.mark.nightly


LAYERS = (1, 1, 1)
NUM_ROUNDS = 3
NUM_REQUESTS = 500
NUM_WARM_UP = 200
KV_TOKENS = 384
"""About a quarter of the tokens of all concurrent requests, so that requests wait and are preempted."""

MAX_GROWTH_BYTES = 4 * 2**20
"""Growth of resident memory in a round: 8 KiB for each of its requests. A leak grows in every round, while
one round may need more at once than those before (17 MiB were seen), so the smallest growth counts. Leaked
Python objects are counted individually; this bound covers memory of grpc's C core and of allocators.
"""


@pytest.fixture
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the bounds of remembered ended sequences, so that the warm-up reaches them; by default memory
    grows for minutes.
    """
    monkeypatch.setattr(stage_worker.validation, "ENDED_REMEMBERED", 128)
    monkeypatch.setattr(coordinator.scheduler.sequence, "MAX_REMEMBERED", 256)


async def until_released(cluster: Cluster, before: Footprint | None = None) -> Footprint:
    """Wait until no request is live or kept, no page is in use, and no resource exceeds `before`."""
    await cluster.wait_drained()
    await cluster.wait_status(lambda status: status.requests.kept == 0)
    deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
    while True:
        # grpc keeps a call until the next one arrives.
        await cluster.client.status()
        now = Footprint.now()
        if before is None or now.is_within(before):
            return now
        assert asyncio.get_running_loop().time() < deadline_s, f"{now} is left; before it was {before}"


def check_counts(before: cluster_pb2.RequestCounts, after: cluster_pb2.RequestCounts, storm: Storm) -> None:
    """Assert that each request received by the coordinator ended once, for a reason given by a client."""
    finished, cancelled = after.finished - before.finished, after.cancelled - before.cancelled
    assert storm.num_received <= finished + cancelled <= NUM_REQUESTS
    assert finished >= sum(count for (_, code), count in storm.outcomes.items() if code is StatusCode.OK)
    assert (after.failed, after.orphaned, after.detached) == (0, 0, 0)


async def test_storms_of_requests_leak_nothing(
    varied_llama: Path, short_memory: None, caplog: pytest.LogCaptureFixture
) -> None:
    # grpc logs a write after the end of its call with a traceback, which would keep the request.
    caplog.set_level(logging.CRITICAL, "grpc")
    solo = SoloRuns(varied_llama)
    policy = replace(TEST_POLICY, sweep_interval_s=0.05)
    outcomes: Counter[tuple[str, StatusCode | None]] = Counter()
    memory: list[int] = []
    async with (
        Cluster(varied_llama, layers=LAYERS, max_kv_tokens=KV_TOKENS, policy=policy) as cluster,
        Caller(cluster.address) as caller,
    ):
        await Storm(cluster.address, caller, solo, seed=0).run(NUM_WARM_UP)
        before = await until_released(cluster)
        requests = (await cluster.client.status()).requests
        epoch = cluster.epoch
        for seed in range(1, NUM_ROUNDS + 1):
            storm = Storm(cluster.address, caller, solo, seed=seed)
            await storm.run(NUM_REQUESTS)
            await until_released(cluster, before)
            memory.append(resident_bytes())
            requests_before, requests = requests, (await cluster.client.status()).requests
            check_counts(requests_before, requests, storm)
            outcomes += storm.outcomes
        assert cluster.epoch == epoch
    growths = [after - before for before, after in pairwise(memory)]
    print(f"growth of resident bytes in each round: {growths}")
    assert min(growths) < MAX_GROWTH_BYTES, f"growth of resident bytes in each round: {growths}"
    # All outcomes occurred, and cancels and deadlines came before and after the end.
    assert requests.preemptions > 0
    assert {name for name, _ in outcomes} == BEHAVIOURS
    assert {code for name, code in outcomes if name == "cancels"} == {StatusCode.OK, StatusCode.CANCELLED}
    assert {code for name, code in outcomes if name == "has_a_deadline"} == {
        StatusCode.OK,
        StatusCode.DEADLINE_EXCEEDED,
    }
