"""A worker with a wrong weight outside all samples may compute the reference: the other workers serve."""

from __future__ import annotations

import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint import Checkpoint
from coordinator.cluster.checks import WeightsCheck
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import byte_outside_of_samples, make_checkpoint
from tests.integration.cluster import TEST_POLICY, Cluster, RequestCase

pytestmark = pytest.mark.full

LAYERS = (2, 2)
POLICY = replace(TEST_POLICY, weights_idle_s=0.05, rejoin_grace_s=0.05)
CASE = RequestCase(prompt=(5, 17, 99), max_tokens=8)
MEMORY_BYTES = [memory_mib * 1024 * 1024 for memory_mib in (256, 128, 64)]
WRONG_VALUE = 60.0
SERVING, BLOCKED = cluster_pb2.CLUSTER_STATE_SERVING, cluster_pb2.CLUSTER_STATE_BLOCKED


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("right") / "model"
    return make_checkpoint(directory, "llama", num_layers=sum(LAYERS), initializer_range=0.3)


def with_a_wrong_weight(model: Path, directory: Path, *, layer: int) -> Path:
    """A copy with the same fingerprint and one wrong layer."""
    copy = shutil.copytree(model, directory / "wrong")
    write_a_wrong_weight(copy, layer=layer)
    assert Checkpoint.open(copy).fingerprint == Checkpoint.open(model).fingerprint
    return copy


def write_a_wrong_weight(directory: Path, *, layer: int) -> Path:
    """Change one weight of a file in place; returns the file."""
    name = f"model.layers.{layer}.mlp.gate_proj.weight"
    entry = Checkpoint.open(directory).tensors[name]
    free = byte_outside_of_samples(name, entry)
    with (directory / entry.file).open("r+b") as stream:
        stream.seek(free + (entry.begin - free) % 4)
        stream.write(struct.pack("<f", WRONG_VALUE))
    return directory / entry.file


def without_workers(model: Path, *, cache_directory: Path | None = None) -> Cluster:
    """A checked cluster without workers; the test starts them."""
    return Cluster(
        model,
        layers=LAYERS,
        num_workers=0,
        waits=False,
        self_check=True,
        policy=POLICY,
        cache_directory=cache_directory,
    )


async def right_tokens(model: Path) -> list[int]:
    async with Cluster(model, layers=LAYERS) as cluster:
        return (await cluster.generate(CASE.again())).tokens


def is_compared(status: cluster_pb2.GetStatusResponse) -> bool:
    """Whether the cluster serves and all its weights are fully compared."""
    levels = {worker.weights for worker in status.workers if worker.HasField("stage")}
    return status.state == SERVING and levels == {cluster_pb2.WEIGHTS_CHECK_FULL}


def is_out(status: cluster_pb2.GetStatusResponse, name: str) -> bool:
    """Whether a worker is quarantined for its weights."""
    details = (worker.detail for worker in status.workers if worker.name == name)
    return "its weights differ" in next(details, "")


@pytest.mark.matrix(0, full=1)
@pytest.mark.parametrize(("rank", "layer"), [(0, 0), (1, 3), (2, 3), (0, 3)])
async def test_two_of_three_serve_wherever_the_wrong_worker_ranks(
    model: Path, tmp_path: Path, rank: int, layer: int
) -> None:
    """The source of the reference is the worker with the most free memory; the first two are planned."""
    wrong, memory = with_a_wrong_weight(model, tmp_path, layer=layer), MEMORY_BYTES.copy()
    cache = tmp_path / "cache"
    async with Cluster(
        model,
        layers=LAYERS,
        num_workers=0,
        waits=False,
        self_check=True,
        policy=POLICY,
        cache_directory=cache,
    ) as cluster:
        await cluster.start_worker("one", model_directory=wrong, memory_bytes=memory.pop(rank))
        for name in ("good", "good2"):
            await cluster.start_worker(name, memory_bytes=memory.pop(0))
        await cluster.wait_status(is_compared)
        assert (await cluster.generate(CASE.again())).tokens == await right_tokens(model)
    # The reference stored for the next coordinator is right as well.
    async with Cluster(
        model, layers=LAYERS, self_check=True, policy=POLICY, cache_directory=cache
    ) as cluster:
        check = (await cluster.client.status()).self_check
        assert check.verdict == cluster_pb2.SELF_CHECK_VERDICT_PASSED
        assert "from the kept reference" in check.detail


async def test_weights_are_compared_while_the_cluster_is_blocked(model: Path, tmp_path: Path) -> None:
    wrong = with_a_wrong_weight(model, tmp_path, layer=3)
    async with without_workers(model) as cluster:
        await cluster.start_worker("good", memory_bytes=MEMORY_BYTES[0])
        await cluster.start_worker("one", model_directory=wrong, memory_bytes=MEMORY_BYTES[1])
        status = await cluster.wait_status(lambda status: is_out(status, "one"))
        assert status.state == BLOCKED
        await cluster.workers["one"].stop()
        await cluster.start_worker("one")
        await cluster.wait_status(is_compared)


async def test_the_source_of_a_reference_is_compared_in_any_stage(model: Path, tmp_path: Path) -> None:
    """The source's own stage is right; its reference for the other stage is wrong."""
    wrong = with_a_wrong_weight(model, tmp_path, layer=0)
    async with without_workers(model) as cluster:
        await cluster.start_worker("good", memory_bytes=MEMORY_BYTES[1])
        await cluster.start_worker("one", model_directory=wrong, memory_bytes=MEMORY_BYTES[0])
        status = await cluster.wait_status(lambda status: is_out(status, "one"))
        await cluster.start_worker("good2")
        status = await cluster.wait_status(is_compared)
        assert {worker.name for worker in status.workers if worker.HasField("stage")} == {"good", "good2"}


async def test_a_failed_reference_is_dropped_with_its_lost_source(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source is lost before its weights are compared."""
    monkeypatch.setattr(WeightsCheck, "plan_failed", lambda *arguments: None)
    wrong = with_a_wrong_weight(model, tmp_path, layer=0)
    async with without_workers(model) as cluster:
        await cluster.start_worker("good", memory_bytes=MEMORY_BYTES[1])
        await cluster.start_worker("one", model_directory=wrong, memory_bytes=MEMORY_BYTES[0])
        status = await cluster.wait_state(BLOCKED)
        assert "differ from the reference of worker one" in status.detail
        await cluster.workers["one"].stop()
        await cluster.start_worker("good2")
        status = await cluster.wait_status(is_compared)
        assert "from the reference of worker good" in status.self_check.detail


async def test_a_checkpoint_that_changed_in_place_is_named(model: Path, tmp_path: Path) -> None:
    own = shutil.copytree(model, tmp_path / "own")
    async with Cluster(own, layers=LAYERS, self_check=True, policy=POLICY) as cluster:
        file = write_a_wrong_weight(own, layer=3)
        await cluster.workers["w1"].stop()
        await cluster.start_worker("w1")
        changed = "the checkpoint has changed since the coordinator started"
        status = await cluster.wait_status(lambda status: changed in status.self_check.detail)
        assert f"{changed}: restore {file}, or restart the coordinator" in status.self_check.detail
        assert status.self_check.verdict == cluster_pb2.SELF_CHECK_VERDICT_FAILED
