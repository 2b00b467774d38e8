"""Models in S3, as moto's server implements it: plan, fetch, the same tokens, and what can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint import Checkpoint
from checkpoint.errors import CheckpointNotFound
from stageline.cli import main
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import make_checkpoint
from tests.integration.cluster import Cluster
from tests.integration.test_remote_weights import LAYERS, NOT_VERIFIED, SHAPE, tokens_of
from tests.s3_server import REGION, S3Server, s3_server
from weights.errors import SourceChanged, SourceRefused
from weights.location import remote_model
from weights.metadata import pin
from weights.store_source import StoreSource

pytestmark = pytest.mark.full

URL = "s3://models/team/llama"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", **SHAPE)


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[S3Server]:
    with s3_server() as server:
        server.upload(model, "models", "team/llama")
        yield server


@pytest.fixture
def server(running: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    for name, value in {
        "ENDPOINT_URL": running.url,
        "ALLOW_HTTP": "true",
        "REGION": REGION,
        "ACCESS_KEY_ID": "reader",
        "SECRET_ACCESS_KEY": "a secret",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    return running


def store_cluster(directory: Path, *, waits: bool = True, num_workers: int = len(LAYERS)) -> Cluster:
    return Cluster(
        remote_model(URL),
        layers=LAYERS,
        cache_directory=directory / "coordinator",
        weights_directory=directory / "workers",
        self_check=False,
        waits=waits,
        num_workers=num_workers,
    )


@pytest.mark.full
async def test_a_model_in_s3_is_planned_fetched_and_serves_the_same_tokens(
    server: S3Server, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = ["plan", "--workers", "64MiB,64MiB,64MiB", "--json", "--kv-tokens", "512", "--model"]
    assert main([*plan, str(model)]) == 0
    expected_plan = json.loads(capsys.readouterr().out)
    assert main([*plan, URL]) == 0
    assert json.loads(capsys.readouterr().out) | {"model": ""} == expected_plan | {"model": ""}

    async with Cluster(model, layers=LAYERS, self_check=False) as cluster:
        expected = await tokens_of(cluster)
    async with store_cluster(tmp_path) as cluster:
        assert await tokens_of(cluster) == expected
        status = await cluster.client.status()
        assert [worker.weights for worker in status.workers] == [NOT_VERIFIED] * len(LAYERS)


async def test_an_object_that_changes_is_one_clear_error(
    server: S3Server, model: Path, tmp_path: Path
) -> None:
    async with store_cluster(tmp_path, waits=False, num_workers=0) as cluster:
        other = make_checkpoint(shutil.copytree(model, tmp_path / "other"), "llama", **SHAPE, seed=3)
        server.upload(other, "models", "team/llama")
        try:
            for number in range(len(LAYERS)):
                await cluster.start_worker(f"w{number}")
            status = await cluster.wait_status(
                lambda status: any(
                    "has changed since the model was opened" in w.detail for w in status.workers
                )
            )
            assert status.state != cluster_pb2.CLUSTER_STATE_SERVING
            assert any(f"{URL}/model-0000" in worker.detail for worker in status.workers)
        finally:
            server.upload(model, "models", "team/llama")


def test_wrong_credentials_are_named_without_the_secret(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, secret = server.require_credentials()
    try:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        source = StoreSource(remote_model(URL))
        config = pin(source).file("config.json")
        assert json.loads(source.read(config, 0, config.size_bytes))["model_type"] == "llama"
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAOFANOTHERUSER000")
        with pytest.raises(SourceRefused, match="refused access: check the credentials") as caught:
            pin(StoreSource(remote_model(URL)))
        assert secret not in str(caught.value)
        with pytest.raises(SourceRefused, match="refused access: check the credentials"):
            StoreSource(remote_model(URL)).read(config, 0, 2)
    finally:
        server.check_credentials(is_on=False)


def test_a_bucket_or_folder_that_is_missing_is_named(server: S3Server) -> None:
    for url in ("s3://nowhere/team/llama", "s3://models/team/mistral"):
        with pytest.raises(CheckpointNotFound, match=rf"{url} has neither config.json nor params.json"):
            pin(StoreSource(remote_model(url)))


def test_an_object_that_is_replaced_between_two_ranges_is_refused(server: S3Server, model: Path) -> None:
    source = StoreSource(remote_model(URL))
    name = Checkpoint.open(model).tensors["model.norm.weight"].file
    file = pin(source).file(name)
    data = (model / name).read_bytes()
    assert source.read(file, 1000, 3000) == data[1000:3000]
    client = server.client("s3")
    client.put_object(Bucket="models", Key=f"team/llama/{name}", Body=bytes(len(data)))
    try:
        with pytest.raises(SourceChanged, match=f"{URL}/{name} has changed"):
            source.read(file, 3000, 5000)
    finally:
        client.put_object(Bucket="models", Key=f"team/llama/{name}", Body=data)
