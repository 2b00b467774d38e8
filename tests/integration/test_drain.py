"""Draining workers, and health states meanwhile; with mock stages, whose tokens are known."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stageline.cli import main
from stageline.client.errors import StatusDetails, Unavailable, WorkerNotFound
from stageline_rpc.v1 import cluster_pb2, cluster_pb2_grpc
from tests.integration.calls import until
from tests.integration.cluster import DEADLINE_S, TEST_POLICY, TOKEN, Cluster, RequestCase
from tests.integration.request_cases import mixed_cases
from tests.integration.test_mock_cluster import VOCAB_SIZE, check, has_tokens, mock_cluster
from tests.mock_answers import mock_tokens
from wire.transport import PLAIN
from wire.user_files import write_secret

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
INFERENCE, STAGE = "stageline.v1.Inference", "stageline.internal.v1.StageService"


async def health(address: str, service: str = "") -> health_pb2.HealthCheckResponse.ServingStatus:
    async with PLAIN.channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINE_S)
        status: health_pb2.HealthCheckResponse.ServingStatus = answer.status
        return status


async def until_health(address: str, wanted: int, service: str = "") -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await health(address, service) != wanted:
            await asyncio.sleep(0.002)


def places(status: cluster_pb2.GetStatusResponse) -> list[str]:
    """The workers of the plan, in stage order."""
    return [worker.name for worker in status.workers if worker.HasField("stage")]


async def drain(cluster: Cluster, name: str) -> None:
    """Drain a worker and wait until it has stopped."""
    async with asyncio.timeout(DEADLINE_S):
        await cluster.client.drain(name, token=TOKEN)
        await cluster.workers[name].task


async def start_spare(cluster: Cluster) -> str:
    """Start one worker more than the plan needs."""
    name = f"w{cluster.num_stages}"
    await cluster.start_worker(name)
    await cluster.wait_status(lambda status: len(status.workers) == cluster.num_stages + 1)
    return name


# Growth


async def test_a_worker_that_joins_becomes_a_stage_and_no_request_fails() -> None:
    async with mock_cluster(2, policy=replace(TEST_POLICY, max_stages=3)) as cluster:
        async with cluster.generating(mixed_cases(16, max_tokens=120)) as answers:
            await until(lambda: has_tokens(answers, 3))
            await cluster.start_worker("w2")
            status = await cluster.wait_status(lambda status: len(places(status)) == 3)
            assert status.num_stages == 3
        check(answers)
        status = await cluster.wait_drained()
        assert (places(status), status.requests.finished) == (["w0", "w1", "w2"], 16)


# Drain


async def test_a_drain_of_an_unknown_worker_is_rejected() -> None:
    async with mock_cluster(1) as cluster:
        with pytest.raises(WorkerNotFound, match="worker 'unknown' not found"):
            await cluster.client.drain("unknown", token=TOKEN)
        async with PLAIN.channel(cluster.address) as channel:
            request = cluster_pb2.DrainRequest(worker="unknown")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await cluster_pb2_grpc.ClusterStub(channel).Drain(
                    request, metadata=(("authorization", f"Bearer {TOKEN}"),)
                )
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("metadata", "code", "reason"),
    [
        ((), grpc.StatusCode.UNAUTHENTICATED, "TOKEN_MISSING"),
        ((("authorization", "Bearer "),), grpc.StatusCode.UNAUTHENTICATED, "TOKEN_MISSING"),
        ((("authorization", f"Basic {TOKEN}"),), grpc.StatusCode.UNAUTHENTICATED, "TOKEN_MISSING"),
        ((("authorization", f"Bearer {TOKEN}x"),), grpc.StatusCode.PERMISSION_DENIED, "TOKEN_MISMATCH"),
    ],
    ids=["none", "empty", "other-scheme", "wrong"],
)
async def test_drain_needs_the_operator_token(
    metadata: tuple[tuple[str, str], ...], code: grpc.StatusCode, reason: str
) -> None:
    async with mock_cluster(1) as cluster, PLAIN.channel(cluster.address) as channel:
        request = cluster_pb2.DrainRequest(worker="w0")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await cluster_pb2_grpc.ClusterStub(channel).Drain(request, metadata=metadata, timeout=DEADLINE_S)
        assert (refused.value.code(), StatusDetails.of(refused.value).reason) == (code, reason)
        assert TOKEN not in (refused.value.details() or "")
        assert not cluster.workers["w0"].task.done()


async def test_the_drain_command_reports_drained_and_unknown_workers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_secret(tmp_path / "token", TOKEN)
    async with mock_cluster(1) as cluster:
        await start_spare(cluster)
        arguments = ["--coordinator", cluster.address, "--token-file", str(tmp_path / "token")]
        assert await asyncio.to_thread(main, ["drain", "w1", *arguments]) == 0
        assert capsys.readouterr().out == "worker w1 drained\n"
        assert await asyncio.to_thread(main, ["drain", "w1", *arguments]) == 1
        output = capsys.readouterr()
        assert (output.out, "worker 'w1' not found" in output.err) == ("", True)


async def test_a_spare_drains_at_once_without_a_new_epoch() -> None:
    async with mock_cluster(2) as cluster:
        spare, epoch = await start_spare(cluster), cluster.epoch
        await drain(cluster, spare)
        status = await cluster.client.status()
        assert (cluster.epoch, places(status), len(status.workers)) == (epoch, ["w0", "w1"], 2)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("has_spare", [False, True])
async def test_layers_move_under_load_and_no_request_fails(*, has_spare: bool) -> None:
    """Layers move to the spare if there is one, else to the remaining workers."""
    async with mock_cluster(3) as cluster:
        if has_spare:
            await start_spare(cluster)
        async with cluster.generating(mixed_cases(16, max_tokens=120)) as answers:
            await until(lambda: has_tokens(answers, 3))
            await drain(cluster, "w1")
            status = await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
            assert places(status) == (["w0", "w3", "w2"] if has_spare else ["w0", "w2"])
        check(answers)
        status = await cluster.wait_drained()
        assert status.requests.finished == 16


async def test_the_last_worker_finishes_its_requests_and_the_next_serves_the_queue() -> None:
    async with mock_cluster(1, "step=5ms") as cluster:
        running = [replace(case, max_tokens=60) for case in mixed_cases(4)]
        async with cluster.generating(running) as answers:
            await until(lambda: has_tokens(answers, 2))
            leaving = asyncio.create_task(drain(cluster, "w0"))
            await cluster.wait_status(
                lambda status: status.workers[0].state == cluster_pb2.WORKER_STATE_DRAINING
            )
            address = cluster.workers["w0"].worker.listen_address
            await until_health(address, NOT_SERVING, STAGE)
            assert await health(cluster.address) == NOT_SERVING
            status = await cluster.client.status()
            assert (status.state, status.health) == (
                cluster_pb2.CLUSTER_STATE_SERVING,
                cluster_pb2.HEALTH_DRAINING,
            )
            assert not all(len(completion.tokens) == 60 for completion in answers), (
                "all requests finished before the drain"
            )
            late = RequestCase(prompt=(5, 6, 7), max_tokens=9)
            waiting = asyncio.create_task(cluster.generate(late))
            await leaving
            assert all(len(completion.tokens) == 60 for completion in answers)
        check(answers)
        assert not waiting.done()
        await cluster.start_worker("w1")
        answer = await waiting
        assert answer.tokens == mock_tokens(late.prompt, 9, vocab_size=VOCAB_SIZE)


async def test_the_last_worker_leaves_at_the_drain_timeout() -> None:
    """Running requests continue on the next worker."""
    policy = replace(TEST_POLICY, drain_timeout_s=0.1)
    async with mock_cluster(1, "step=5ms", policy=policy) as cluster:
        async with cluster.generating([RequestCase(prompt=(1, 2), max_tokens=200)]) as answers:
            await until(lambda: has_tokens(answers, 2))
            await drain(cluster, "w0")
            assert len(answers[0].tokens) < 200
            await cluster.start_worker("w1")
        check(answers)


@pytest.mark.full
async def test_every_worker_can_be_replaced_under_load() -> None:
    async with mock_cluster(3) as cluster:
        async with cluster.generating(mixed_cases(32, max_tokens=150)) as answers:
            await until(lambda: has_tokens(answers, 2))
            for name in ("w0", "w1", "w2"):
                await drain(cluster, name)
                await cluster.start_worker(name)
                status = await cluster.wait_status(
                    lambda status: (
                        status.state == cluster_pb2.CLUSTER_STATE_SERVING and len(places(status)) == 3
                    )
                )
                assert places(status) == ["w0", "w1", "w2"]
        check(answers)


# Health


async def test_coordinator_health_is_serving_only_with_a_pipeline() -> None:
    async with mock_cluster(2, waits=False, num_workers=1) as cluster:
        await cluster.wait_status(lambda status: len(status.workers) == 1)
        for service in ("", INFERENCE):
            assert await health(cluster.address, service) == NOT_SERVING
        assert (await cluster.client.status()).health == cluster_pb2.HEALTH_STARTING
        await cluster.start_worker("w1")
        for service in ("", INFERENCE):
            await until_health(cluster.address, SERVING, service)
        assert (await cluster.client.status()).health == cluster_pb2.HEALTH_SERVING
        for running in list(cluster.workers.values()):
            await running.stop()
        for service in ("", INFERENCE):
            await until_health(cluster.address, NOT_SERVING, service)
        assert (await cluster.client.status()).health == cluster_pb2.HEALTH_DEGRADED
        for name in ("w0", "w1"):
            await cluster.start_worker(name)
        await until_health(cluster.address, SERVING)


async def test_worker_health_is_serving_during_an_epoch() -> None:
    async with mock_cluster(1) as cluster:
        await start_spare(cluster)
        first, spare = (cluster.workers[name].worker.listen_address for name in ("w0", "w1"))
        await until_health(first, SERVING, STAGE)
        assert await health(spare, STAGE) == NOT_SERVING
        await cluster.workers["w0"].stop()
        await until_health(spare, SERVING, STAGE)


async def test_a_draining_coordinator_rejects_new_requests_and_finishes_the_others() -> None:
    async with mock_cluster(2, "step=2ms") as cluster:
        async with cluster.generating(mixed_cases(4, max_tokens=60)) as answers:
            await until(lambda: has_tokens(answers, 2))
            draining = asyncio.create_task(cluster.server.drain())
            await until_health(cluster.address, NOT_SERVING)
            assert (await cluster.client.status()).health == cluster_pb2.HEALTH_DRAINING
            refused = await cluster.generate(RequestCase(prompt=(1,), max_tokens=3))
            assert isinstance(refused.error, Unavailable)
            assert "takes no new requests" in str(refused.error)
            assert not draining.done()
        check(answers)
        async with asyncio.timeout(DEADLINE_S):
            await draining
