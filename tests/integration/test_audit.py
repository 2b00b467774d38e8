"""Audit logs of coordinator, worker and gateway: what is in them, and what is not."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from httpx2 import AsyncClient

from certificates.identity import Identity, Role
from gateway.config import GatewayConfig
from gateway.server import GatewayServer
from stage_worker.server import Worker
from stageline.client.errors import PermissionDenied, WorkerNotFound
from stageline_rpc.internal.v1 import forward_pb2, forward_pb2_grpc, join_pb2_grpc
from stageline_rpc.v1 import cluster_pb2_grpc, kv_events_pb2
from telemetry.logs import LogSettings
from tests.integration.calls import until
from tests.integration.cluster import DEADLINE_S, Cluster
from tests.integration.request_cases import mixed_cases
from tests.integration.test_certificates import Code, hello_of, model_outcome, outcome
from tests.integration.test_dashboard import TOKEN
from tests.integration.test_dashboard import url as dashboard_url
from tests.integration.test_mock_cluster import check, mock_cluster
from tests.issued import Certificates, careless_channel
from web.api_keys import new_key, write_keys
from wire.ids import id_text

SECRET_TEXT = "the sesame password of the tests"


def records(path: Path, action: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in found if record["action"] == action]


async def test_a_coordinator_records_who_did_what(tmp_path: Path) -> None:
    certificates, path = Certificates(tmp_path), tmp_path / "audit.jsonl"
    async with mock_cluster(2, certificates=certificates, audit_log=path) as cluster:
        cases = mixed_cases(4, max_tokens=8)
        check(await cluster.generate_all(cases))
        async with careless_channel(certificates.of("me", Role.CLIENT), cluster.address) as channel:
            stub = join_pb2_grpc.MembershipServiceStub(channel)
            join = partial(stub.Join, timeout=DEADLINE_S)
            assert (await outcome(join, hello_of("me")))[0] is Code.PERMISSION_DENIED
        certificates.write(
            certificates.of("coordinator", Role.COORDINATOR),
            Identity(cluster="default", role=Role.COORDINATOR, name="coordinator"),
        )
        await cluster.client.drain("w1")
        assert (await model_outcome(certificates.of("me", Role.CLIENT), cluster.address))[0] is Code.OK
    assert {record["worker"] for record in records(path, "worker.join")} == {"w0", "w1"}
    assert records(path, "worker.leave")[0]["worker"] == "w1"
    (drain,) = records(path, "worker.drain")
    assert drain["who"].endswith("/operator/operator")
    assert drain["worker"] == "w1"
    (denial,) = records(path, "access.denied")
    assert denial["who"].endswith("/client/me")
    assert "may not call Join" in denial["problem"]
    ended = {record["request_id"]: record for record in records(path, "request.ended")}
    assert set(ended) == {record["request_id"] for record in records(path, "request.accepted")}
    for case in cases:
        record = ended[id_text(case.request_id)]
        assert (record["prompt_tokens"], record["completion_tokens"]) == (len(case.prompt), 8)
        assert (record["outcome"], record["status"]) == ("ok", "finished")
        assert record["who"] == "client operator/operator"
    assert {record["outcome"] for record in records(path, "files.reload")} == {"ok"}


async def test_cancels_and_drains_are_recorded_with_who_did_them(tmp_path: Path) -> None:
    path, cases = tmp_path / "audit.jsonl", mixed_cases(3, max_tokens=900)
    cluster = mock_cluster(
        1, "step=2ms", num_workers=3, audit_log=path, max_kv_tokens=8192, http="127.0.0.1:0", token=TOKEN
    )
    ids = [id_text(case.request_id) for case in cases]
    async with cluster:
        await cluster.wait_status(lambda status: len(status.workers) == 3)
        url, bearer = dashboard_url(cluster, ""), {"authorization": f"Bearer {TOKEN}"}
        async with cluster.generating(cases) as answers, AsyncClient(base_url=url, headers=bearer) as http:
            await until(lambda: all(answer.tokens for answer in answers))
            await cluster.client.cancel(ids[0], token=TOKEN)
            await cluster.client.cancel(ids[1])
            assert (await http.post(f"api/requests/{ids[2]}/cancel")).status_code == 200
            assert (await http.post("api/workers/w2/drain")).status_code == 202
        await cluster.client.drain("w1", token=TOKEN)
        with pytest.raises(WorkerNotFound):
            await cluster.client.drain("w9", token=TOKEN)
        with pytest.raises(PermissionDenied):
            await cluster.client.drain("w0", token="a token that is wrong")
    assert [(record["request_id"], record["who"]) for record in records(path, "request.cancel")] == [
        (ids[0], "operator token"),
        (ids[1], "host 127.0.0.1"),
        (ids[2], "operator token"),
    ]
    drains = records(path, "worker.drain")
    assert [(record["worker"], record["outcome"]) for record in drains] == [
        ("w2", "ok"),
        ("w1", "ok"),
        ("w9", "failed"),
    ]
    assert {(record["who"], record["host"]) for record in drains} == {("operator token", "127.0.0.1")}
    (denial,) = records(path, "access.denied")
    assert denial["problem"] == "wrong operator token"
    assert TOKEN not in path.read_text()


@pytest.mark.parametrize("with_token_ids", [False, True])
async def test_whoever_reads_token_ids_is_recorded(with_token_ids: bool, tmp_path: Path) -> None:
    certificates, path = Certificates(tmp_path), tmp_path / "audit.jsonl"
    request = kv_events_pb2.WatchKvEventsRequest(with_token_ids=with_token_ids)
    async with (
        mock_cluster(1, certificates=certificates, audit_log=path) as cluster,
        careless_channel(certificates.of("me", Role.OPERATOR), cluster.address) as channel,
    ):
        call: Any = cluster_pb2_grpc.ClusterStub(channel).WatchKvEvents(request)
        async with asyncio.timeout(DEADLINE_S):
            await call.read()
        call.cancel()
    (watch,) = records(path, "kv_events.watch")
    assert watch["who"].endswith("/operator/me")
    assert watch["with_token_ids"] is with_token_ids


async def test_a_worker_records_streams_that_it_refuses(tmp_path: Path) -> None:
    certificates, path = Certificates(tmp_path), tmp_path / "worker.jsonl"
    async with mock_cluster(1, certificates=certificates, num_workers=0, waits=False) as cluster:
        config = replace(cluster.worker_config("w0"), logs=LogSettings(audit_log=path))
        worker = Worker(config)
        await worker.start()
        async with careless_channel(certificates.of("w9", Role.WORKER), worker.listen_address) as channel:
            call = forward_pb2_grpc.StageServiceStub(channel).ComputeReference
            with pytest.raises(Exception, match="may not call ComputeReference"):
                await call(forward_pb2.ComputeReferenceRequest(), timeout=DEADLINE_S)
        await worker.stop()
    (denial,) = records(path, "access.denied")
    assert denial["process"] == "worker w0"
    assert denial["who"].endswith("/worker/w9")


async def test_a_gateway_records_requests_without_their_texts(tmp_path: Path) -> None:
    secret, key = new_key(tenant="acme")
    write_keys(tmp_path / "keys.toml", [key])
    paths = [tmp_path / "coordinator.jsonl", tmp_path / "gateway.jsonl"]
    async with Cluster(None, layers=(12,), has_text=True, audit_log=paths[0]) as cluster:
        server = GatewayServer(
            GatewayConfig(
                coordinator=cluster.address,
                listen="127.0.0.1:0",
                keys_file=tmp_path / "keys.toml",
                logs=LogSettings(audit_log=paths[1]),
            ),
            template=None,
        )
        await server.start()
        try:
            async with AsyncClient(base_url=f"http://{server.address}", timeout=DEADLINE_S) as http:
                await http.get("/health")
                for body in ({"prompt": SECRET_TEXT, "max_tokens": 3}, {"prompt": 7}):
                    await http.post(
                        "/v1/completions",
                        json=body,
                        headers={"authorization": f"Bearer {secret}", "x-request-id": "mine"},
                    )
                refused = await http.get("/v1/models", headers={"x-api-key": f"{secret}x"})
                assert refused.status_code == 401
        finally:
            await server.stop()
    (denial,) = records(paths[1], "access.denied")
    assert (denial["call"], denial["problem"]) == ("GET /v1/models", "HTTP status 401")
    found = records(paths[1], "request.ended")
    assert [(record["status"], record["outcome"]) for record in found] == [(200, "ok"), (400, "refused")]
    assert {(record["request_id"], record["endpoint"]) for record in found} == {("mine", "completions")}
    assert {record["who"] for record in found} == {f"key {key.id} of tenant acme"}
    assert len(records(paths[0], "request.ended")) == 1
    assert [record["who"] for record in records(paths[0], "request.ended")] == ["client acme"]
    texts = "".join(path.read_text() for path in paths)
    assert SECRET_TEXT not in texts
    assert secret not in texts
