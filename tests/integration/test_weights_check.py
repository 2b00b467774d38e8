"""Every byte of the weights is compared with the coordinator's checkpoint while the cluster is idle."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint import Checkpoint
from checkpoint.hashes import Hashes, TensorHasher, hash_when_idle
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import byte_outside_of_samples, flip_byte, make_checkpoint
from tests.integration.cluster import DEADLINE_S, TEST_POLICY, Cluster, RequestCase

LAYERS = (1, 1, 1)
POLICY = replace(TEST_POLICY, weights_idle_s=0.05, rejoin_grace_s=0.05)
NEVER = replace(TEST_POLICY, weights_idle_s=3600.0)
CASE = RequestCase(prompt=(5, 17, 99), max_tokens=12)
TENSOR = "model.layers.1.mlp.gate_proj.weight"
LEVELS = {
    cluster_pb2.WEIGHTS_CHECK_UNSPECIFIED: "unchecked",
    cluster_pb2.WEIGHTS_CHECK_SAMPLED: "sampled",
    cluster_pb2.WEIGHTS_CHECK_FULL: "full",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_layers=3, initializer_range=0.3)


def levels(status: cluster_pb2.GetStatusResponse) -> list[str]:
    return [LEVELS[worker.weights] for worker in status.workers if worker.HasField("stage")]


def with_one_other_byte(model: Path, directory: Path, tensor: str) -> Path:
    """A copy with the same fingerprint."""
    copy = shutil.copytree(model, directory / "damaged")
    entry = Checkpoint.open(copy).tensors[tensor]
    flip_byte(copy / entry.file, byte_outside_of_samples(tensor, entry))
    assert Checkpoint.open(copy).fingerprint == Checkpoint.open(model).fingerprint
    return copy


async def test_weights_are_compared_by_samples_first_and_fully_when_idle(model: Path) -> None:
    async with Cluster(model, layers=LAYERS, policy=NEVER) as cluster:
        assert levels(await cluster.client.status()) == ["sampled"] * 3
    async with Cluster(model, layers=LAYERS, policy=POLICY) as cluster:
        await cluster.wait_status(lambda status: levels(status) == ["full"] * 3)
        # The next plan is compared again; a spare has nothing to compare.
        await cluster.start_worker("w3")
        await cluster.workers["w1"].stop()
        await cluster.wait_status(lambda status: levels(status) == ["full"] * 3 and cluster.epoch > 1)
        status = await cluster.client.status()
        assert [worker.name for worker in status.workers if worker.HasField("stage")] == ["w0", "w3", "w2"]


@pytest.mark.full
async def test_a_changed_byte_outside_all_samples_quarantines_the_worker(model: Path, tmp_path: Path) -> None:
    damaged = with_one_other_byte(model, tmp_path, TENSOR)
    async with Cluster(model, layers=LAYERS, policy=POLICY, num_workers=1, waits=False) as cluster:
        await cluster.start_worker("w1", model_directory=damaged)
        await cluster.start_worker("w2")

        def is_out(status: cluster_pb2.GetStatusResponse) -> bool:
            return cluster_pb2.WORKER_STATE_QUARANTINED in (worker.state for worker in status.workers)

        status = await cluster.wait_status(is_out)
        (worker,) = [
            worker for worker in status.workers if worker.state == cluster_pb2.WORKER_STATE_QUARANTINED
        ]
        assert worker.name == "w1"
        assert f"{damaged / 'model.safetensors'}: tensor {TENSOR} has the XXH3-128 " in worker.detail
        assert worker.detail.endswith("1 of 9 tensors differ")

        # The other workers take over its layers and generate the right tokens.
        await cluster.wait_status(
            lambda status: (
                status.state == cluster_pb2.CLUSTER_STATE_SERVING and levels(status) == ["full"] * 2
            )
        )
        answer = await cluster.generate(CASE)
    async with Cluster(model, layers=LAYERS, policy=NEVER) as cluster:
        assert (await cluster.generate(CASE.again())).tokens == answer.tokens


async def test_the_same_files_are_rejected_when_their_worker_rejoins(model: Path, tmp_path: Path) -> None:
    damaged = with_one_other_byte(model, tmp_path, TENSOR)
    async with Cluster(model, layers=(3,), policy=POLICY, num_workers=0, waits=False) as cluster:
        await cluster.start_worker("w0", model_directory=damaged)
        first = await cluster.wait_state(cluster_pb2.CLUSTER_STATE_BLOCKED)
        assert "its weights differ" in first.workers[0].detail
        before = cluster.incarnations()["w0"]
        controller = cluster.server.controller
        plan_id = controller.state.plan_id
        controller.leave(controller.connections["w0"], "its stream is cut")
        again = await cluster.wait_status(
            lambda status: (
                status.state == cluster_pb2.CLUSTER_STATE_BLOCKED
                and cluster.incarnations().get("w0", before) != before
            )
        )
        assert "its weights differ" in again.workers[0].detail
        assert f"tensor {TENSOR} has the XXH3-128" in again.workers[0].detail
        assert cluster.epoch == first.epoch, "it served no token again"
        assert controller.state.plan_id <= plan_id + 1, "it was tried at most once more"


async def test_another_checkpoint_is_tried_once_and_the_other_workers_load_once(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", num_layers=3, seed=1)
    async with Cluster(model, layers=LAYERS, policy=POLICY, num_workers=0, waits=False) as cluster:
        with caplog.at_level(logging.INFO):
            await cluster.start_worker("w0")
            await cluster.start_worker("w1")
            await cluster.start_worker("w2", model_directory=other)
            await cluster.wait_state(cluster_pb2.CLUSTER_STATE_BLOCKED)
            await cluster.start_worker("w3")
            await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
        assert [caplog.text.count(f"plan {number}: layers") for number in (1, 2, 3)] == [1, 1, 0]
        assert sum("worker w0 is ready" in line for line in caplog.messages) == 1


@pytest.mark.full
async def test_a_verdict_reaches_the_coordinator_after_the_worker_rejoins(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream of the comparison has ended, and another worker runs the stage."""
    damaged = with_one_other_byte(model, tmp_path, TENSOR)
    is_requested, may_answer = asyncio.Event(), asyncio.Event()

    async def hash_and_wait(
        hasher: TensorHasher, activity: Callable[[], object | None], *, idle_s: float
    ) -> Hashes:
        hashes = await hash_when_idle(hasher, activity, idle_s=idle_s)
        is_requested.set()
        await may_answer.wait()
        return hashes

    monkeypatch.setattr("stage_worker.loading.weights_check.hash_when_idle", hash_and_wait)
    async with Cluster(model, layers=(3,), policy=POLICY, num_workers=0, waits=False) as cluster:
        await cluster.start_worker("w0", model_directory=damaged)
        await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
        await cluster.start_worker("w1")
        async with asyncio.timeout(DEADLINE_S):
            await is_requested.wait()
        before = cluster.incarnations()["w0"]
        controller = cluster.server.controller
        controller.leave(controller.connections["w0"], "its stream is cut")
        await cluster.wait_status(
            lambda status: (
                status.state == cluster_pb2.CLUSTER_STATE_SERVING
                and cluster.incarnations().get("w0", before) != before
                and [worker.name for worker in status.workers if worker.HasField("stage")] == ["w1"]
            )
        )
        epoch = cluster.epoch
        may_answer.set()
        assert f"tensor {TENSOR} has the XXH3-128" in await detail_of_quarantined(cluster, "w0")

        # It repeats the verdict at every join until its files change.
        controller.leave(controller.connections["w0"], "its stream is cut again")
        assert "its weights differ" in await detail_of_quarantined(cluster, "w0")
        assert cluster.epoch == epoch, "the plan of the other workers continues to serve"
        shutil.copy(model / "model.safetensors", damaged / "repaired")
        os.replace(damaged / "repaired", damaged / "model.safetensors")
        controller.leave(controller.connections["w0"], "its stream is cut once more")
        await cluster.wait_status(lambda status: state_of(status, "w0") == cluster_pb2.WORKER_STATE_SPARE)
        await cluster.workers["w1"].stop()
        await cluster.wait_status(
            lambda status: (
                status.state == cluster_pb2.CLUSTER_STATE_SERVING
                and [worker.name for worker in status.workers if worker.HasField("stage")] == ["w0"]
                and levels(status) == ["full"]
            )
        )


async def detail_of_quarantined(cluster: Cluster, name: str) -> str:
    """Wait for this worker's quarantine; return its reason."""
    state = cluster_pb2.WORKER_STATE_QUARANTINED
    status = await cluster.wait_status(lambda status: state_of(status, name) == state)
    return next(worker.detail for worker in status.workers if worker.name == name)


def state_of(status: cluster_pb2.GetStatusResponse, name: str) -> cluster_pb2.WorkerState.ValueType:
    """State of a worker; LOST if it is not in the cluster."""
    found = (worker.state for worker in status.workers if worker.name == name)
    return next(found, cluster_pb2.WORKER_STATE_LOST)
