"""Requests that end in every way there is, hundreds at a time, leave nothing behind."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from stageline_rpc.v1 import cluster_pb2
from tests.integration.asks import SoloRuns
from tests.integration.calls import Caller, StatusCode
from tests.integration.cluster import DEADLINE_S, TEST_TIMING, Cluster
from tests.integration.footprint import Footprint, resident_bytes
from tests.integration.storm import Storm

LAYERS = (1, 1, 1)
NUM_ROUNDS = 3
NUM_REQUESTS = 500
NUM_WARM_UP = 200
MAX_GROWTH_BYTES = 12 * 2**20
"""Between the first and the last of three rounds: 12 KiB per request. The allocator grows in steps of some
MiB; objects that stay are counted one by one.
"""
ENDS = {StatusCode.OK, StatusCode.CANCELLED, StatusCode.DEADLINE_EXCEEDED}


async def wait_for_nothing_left(cluster: Cluster, most: Footprint | None) -> Footprint:
    """Until nothing is live or kept, and no more is held than `most`."""
    await cluster.wait_drained()
    await cluster.wait_status(lambda status: status.requests.kept == 0)
    deadline_s = asyncio.get_running_loop().time() + DEADLINE_S
    # The request after the last one makes grpc let go of that.
    while not (now := await footprint_after_a_call(cluster)).is_within(most or now):
        assert asyncio.get_running_loop().time() < deadline_s, f"{now}, which was {most}"
    return now


async def footprint_after_a_call(cluster: Cluster) -> Footprint:
    await cluster.client.status()
    return Footprint.now()


async def test_three_storms_leave_nothing(varied_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Resident memory is compared from the first storm to the last: the first one fills what stays."""
    # grpc tells of writes that meet the end of their call with a traceback, which would hold the request.
    caplog.set_level(logging.CRITICAL, "grpc")
    solo = SoloRuns(varied_llama)
    timing = replace(TEST_TIMING, sweep_interval_s=0.05)
    async with (
        Cluster(varied_llama, layers=LAYERS, max_kv_tokens=384, timing=timing) as cluster,
        Caller(cluster.address) as caller,
    ):
        await Storm(cluster.address, caller, solo, seed=0).run(NUM_WARM_UP)
        before = await wait_for_nothing_left(cluster, None)
        ended_before = num_ended(await cluster.client.status())
        num_heard, resident = 0, []
        for seed in range(1, NUM_ROUNDS + 1):
            storm = Storm(cluster.address, caller, solo, seed=seed)
            await storm.run(NUM_REQUESTS)
            await wait_for_nothing_left(cluster, before)
            num_heard += storm.num_heard
            resident.append(resident_bytes())
            assert {code for _, code in storm.outcomes} >= ENDS
        status = await cluster.client.status()
        assert status.requests.orphaned == 0
        assert status.requests.failed == 0
        assert status.requests.preemptions > 0
        assert num_heard <= num_ended(status) - ended_before <= NUM_ROUNDS * NUM_REQUESTS
        assert resident[-1] - resident[0] < MAX_GROWTH_BYTES, [size / 2**20 for size in resident]


def num_ended(status: cluster_pb2.GetStatusResponse) -> int:
    counts = status.requests
    return counts.finished + counts.cancelled + counts.failed
