"""A spare keeps the layers of others in memory and takes over without reading them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stage_worker.loading.stage_loader import WorkerResources
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import make_checkpoint
from tests.fake_device import FakeQueue
from tests.integration.cluster import Cluster
from tests.integration.test_remote_weights import LAYERS, SHAPE, remote_cluster, tokens_of
from tests.range_server import range_server

LIMIT = 32 * 1024 * 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", **SHAPE)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of weights that the workers of this process read from now on."""
    preadv, found = os.preadv, list[int]()

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        found.append(preadv(descriptor, buffers, offset))
        return found[-1]

    monkeypatch.setattr(os, "preadv", counted)
    return found


def is_warm(status: cluster_pb2.GetStatusResponse, name: str | None = None) -> bool:
    """Whether the worker `name`, or any one, has the layers of all possible plans."""
    text = f", all layers of {len(LAYERS)} of {len(LAYERS)} possible re-plans"
    workers = [worker for worker in status.workers if name is None or worker.name == name]
    return any("in memory" in worker.fetch_detail and text in worker.fetch_detail for worker in workers)


def stages(status: cluster_pb2.GetStatusResponse) -> dict[int, str]:
    """Worker of each stage while the cluster serves."""
    if status.state != cluster_pb2.CLUSTER_STATE_SERVING:
        return {}
    return {worker.stage: worker.name for worker in status.workers if worker.HasField("stage")}


async def lose_a_stage(cluster: Cluster) -> tuple[str, str]:
    """Stop the worker of the middle stage once the spare is warm; (its name, that of the spare)."""
    before = stages(await cluster.wait_status(is_warm))
    (spare,) = cluster.workers.keys() - before.values()
    await cluster.workers[before[1]].stop()
    await cluster.wait_status(lambda status: spare in stages(status).values())
    return before[1], spare


def parts_of(cluster: Cluster, name: str) -> Any:
    return cluster.workers[name].worker._backend._cache.parts  # type: ignore[attr-defined]


SPARE: dict[str, Any] = {"num_workers": len(LAYERS) + 1, "warm_spare_bytes": LIMIT, "self_check": False}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("weights_listen", [None, "off"], ids=["served", "on each host only"])
async def test_a_takeover_by_a_warm_spare_reads_nothing(
    weights_listen: str | None, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Cluster(model, layers=LAYERS, weights_listen=weights_listen, **SPARE) as cluster:
        expected = await tokens_of(cluster)
        await cluster.wait_status(is_warm)
        reads = count_reads(monkeypatch)
        _, spare = await lose_a_stage(cluster)
        assert await tokens_of(cluster) == expected
        loaded = cluster.workers[spare].worker._stage.loaded
        assert loaded is not None and loaded.read_bytes == 0
        assert not reads, "no worker reads a weight"
        layers = range(loaded.assignment.layer_begin, loaded.assignment.layer_end)
        assert sorted(parts_of(cluster, spare).layers) == [*layers], "other layers are freed"
        assert not is_warm(await cluster.client.status()), "a stage is no spare"


@pytest.mark.full
async def test_a_takeover_of_a_device_copies_from_the_host_and_reads_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of a CPU to which weights are copied like to a GPU."""
    resources = partial(WorkerResources, new_copies=lambda _: FakeQueue())
    monkeypatch.setattr("stage_worker.backends.torch_backend.WorkerResources", resources)
    async with Cluster(model, layers=LAYERS, **SPARE) as cluster:
        expected = await tokens_of(cluster)
        status = await cluster.wait_status(is_warm)
        assert any("in memory of the host (" in worker.fetch_detail for worker in status.workers)
        reads = count_reads(monkeypatch)
        _, spare = await lose_a_stage(cluster)
        assert await tokens_of(cluster) == expected
        loaded = cluster.workers[spare].worker._stage.loaded
        assert loaded is not None and loaded.read_bytes == 0
        assert not reads, "no worker reads a weight"
        assert not parts_of(cluster, spare).on_host, "memory of the host is free again"


@pytest.mark.full
async def test_a_warm_spare_of_a_remote_model_fetches_and_reads_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {name: value for name, value in SPARE.items() if name != "self_check"}
    with range_server(model) as server:
        async with remote_cluster(server, tmp_path, **settings) as cluster:
            expected = await tokens_of(cluster)
            await cluster.wait_status(is_warm)
            reads, sent_bytes = count_reads(monkeypatch), server.sent_bytes
            await lose_a_stage(cluster)
            assert await tokens_of(cluster) == expected
            assert (sum(reads), server.sent_bytes) == (0, sent_bytes)


@pytest.mark.full
async def test_a_worker_that_returns_is_the_next_warm_spare(model: Path) -> None:
    async with Cluster(model, layers=LAYERS, **SPARE) as cluster:
        lost, spare = await lose_a_stage(cluster)
        await cluster.start_worker(lost)
        # The other one's last heartbeat may still be that of a spare.
        await cluster.wait_status(lambda status: is_warm(status, lost))
        assert len(parts_of(cluster, lost).layers) == sum(LAYERS)
        assert len(parts_of(cluster, spare).layers) < sum(LAYERS)
