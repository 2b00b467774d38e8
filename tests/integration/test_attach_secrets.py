"""Only callers with its secret may attach to a request or cancel it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.engine.request import check_attach_secret, new_attach_secret, secret_digest
from stageline import Client, PermissionDenied
from stageline import new_attach_secret as client_secret
from stageline.client.errors import InvalidRequest, StatusDetails
from stageline_rpc.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.integration.calls import message
from tests.integration.cluster import DEADLINE_S, TOKEN
from tests.integration.metrics_cluster import MetricsCluster
from tests.integration.test_mock_cluster import mock_cluster
from wire.channels import ATTACH_SECRET_KEY, AUTHORIZATION_KEY
from wire.errors import AttachSecretMismatch
from wire.errors import InvalidRequest as Refused
from wire.peer_secrets import MAX_TRIES
from wire.transport import PLAIN

PROMPT, NUM_TOKENS = [1, 2, 3], 200
StatusCode = grpc.StatusCode


def bearer(token: str) -> tuple[str, str]:
    return AUTHORIZATION_KEY, f"Bearer {token}"


class Wire:
    """Calls with arbitrary metadata."""

    def __init__(self, channel: grpc.aio.Channel, request_id: str) -> None:
        self.stub = inference_pb2_grpc.InferenceStub(channel)
        self.request_id = request_id

    async def outcome(self, method: str, *metadata: tuple[str, str]) -> tuple[StatusCode, str]:
        """Status and reason of Attach or Cancel."""
        try:
            if method == "cancel":
                request = inference_pb2.CancelRequest(request_id=self.request_id)
                await self.stub.Cancel(request, metadata=metadata, timeout=DEADLINE_S)
            else:
                attach = inference_pb2.AttachRequest(request_id=self.request_id)
                call: Any = self.stub.Attach(attach, metadata=metadata, timeout=DEADLINE_S)
                await call.read()
                call.cancel()
        except grpc.aio.AioRpcError as error:
            return error.code(), StatusDetails.of(error).reason
        return StatusCode.OK, ""


@pytest.mark.parametrize("method", ["attach", "cancel"])
async def test_a_generated_attach_secret_is_sent_with_the_initial_metadata(method: str) -> None:
    request = message(PROMPT, NUM_TOKENS, keep_s=60.0)
    async with mock_cluster(1, "step=5ms") as cluster, PLAIN.channel(cluster.address) as channel:
        wire = Wire(channel, request.request_id)
        generating: Any = wire.stub.Generate(request, timeout=DEADLINE_S)
        metadata = dict(await generating.initial_metadata())
        secret = str(metadata[ATTACH_SECRET_KEY])
        assert len(secret) == 43
        denied = (StatusCode.PERMISSION_DENIED, "ATTACH_SECRET_MISMATCH")
        for given in ("", secret[:-1], secret + "x", "0" * 43):
            assert await wire.outcome(method, *([(ATTACH_SECRET_KEY, given)] if given else [])) == denied
        await generating.read()  # still attached to this call
        unknown = Wire(channel, message(PROMPT, 1).request_id)
        assert (await unknown.outcome(method))[0] is StatusCode.NOT_FOUND
        assert await wire.outcome(method, (ATTACH_SECRET_KEY, secret)) == (StatusCode.OK, "")


async def test_the_operator_can_cancel_any_request_and_attach_to_none() -> None:
    request = message(PROMPT, NUM_TOKENS)
    async with mock_cluster(1, "step=5ms") as cluster, PLAIN.channel(cluster.address) as channel:
        wire = Wire(channel, request.request_id)
        generating: Any = wire.stub.Generate(request, timeout=DEADLINE_S)
        await generating.read()
        assert await wire.outcome("attach", bearer(TOKEN)) == (
            StatusCode.PERMISSION_DENIED,
            "ATTACH_SECRET_MISMATCH",
        )
        assert await wire.outcome("cancel", bearer(f"{TOKEN}x")) == (
            StatusCode.PERMISSION_DENIED,
            "TOKEN_MISMATCH",
        )
        assert await wire.outcome("cancel", bearer(TOKEN)) == (StatusCode.OK, "")


async def test_wrong_secrets_and_tokens_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with MetricsCluster("step=1ms", num_stages=1) as cluster:
        async with PLAIN.channel(cluster.address) as channel:
            request = message(PROMPT, NUM_TOKENS, keep_s=60.0)
            wire = Wire(channel, request.request_id)
            generating: Any = wire.stub.Generate(request, timeout=DEADLINE_S)
            await generating.read()
            for _ in range(MAX_TRIES + 2):
                await wire.outcome("attach", (ATTACH_SECRET_KEY, "0" * 43))
            await wire.outcome("cancel", bearer(f"{TOKEN}x"))
            cluster_stub, drain = cluster_pb2_grpc.ClusterStub(channel), cluster_pb2.DrainRequest(worker="w0")
            with pytest.raises(grpc.aio.AioRpcError):
                await cluster_stub.Drain(drain, metadata=(bearer("wrong"),))
            assert await wire.outcome("cancel", bearer(TOKEN)) == (StatusCode.OK, "")
        scraped = await cluster.scrape()
    name = "stageline_access_refused_total"
    assert scraped.get(name, secret="attach_secret") == MAX_TRIES + 2
    assert scraped.get(name, secret="operator_token") == 2
    assert scraped.has(name, secret="hop_secret") and scraped.get(name, secret="hop_secret") == 0
    attach = [text for text in caplog.messages if text.startswith("refused Attach: wrong attach secret")]
    assert len(attach) == MAX_TRIES
    assert attach[0].endswith("host=127.0.0.1 tries=1")
    operator = "refused an operator call: wrong operator token, host=127.0.0.1 tries="
    assert [text for text in caplog.messages if text.startswith(operator)] == [f"{operator}1", f"{operator}2"]
    assert TOKEN not in caplog.text


async def test_a_client_secret_is_used_and_a_short_one_rejected() -> None:
    own = client_secret()
    async with mock_cluster(1, "step=5ms") as cluster, Client(cluster.address) as other:
        outputs = cluster.client.generate(
            PROMPT, max_tokens=NUM_TOKENS, attach_secret=own, timeout_s=DEADLINE_S
        )
        request_id = (await anext(outputs)).request_id
        with pytest.raises(InvalidRequest, match="was not sent by this client: pass its secret"):
            await other.cancel(request_id)
        with pytest.raises(PermissionDenied) as denied:
            await other.cancel(request_id, secret=client_secret())
        assert denied.value.reason == "ATTACH_SECRET_MISMATCH"
        await other.cancel(request_id, secret=own)
        with pytest.raises(InvalidRequest, match="32 to 128"):
            cluster.client.generate(PROMPT, attach_secret="short")
        async with PLAIN.channel(cluster.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            call: Any = stub.Generate(message(PROMPT, 1), metadata=((ATTACH_SECRET_KEY, "x" * 31),))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() is StatusCode.INVALID_ARGUMENT


async def test_the_digest_of_the_secret_survives_a_restart(tmp_path: Path) -> None:
    journal, own = tmp_path / "journal.db", client_secret()
    async with mock_cluster(1, "step=5ms", journal=journal) as cluster:
        outputs = cluster.client.generate(
            PROMPT, max_tokens=NUM_TOKENS, attach_secret=own, on_disconnect="detach", timeout_s=DEADLINE_S
        )
        request_id = (await anext(outputs)).request_id
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert own.encode() not in written
    async with (
        mock_cluster(1, "step=1ms", journal=journal) as cluster,
        PLAIN.channel(cluster.address) as channel,
    ):
        assert (await Wire(channel, request_id).outcome("attach"))[0] is StatusCode.PERMISSION_DENIED
        tokens = [
            token
            async for output in cluster.client.attach(request_id, secret=own, timeout_s=DEADLINE_S)
            for token in output.token_ids
        ]
        assert len(tokens) == NUM_TOKENS


def test_a_request_without_a_digest_accepts_no_secret() -> None:
    with pytest.raises(AttachSecretMismatch):
        check_attach_secret("", b"")
    with pytest.raises(AttachSecretMismatch):
        check_attach_secret(new_attach_secret(), b"")
    secret = new_attach_secret()
    check_attach_secret(secret, secret_digest(secret))
    with pytest.raises(Refused):
        secret_digest("x" * 129)


async def test_neither_secret_nor_token_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    own = client_secret()
    caplog.set_level("DEBUG")
    async with mock_cluster(1, "step=1ms") as cluster:
        await cluster.client.complete(PROMPT, max_tokens=2, attach_secret=own, timeout_s=DEADLINE_S)
        assert own not in repr(cluster.server._config) and TOKEN not in repr(cluster.server._config)
    assert own not in caplog.text and TOKEN not in caplog.text
