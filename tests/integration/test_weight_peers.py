"""Weights come from workers that have them, and from the coordinator's host, before the source."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from stage_worker.loading.stage_loader import WorkerResources
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import make_checkpoint
from tests.integration.cluster import TEST_POLICY, Cluster
from tests.integration.test_remote_weights import LAYERS, NOT_VERIFIED, SHAPE, remote_cluster, tokens_of
from tests.issued import Certificates
from tests.range_server import RangeServer, range_server
from weights.cached_model import CachedModel
from weights.pieces import DEFAULT_TRANSFER, TensorPiece

WEIGHTS_LISTEN = "127.0.0.1:0"
WRONG_TENSOR = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", **SHAPE)


def weights_sent(server: RangeServer) -> int:
    """Bytes of files with weights, without their headers."""
    requests = (request for request in server.requests if request.path.endswith(".safetensors"))
    return sum(request.sent_bytes for request in requests if request.begin > 8)


def weights_address(cluster: Cluster) -> str:
    port = cluster.server.weights_port
    assert port is not None
    return str(port.address)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("has_certificates", [False, True], ids=["plain", "certificates"])
async def test_a_second_pipeline_takes_its_weights_from_the_first(
    model: Path, tmp_path: Path, has_certificates: bool
) -> None:
    certificates = Certificates(tmp_path) if has_certificates else None
    with range_server(model) as server:
        first = remote_cluster(
            server, tmp_path / "first", weights_listen=WEIGHTS_LISTEN, certificates=certificates
        )
        async with first:
            expected = await tokens_of(first)
            fetched, everything = server.sent_bytes, weights_sent(server)
            second = remote_cluster(
                server,
                tmp_path / "second",
                weights_peers=(weights_address(first),),
                certificates=certificates,
            )
            async with second:
                assert await tokens_of(second) == expected
                status = await second.client.status()
            assert server.sent_bytes - fetched <= 0.1 * everything
            assert weights_sent(server) == everything, "all weights are from peers"
            assert all("100% of it from other workers" in worker.fetch_detail for worker in status.workers)
            assert [worker.weights for worker in status.workers] == [NOT_VERIFIED] * len(LAYERS)


@pytest.mark.full
async def test_peers_that_are_lost_are_named_and_the_source_has_the_rest(model: Path, tmp_path: Path) -> None:
    with range_server(model) as server:
        async with remote_cluster(server, tmp_path / "first", weights_listen=WEIGHTS_LISTEN) as first:
            expected = await tokens_of(first)
            await first.workers["w1"].worker._weights_port.stop()
            settings = {"weights_peers": (weights_address(first), "127.0.0.1:1")}
            async with remote_cluster(server, tmp_path / "second", **settings) as second:
                assert await tokens_of(second) == expected
                details = {
                    worker.name: worker.fetch_detail for worker in (await second.client.status()).workers
                }
    assert "not from w1: http://127.0.0.1:" in details["w1"]
    assert "not from" not in details["w0"] + details["w2"]


async def serve_from_the_coordinator(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers without the path of a directory or file fetch it, to the same tokens, proven byte by byte."""
    async with Cluster(model, layers=LAYERS, self_check=False) as cluster:
        expected = await tokens_of(cluster)
    monkeypatch.setattr(WorkerResources, "fetches", lambda self, model: True)  # as on another host
    cluster = Cluster(
        model,
        layers=LAYERS,
        self_check=False,
        cache_directory=tmp_path / "coordinator",
        weights_directory=tmp_path / "workers",
    )
    async with cluster:
        assert await tokens_of(cluster) == expected
        status = await cluster.client.status()
        assert all(worker.fetch_detail.startswith("fetched ") for worker in status.workers)
        # Every byte is compared with the coordinator's hashes when the cluster is idle.
        await cluster.wait_status(
            lambda status: all(worker.weights == cluster_pb2.WEIGHTS_CHECK_FULL for worker in status.workers)
        )


@pytest.mark.full
async def test_hosts_without_the_path_fetch_from_the_coordinator(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await serve_from_the_coordinator(shutil.copytree(model, tmp_path / "llama"), tmp_path, monkeypatch)
    held = {path.name for path in (tmp_path / "workers" / "w1" / "models").iterdir()}
    assert len(held) == 1 and held.pop().startswith("llama-")


@pytest.mark.full
@pytest.mark.parametrize("num_wrong", [1, 100], ids=["once", "always"])
async def test_wrong_bytes_in_a_cache_are_fetched_again_without_a_restart(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_wrong: int
) -> None:
    """The worker recorded the wrong bytes with their hash, so only the comparison finds them."""
    async with Cluster(model, layers=LAYERS, self_check=False) as cluster:
        expected = await tokens_of(cluster)
    monkeypatch.setattr(WorkerResources, "fetches", lambda self, model: True)
    write, left = CachedModel.write, [num_wrong]

    def write_wrong(
        cached: CachedModel, piece: TensorPiece, begin: int, data: memoryview, before: xxhash.xxh3_128
    ) -> None:
        is_of_it = piece.tensor == WRONG_TENSOR and "w1" in str(cached.directory)
        if is_of_it and begin == piece.begin and left[0]:
            left[0] -= 1
            changed = bytearray(data)
            changed[1000] ^= 1
            data = memoryview(changed)
        write(cached, piece, begin, data, before)

    monkeypatch.setattr(CachedModel, "write", write_wrong)
    cluster = Cluster(
        shutil.copytree(model, tmp_path / "llama"),
        layers=LAYERS,
        self_check=False,
        policy=replace(TEST_POLICY, weights_idle_s=0.05, rejoin_grace_s=0.05),
        cache_directory=tmp_path / "coordinator",
        weights_directory=tmp_path / "workers",
        waits=False,
    )
    async with cluster:
        if num_wrong == 1:
            await cluster.wait_status(_is_compared)
            assert await tokens_of(cluster) == expected
        else:
            num_left = num_wrong - 1 - DEFAULT_TRANSFER.max_damaged
            text = f"tensor {WRONG_TENSOR} has the XXH3-128"
            await cluster.wait_status(
                lambda status: left[0] == num_left and any(text in w.detail for w in status.workers)
            )


def _is_compared(status: cluster_pb2.GetStatusResponse) -> bool:
    levels = {worker.weights for worker in status.workers}
    is_serving = status.state == cluster_pb2.CLUSTER_STATE_SERVING
    return is_serving and levels == {cluster_pb2.WEIGHTS_CHECK_FULL}


@pytest.mark.full
async def test_a_loss_with_warm_spares_fetches_nothing(model: Path, tmp_path: Path) -> None:
    with range_server(model) as server:
        async with remote_cluster(server, tmp_path, num_workers=4) as cluster:
            expected = await tokens_of(cluster)

            def is_warm(status: cluster_pb2.GetStatusResponse) -> bool:
                details = [worker.fetch_detail for worker in status.workers]
                return any(detail.startswith("holds the layers of 3 of 3 possible") for detail in details)

            await cluster.wait_status(is_warm)
            before = server.sent_bytes
            await cluster.workers["w1"].stop()
            await cluster.wait_status(lambda status: _serves(status, "w3"))
            assert await tokens_of(cluster) == expected
            assert server.sent_bytes == before


def _serves(status: cluster_pb2.GetStatusResponse, name: str) -> bool:
    stages = {worker.name for worker in status.workers if worker.HasField("stage")}
    return status.state == cluster_pb2.CLUSTER_STATE_SERVING and name in stages


@pytest.mark.full
async def test_a_load_ends_a_prefetch(model: Path, tmp_path: Path) -> None:
    with range_server(model) as server:
        async with remote_cluster(server, tmp_path) as cluster:
            expected = await tokens_of(cluster)
            for worker in cluster.workers.values():
                await worker.worker._weights_port.stop()
            server.bytes_per_s = 64 * 1024
            await cluster.start_worker("w3")
            await cluster.wait_status(
                lambda status: any(worker.fetch.is_prefetch for worker in status.workers)
            )
            server.bytes_per_s = None
            await cluster.workers["w0"].stop()
            async with asyncio.timeout(60):
                await cluster.wait_status(lambda status: _serves(status, "w3"))
            assert await tokens_of(cluster) == expected
