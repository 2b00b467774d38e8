"""Workers fetch the bytes of their own tensors from a remote source, and serve the same tokens."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoint import Checkpoint, stage_tensor_names
from checkpoint.headers import read_headers
from stage_worker import stage_manager
from stage_worker.policy import WORKER_POLICY
from stageline.cli import main
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import make_checkpoint
from tests.hub import Hub
from tests.integration.cluster import Cluster, RequestCase
from tests.range_server import Handler, RangeServer, Request, range_server
from weights.cache import DISK_RESERVE_BYTES, TensorCache
from weights.location import remote_model
from weights.manifest import MANIFEST_FILE, index_directory, read_manifest, write_manifest
from weights.pieces import DEFAULT_TRANSFER

LAYERS = (1, 2, 1)
ENDS = (0, *itertools.accumulate(LAYERS))
SHAPE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_shard_size": "1MB",
}
CASES = [
    RequestCase(prompt=(5, 17, 99), max_tokens=12),
    RequestCase(prompt=(1, 2, 3, 4), max_tokens=9, seed=7),
]
NOT_VERIFIED = cluster_pb2.WEIGHTS_CHECK_NOT_VERIFIED


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", **SHAPE)


def excluded_because(reason: str) -> Callable[[cluster_pb2.GetStatusResponse], bool]:
    """Whether a worker is excluded with `reason` in its detail."""

    def is_excluded(status: cluster_pb2.GetStatusResponse) -> bool:
        excluded = [w.detail for w in status.workers if w.state == cluster_pb2.WORKER_STATE_QUARANTINED]
        return any(reason in detail for detail in excluded)

    return is_excluded


def remote_cluster(server: RangeServer, directory: Path, **settings: object) -> Cluster:
    return cluster_of(server.url, directory, **settings)


def cluster_of(address: str, directory: Path, **settings: object) -> Cluster:
    return Cluster(
        remote_model(address),
        layers=LAYERS,
        cache_directory=directory / "coordinator",
        weights_directory=directory / "workers",
        **{"self_check": False, **settings},  # type: ignore[arg-type]
    )


def metadata_bytes(model: Path) -> int:
    """Config, index and headers."""
    checkpoint = Checkpoint.open(model)
    shards = {entry.file for entry in checkpoint.tensors.values()}
    headers = [min(e.begin for e in checkpoint.tensors.values() if e.file == file) for file in shards]
    others = ("config.json", "generation_config.json", "model.safetensors.index.json")
    return sum(headers) + sum((model / name).stat().st_size for name in others)


def stage_bytes(model: Path, begin: int, end: int) -> int:
    checkpoint = Checkpoint.open(model)
    names = stage_tensor_names(
        checkpoint.config, begin, end, has_embeddings=begin == 0, has_head=end == checkpoint.config.num_layers
    )
    return sum(checkpoint.tensors[name].num_bytes for name in names)


async def tokens_of(cluster: Cluster) -> list[list[int]]:
    return [answer.tokens for answer in await cluster.generate_all([case.again() for case in CASES])]


async def test_a_remote_model_gives_the_same_tokens_and_each_worker_fetches_only_its_layers(
    model: Path, tmp_path: Path
) -> None:
    async with Cluster(model, layers=LAYERS, self_check=False) as cluster:
        expected = await tokens_of(cluster)
    with range_server(model) as server:
        async with remote_cluster(server, tmp_path, waits=False, num_workers=0) as cluster:
            opened = server.sent_bytes
            assert opened <= metadata_bytes(model) * 2, "the coordinator reads no weights"
            for index in range(len(LAYERS)):
                await cluster.start_worker(f"w{index}")
            status = await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
            assert await tokens_of(cluster) == expected
            assert [worker.weights for worker in status.workers] == [NOT_VERIFIED] * 3
            fetched = server.sent_bytes - opened
        sizes = [stage_bytes(model, begin, end) for begin, end in itertools.pairwise(ENDS)]
        allowed = sum(sizes) * 1.01 + len(LAYERS) * metadata_bytes(model)
        assert sum(sizes) < fetched <= allowed
        assert not any(path.suffix == ".tmp" for path in tmp_path.rglob("*"))

        # Workers that start again with their caches fetch nothing at all.
        before = server.sent_bytes
        async with remote_cluster(server, tmp_path) as cluster:
            assert await tokens_of(cluster) == expected
            sent = server.sent_bytes - before  # workers that stop give their layers to others
        again = [request for request in server.requests if request.method == "GET" and request.sent_bytes]
        index = [request for request in again if request.path.endswith("index.json")]
        assert sent == index[-1].sent_bytes, "the coordinator reads the index"


@pytest.mark.full
async def test_a_manifest_proves_every_byte_and_a_wrong_one_is_never_served(
    model: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    headers = read_headers(copy)
    manifest = index_directory(copy, headers, lambda num_bytes: None)
    write_manifest(copy / MANIFEST_FILE, manifest)
    with range_server(copy) as server:
        async with remote_cluster(server, tmp_path / "proven") as cluster:
            status = await cluster.client.status()
            assert [worker.weights for worker in status.workers] == [cluster_pb2.WEIGHTS_CHECK_FULL] * 3
            tokens = await tokens_of(cluster)
        entry = headers.tensors["model.layers.1.mlp.up_proj.weight"]
        server.flip[entry.file] = entry.begin + 1000
        async with remote_cluster(server, tmp_path / "damaged", waits=False) as cluster:
            status = await cluster.wait_status(
                lambda status: any("differs from the manifest" in worker.detail for worker in status.workers)
            )
            detail = next(worker.detail for worker in status.workers if "manifest" in worker.detail)
            assert "tensor model.layers.1.mlp.up_proj.weight" in detail and server.url in detail
            assert status.state != cluster_pb2.CLUSTER_STATE_SERVING
        # Caches of proven weights serve although the source is damaged by now.
        async with remote_cluster(server, tmp_path / "proven") as cluster:
            assert await tokens_of(cluster) == tokens


def is_of_weights(request: Request) -> bool:
    return request.path.endswith(".safetensors") and request.begin > 8


def is_of_config(request: Request) -> bool:
    return request.path.endswith("/config.json")


@pytest.mark.parametrize("is_refused", [is_of_weights, is_of_config])
async def test_status_names_the_source_that_holds_up_a_load(
    is_refused: Callable[[Request], bool], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handler: Handler, request: Request) -> bool:
        if is_refused(request):
            handler.answer(503, {})
        return is_refused(request)

    def is_named(status: cluster_pb2.GetStatusResponse) -> bool:
        details = [worker.detail for worker in status.workers if worker.detail]
        return any("answered 503" in detail for detail in details) and "answered 503" in status.detail

    with range_server(model) as server:
        async with remote_cluster(server, tmp_path, waits=False, num_workers=0) as cluster:
            server.misbehave = refuse
            for index in range(len(LAYERS)):
                await cluster.start_worker(f"w{index}")
            status = await cluster.wait_status(is_named)
            assert status.detail.startswith("workers are loading their layers; worker w")
            server.misbehave = None
            status = await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
            assert status.detail == "" and not any(worker.detail for worker in status.workers)


async def test_a_worker_reports_the_failure_of_a_load_from_disk_until_a_load_succeeds(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "llama", num_layers=4)
    weights, away = model / "model.safetensors", tmp_path / "away"
    async with Cluster(model, layers=(4,), self_check=False, waits=False, num_workers=0) as cluster:
        weights.rename(away)
        first = await cluster.start_worker("w0")

        def is_named(status: cluster_pb2.GetStatusResponse) -> bool:
            return any("model.safetensors" in worker.detail for worker in status.workers)

        await cluster.wait_status(is_named)
        assert "model.safetensors" in first.worker._stage.heartbeat().load_problem
        away.rename(weights)
        second = await cluster.start_worker("w1")
        await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
        assert second.worker._stage.heartbeat().load_problem == ""


@pytest.mark.full
async def test_workers_join_again_by_themselves_after_an_outage_of_the_source(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = replace(DEFAULT_TRANSFER, give_up_s=0.5)
    monkeypatch.setattr("stage_worker.loading.remote_weights.DEFAULT_TRANSFER", policy)
    monkeypatch.setattr(stage_manager, "WORKER_POLICY", replace(WORKER_POLICY, load_again_s=3.0))

    def refuse(handler: Handler, request: Request) -> bool:
        if is_refused := request.path.endswith(".safetensors") and request.begin > 8:
            handler.answer(503, {})
        return is_refused

    with range_server(model) as server:
        server.misbehave = refuse
        async with remote_cluster(server, tmp_path, waits=False) as cluster:
            await cluster.wait_status(excluded_because("could not load its stage: no byte from"))
            server.misbehave = None
            await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
            await tokens_of(cluster)


@pytest.mark.full
async def test_workers_join_again_by_themselves_when_the_disk_has_room(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_manager, "WORKER_POLICY", replace(WORKER_POLICY, load_again_s=3.0))
    with range_server(model) as server, monkeypatch.context() as patched:
        patched.setattr("weights.cache.free_bytes", lambda directory: DISK_RESERVE_BYTES + 1000)
        async with remote_cluster(server, tmp_path, waits=False) as cluster:
            await cluster.wait_status(excluded_because("but 64.0 MiB of the disk are free"))
            patched.undo()
            await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
            await tokens_of(cluster)


@pytest.mark.full
async def test_a_model_of_a_hub_gives_the_same_tokens(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Cluster(model, layers=LAYERS, self_check=False) as cluster:
        expected = await tokens_of(cluster)
    with range_server(tmp_path) as api, range_server(tmp_path) as store:
        Hub(model, api, store).use(monkeypatch)
        async with cluster_of("hf://org/name@main", tmp_path) as cluster:
            assert await tokens_of(cluster) == expected
        weights = sum(stage_bytes(model, *cut) for cut in itertools.pairwise(ENDS))
        assert store.sent_bytes <= weights * 1.01 + 4 * metadata_bytes(model)


@pytest.mark.full
async def test_a_worker_joins_again_by_itself_when_its_cache_is_no_longer_in_use(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart beside a worker that drains."""
    monkeypatch.setattr(stage_manager, "WORKER_POLICY", replace(WORKER_POLICY, load_again_s=3.0))
    with range_server(model) as server, ExitStack() as held:
        held.enter_context(closing(TensorCache(tmp_path / "workers" / "w1")))
        async with remote_cluster(server, tmp_path, waits=False) as cluster:
            await cluster.wait_status(excluded_because("is in use by process"))
            held.close()
            await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
            await tokens_of(cluster)


@pytest.mark.full
async def test_the_self_check_takes_its_reference_from_the_manifest(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    assert main(["weights", "index", str(copy), "--reference", "f32"]) == 0
    assert "references of the self-check: f32" in capsys.readouterr().out
    right = read_manifest(copy / MANIFEST_FILE)
    with range_server(copy) as server:
        async with remote_cluster(server, tmp_path / "right", self_check=True) as cluster:
            check = (await cluster.client.status()).self_check
            assert check.verdict == cluster_pb2.SELF_CHECK_VERDICT_PASSED
            assert "from the reference of the manifest" in check.detail

        other = make_checkpoint(tmp_path / "other", "llama", **SHAPE, seed=3)
        assert main(["weights", "index", str(other), "--reference", "f32"]) == 0
        wrong = read_manifest(other / MANIFEST_FILE).references
        write_manifest(copy / MANIFEST_FILE, replace(right, references=wrong))
        async with remote_cluster(server, tmp_path / "wrong", self_check=True, waits=False) as cluster:
            status = await cluster.wait_state(cluster_pb2.CLUSTER_STATE_BLOCKED)
            assert "the reference of the manifest" in status.self_check.detail
            assert status.self_check.verdict == cluster_pb2.SELF_CHECK_VERDICT_FAILED


async def test_a_source_that_changes_is_one_clear_error(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    with range_server(copy) as server:
        async with remote_cluster(server, tmp_path, waits=False, num_workers=0) as cluster:
            make_checkpoint(
                copy,
                "llama",
                num_layers=4,
                hidden_size=256,
                intermediate_size=512,
                max_shard_size="1MB",
                seed=3,
            )
            await cluster.start_worker("w0")
            await cluster.start_worker("w1")
            await cluster.start_worker("w2")

            def is_told(status: cluster_pb2.GetStatusResponse) -> bool:
                return any("has changed since the model was opened" in w.detail for w in status.workers)

            status = await cluster.wait_status(is_told)
            assert status.state != cluster_pb2.CLUSTER_STATE_SERVING


async def test_a_worker_with_a_directory_of_its_own_is_told_to_start_without(
    model: Path, tmp_path: Path
) -> None:
    with range_server(model) as server:
        cluster = Cluster(
            remote_model(server.url),
            layers=(4,),
            cache_directory=tmp_path,
            self_check=False,
            waits=False,
            num_workers=0,
        )
        async with cluster:
            await cluster.start_worker("w0", model_directory=model)
            status = await cluster.wait_status(
                lambda status: any("without --model" in worker.detail for worker in status.workers)
            )
            assert status.state != cluster_pb2.CLUSTER_STATE_SERVING
