"""`StageService.ComputeReference` of a busy worker."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from checkpoint import Checkpoint
from stage_worker.assignment import ReferenceRequest
from stage_worker.backends import torch_backend
from stage_worker.backends.backend import LoadedStage, LoadProgress, StageLoadError
from stage_worker.backends.mock_spec import MockSpec
from stage_worker.backends.torch_backend import TorchBackend
from stageline_rpc.internal.v1 import forward_pb2, step_pb2
from stageline_rpc.v1 import cluster_pb2
from tests.integration.cluster import DEADLINE_S, Cluster, RequestCase
from wire.errors import StaleStream
from wire.peer_secrets import MAX_TRIES
from wire.reference import Reference
from wire.stage_calls import compute_reference

pytestmark = pytest.mark.full


async def request_reference(
    cluster: Cluster, directory: Path, *, fingerprint: str | None = None, secret: bytes | None = None
) -> forward_pb2.ComputeReferenceResponse:
    """Call ComputeReference as the coordinator does, or with another secret."""
    request = forward_pb2.ComputeReferenceRequest(
        secret=cluster.server.controller.connections["w0"].reference_secret if secret is None else secret,
        fingerprint=fingerprint or Checkpoint.open(directory).fingerprint,
        dtype=cluster_pb2.DTYPE_F32,
        texts=[step_pb2.TokenSequence(tokens=[1, 2, 3])],
        num_top=4,
    )
    address = cluster.workers["w0"].worker.listen_address
    return await compute_reference(address, request, timeout_s=DEADLINE_S)


class Endless:
    """A computation that runs until it is abandoned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun = threading.Event()
        self.has_ended = threading.Event()
        monkeypatch.setattr(torch_backend, "compute_reference", self._compute)

    def _compute(
        self, request: ReferenceRequest, directory: Path, *, free_bytes: int, progress: LoadProgress
    ) -> Reference:
        self.has_begun.set()
        pause = threading.Event()
        try:
            while not pause.wait(0.001):
                progress.advance(0.5)
        except StageLoadError as error:
            raise StaleStream("ended") from error
        finally:
            self.has_ended.set()
        raise AssertionError


async def set_in_time(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, DEADLINE_S)


async def test_a_worker_with_a_stage_returns_a_reference(tiny_llama: Path) -> None:
    async with Cluster(tiny_llama, layers=(3,)) as cluster:
        response = await request_reference(cluster, tiny_llama)
    (text,) = response.texts
    assert [row.token for row in text.rows][:2] == [2, 3]
    assert [len(row.top_tokens) for row in text.rows] == [4, 4, 4]
    assert len(response.layers) == 3


async def test_steps_and_heartbeats_continue_during_an_abandoned_reference(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = Endless(monkeypatch)
    async with Cluster(tiny_llama, layers=(1, 2)) as cluster:
        requested = asyncio.create_task(request_reference(cluster, tiny_llama))
        await set_in_time(endless.has_begun)
        connection = cluster.server.controller.connections["w0"]
        last_message_s = connection.last_message_s
        assert (await cluster.generate(RequestCase(prompt=(1, 2, 3), max_tokens=5))).succeeded
        await cluster.wait_status(lambda _: connection.last_message_s > last_message_s)
        assert not endless.has_ended.is_set()
        requested.cancel()
        await set_in_time(endless.has_ended)


async def test_another_checkpoint_is_a_failed_precondition(tiny_llama: Path) -> None:
    async with Cluster(tiny_llama, layers=(3,)) as cluster:
        with pytest.raises(grpc.aio.AioRpcError, match="fingerprint") as caught:
            await request_reference(cluster, tiny_llama, fingerprint="0123")
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("secret", [b"", b"\0" * 32, b"short"])
async def test_only_the_coordinator_gets_a_reference(tiny_llama: Path, secret: bytes) -> None:
    async with Cluster(tiny_llama, layers=(3,)) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await request_reference(cluster, tiny_llama, secret=secret)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert caught.value.details() == "reference secret does not match"


async def test_rejected_attempts_are_counted_and_logged(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Cluster(tiny_llama, layers=(3,)) as cluster:
        refusals = []
        for _ in range(MAX_TRIES + 2):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await request_reference(cluster, tiny_llama, secret=b"x" * 32)
            refusals.append(caught.value.details())
        response = await request_reference(cluster, tiny_llama)
    assert refusals[MAX_TRIES - 1] == "reference secret does not match"
    assert refusals[-1] == "reference secret does not match; 10 earlier attempts from this host failed too"
    logged = [line for line in caplog.messages if "reference secret" in line]
    assert len(logged) == MAX_TRIES
    assert logged[0] == ("refused ComputeReference: reference secret does not match, host=127.0.0.1 tries=1")
    assert len(response.texts[0].rows) == 3


async def test_a_request_that_is_too_large_is_rejected_unparsed(tiny_llama: Path) -> None:
    async with Cluster(tiny_llama, layers=(3,)) as cluster:
        request = forward_pb2.ComputeReferenceRequest(secret=b"s" * 70_000)
        with pytest.raises(grpc.aio.AioRpcError, match="the limit is 65536") as caught:
            await compute_reference(
                cluster.workers["w0"].worker.listen_address, request, timeout_s=DEADLINE_S
            )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_directory_named_by_the_request_is_never_opened(tiny_llama: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")  # opening it would wait for a writer
    named = str(tmp_path).encode()
    async with Cluster(tiny_llama, layers=(3,)) as cluster:
        request = forward_pb2.ComputeReferenceRequest.FromString(b"\x0a" + bytes([len(named)]) + named)
        request.secret = cluster.server.controller.connections["w0"].reference_secret
        request.fingerprint = Checkpoint.open(tiny_llama).fingerprint
        request.dtype, request.num_top = cluster_pb2.DTYPE_F32, 4
        request.texts.add(tokens=[1, 2, 3])
        address = cluster.workers["w0"].worker.listen_address
        response = await compute_reference(address, request, timeout_s=DEADLINE_S)
    assert len(response.texts[0].rows) == 3


async def test_a_worker_without_free_memory_rejects_with_the_numbers(tiny_llama: Path) -> None:
    async with Cluster(tiny_llama, layers=(3,)) as cluster:
        heartbeat = cluster.server.controller.connections["w0"].heartbeat
        backend: Any = cluster.workers["w0"].worker._backend
        memory_bytes = heartbeat.weight_bytes + heartbeat.kv_bytes + 5
        backend.device = replace(backend.device, memory_bytes=memory_bytes)
        with pytest.raises(grpc.aio.AioRpcError, match="bytes of memory, 5 are free") as caught:
            await request_reference(cluster, tiny_llama)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_loading_worker_rejects_the_request(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load = asyncio.Event()
    load = TorchBackend.load

    async def waiting(backend: TorchBackend, *arguments: Any) -> LoadedStage:
        await may_load.wait()
        return await load(backend, *arguments)

    monkeypatch.setattr(TorchBackend, "load", waiting)
    async with Cluster(tiny_llama, layers=(3,), waits=False) as cluster:
        worker: Any = cluster.workers["w0"].worker
        await cluster.wait_status(lambda _: worker._stage._loading is not None)
        with pytest.raises(grpc.aio.AioRpcError, match="the worker is loading a stage") as caught:
            await request_reference(cluster, tiny_llama)
        may_load.set()
        await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_mock_stage_cannot_compute_a_reference(tiny_llama: Path) -> None:
    async with Cluster(tiny_llama, layers=(3,), mock=MockSpec.parse("step=1ms")) as cluster:
        with pytest.raises(grpc.aio.AioRpcError, match="a mock stage has no weights") as caught:
            await request_reference(cluster, tiny_llama)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_mock_stages_of_a_real_model_are_not_checked() -> None:
    async with Cluster(None, layers=(6, 6), mock=MockSpec.parse("step=1ms")) as cluster:
        status = await cluster.client.status()
    assert (status.epoch, status.self_check.detail) == (1, "off: mock stages compute nothing")
