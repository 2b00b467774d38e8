"""Workers measure the ways to each other when they join; the plan and the status follow."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import grpc
import pytest

from coordinator.cluster import link_checks
from coordinator.planner.links import Link
from stage_worker import links
from stage_worker.config import SameHost
from stage_worker.links import measure_links
from stage_worker.server import Worker
from stageline_rpc.internal.v1 import forward_pb2, forward_pb2_grpc, join_pb2
from stageline_rpc.v1 import cluster_pb2
from tests.integration.calls import until
from tests.integration.cluster import Cluster, RequestCase, RunningWorker
from wire.addresses import parse_address
from wire.link_probe import MAX_TRANSFER_BYTES, NUM_TRANSFERS, MeasuredWay
from wire.transport import PLAIN

pytestmark = pytest.mark.full

CASE = RequestCase(prompt=(5, 17, 99), max_tokens=8)


async def start_at(cluster: Cluster, name: str, host: str) -> RunningWorker:
    """Start a worker on another loopback address, which counts as another host."""
    worker = Worker(replace(cluster.worker_config(name), listen=f"{host}:0"))
    await worker.start()
    cluster.workers[name] = RunningWorker(worker, None)
    return cluster.workers[name]


def between(status: cluster_pb2.GetStatusResponse) -> list[cluster_pb2.LinkStatus]:
    """Links between workers."""
    return [link for link in status.links if link.from_worker and link.to_worker]


def hops(status: cluster_pb2.GetStatusResponse) -> list[tuple[str, str]]:
    """Hops between hosts; the coordinator, with an empty name, is on the host of w0."""
    stages = [worker.name for worker in status.workers]
    return [hop for hop in pairwise(["", *stages, ""]) if set(hop) != {"", "w0"}]


async def test_links_between_hosts_are_measured_and_shown() -> None:
    async with Cluster(None, layers=(4, 4, 4), num_workers=0, waits=False) as cluster:
        for number in range(3):
            await start_at(cluster, f"w{number}", f"127.0.0.{number + 1}")
        status = await cluster.wait_status(
            lambda status: (
                status.state == cluster_pb2.CLUSTER_STATE_SERVING
                and [(link.from_worker, link.to_worker) for link in status.links] == hops(status)
            )
        )
        for link in status.links:
            assert link.round_trip.ToMicroseconds() > 0 and link.bytes_per_second > 1_000_000
            assert not (link.advice and "" in (link.from_worker, link.to_worker))
        assert (await cluster.generate(CASE.again())).succeeded


async def test_hops_are_measured_again_while_the_cluster_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    trip_us, rate = 1_000, 10**6

    async def measured(
        transport: object, peer: join_pb2.LinkPeer, num_transfers: int
    ) -> join_pb2.MeasuredLink:
        asked.append((peer.worker, num_transfers))
        found = rate if num_transfers else 0
        return join_pb2.MeasuredLink(worker=peer.worker, round_trip_us=trip_us, bytes_per_second=found)

    monkeypatch.setattr(links, "_measure", measured)
    async with Cluster(None, layers=(4, 4, 4), num_workers=0, waits=False) as cluster:
        for number in range(3):
            await start_at(cluster, f"w{number}", f"127.0.0.{number + 1}")
        await cluster.wait_status(
            lambda status: status.state == cluster_pb2.CLUSTER_STATE_SERVING and len(between(status)) == 2
        )
        checks, asked[:] = cluster.server.controller.link_checks, []
        trip_us, rate = 70_000, 10**4

        async def measured_again() -> list[tuple[float, int]]:
            checks.measure_hops()
            status = await cluster.wait_status(
                lambda status: all(link.round_trip.ToMicroseconds() == trip_us for link in between(status))
            )
            return [(link.bytes_per_second, bool(link.advice)) for link in between(status)]

        async with cluster.generating([RequestCase(prompt=(5, 17, 99), max_tokens=400)]) as answers:
            await until(lambda: bool(answers[0].tokens))
            assert await measured_again() == [(10**6, False)] * 2, "transfers would delay the request"
        assert sorted(asked) == [("w1", 0), ("w2", 0)]
        trip_us = 71_000
        assert await measured_again() == [(10**4, True)] * 2
        await start_at(cluster, "w3", "127.0.0.9")
        await until(lambda: ("w0", NUM_TRANSFERS) in asked)


async def test_the_coordinator_measures_its_own_links_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    async def measured(transport: object, address: str, *, num_transfers: int) -> MeasuredWay:
        asked.append((parse_address(address).host, num_transfers))
        return MeasuredWay(round_trip_s=0.03, bytes_per_s=1e6 if num_transfers else 0.0)

    monkeypatch.setattr(link_checks, "measure_way", measured)
    async with Cluster(None, layers=(6, 6), num_workers=0, waits=False) as cluster:
        await start_at(cluster, "w0", "127.0.0.2")
        await start_at(cluster, "w1", "127.0.0.3")
        status = await cluster.wait_status(
            lambda status: status.state == cluster_pb2.CLUSTER_STATE_SERVING and len(status.links) == 3
        )
        ends = [link for link in status.links if not (link.from_worker and link.to_worker)]
        assert [(link.round_trip.ToMicroseconds(), link.bytes_per_second) for link in ends] == [
            (30_000, 10**6)
        ] * 2
        asked.clear()
        async with cluster.generating([RequestCase(prompt=(5, 17, 99), max_tokens=400)]) as answers:
            await until(lambda: bool(answers[0].tokens))
            cluster.server.controller.link_checks.measure_hops()
            await until(lambda: len(asked) == 2)
        assert sorted(asked) == [("127.0.0.2", 0), ("127.0.0.3", 0)]
        assert cluster.server.controller.state.links.find("", "w0") == Link(
            round_trip_s=0.03, bytes_per_s=1e6
        ), "a rate stays"


async def test_a_peer_that_is_gone_is_a_problem_and_uploads_have_a_limit() -> None:
    async with Cluster(None, layers=(12,)) as cluster:
        address = cluster.workers["w0"].worker.listen_address
        peers = [
            join_pb2.LinkPeer(worker="gone", address="127.0.0.1:1"),
            join_pb2.LinkPeer(worker="w0", address=address),
        ]
        answer = await measure_links(PLAIN, join_pb2.MeasureLinks(peers=peers))
        gone, found = answer.measured_links.links
        assert gone.problem.startswith("UNAVAILABLE") and not gone.round_trip_us
        assert not found.problem and found.round_trip_us > 0 and found.bytes_per_second > 0
        data = [forward_pb2.ProbeLinkRequest(data=bytes(2**20))] * (MAX_TRANSFER_BYTES // 2**20 + 1)
        async with PLAIN.channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await forward_pb2_grpc.StageServiceStub(channel).ProbeLink(data, timeout=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_plan_avoids_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured(transport: object, peer: join_pb2.LinkPeer, _: int) -> join_pb2.MeasuredLink:
        trip_us = 50_000 if measuring == "w1" else 100  # the way from w1 to w0
        return join_pb2.MeasuredLink(worker=peer.worker, round_trip_us=trip_us, bytes_per_second=10**9)

    monkeypatch.setattr(links, "_measure", measured)
    async with Cluster(None, layers=(4, 4, 4), num_workers=0, waits=False) as cluster:
        table = cluster.server.controller.state.links
        for number in range(3):
            measuring = f"w{number}"
            await start_at(cluster, measuring, f"127.0.0.{number + 1}")
            if number == 1:
                await until(lambda: table.find("w0", "w1") is not None)
            elif number == 0:
                await until(lambda: "w0" in cluster.server.controller.connections)
        status = await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
        assert [worker.name for worker in status.workers] in (["w0", "w2", "w1"], ["w1", "w2", "w0"])
        assert (await cluster.generate(CASE.again())).succeeded


async def test_workers_that_share_memory_measure_nothing_at_any_address() -> None:
    async with Cluster(None, layers=(6, 6), num_workers=0, waits=False, same_host=SameHost.AUTO) as cluster:
        for number in range(2):
            await start_at(cluster, f"w{number}", f"127.0.0.{number + 1}")
        status = await cluster.wait_status(
            lambda status: (
                status.state == cluster_pb2.CLUSTER_STATE_SERVING
                and any(worker.hop_transport for worker in status.workers)
            )
        )
        transports = {worker.stage: worker.hop_transport for worker in status.workers}
        assert transports == {
            0: cluster_pb2.HOP_TRANSPORT_SHARED_MEMORY,
            1: cluster_pb2.HOP_TRANSPORT_UNSPECIFIED,
        }
        assert not [link for link in status.links if link.from_worker and link.to_worker]
        assert (await cluster.generate(CASE.again())).succeeded
