"""Tenants through keys of a gateway: nobody reads, ends, or feels the prompts of another."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from httpx2 import AsyncClient, AsyncHTTPTransport, Response

from certificates.identity import Role
from coordinator.engine.durability import Durability
from coordinator.journal.journal import Journal
from gateway.config import GatewayConfig
from gateway.server import GatewayServer
from stageline.client.client import Client
from stageline.client.errors import Cancelled, RequestNotFound
from stageline_rpc.v1 import inference_pb2, inference_pb2_grpc
from tests.integration.calls import message, until, until_ready
from tests.integration.cluster import DEADLINE_S, Cluster
from tests.integration.numbered_calls import SECRET, Gateway, Numbered
from tests.integration.test_mock_cluster import VOCAB_SIZE, mock_cluster
from tests.issued import Certificates, careless_channel
from tests.mock_answers import mock_tokens
from tests.unit.coordinator.journal.journals import crashed
from text.grammars import GrammarCompiler, GrammarKind
from web.api_keys import changed_keys, new_key
from wire.channels import ATTACH_SECRET_KEY, TENANT_KEY
from wire.sampling import GrammarSpec
from wire.transport import PLAIN

PROMPT = [3 + index % 90 for index in range(512)]
NUM_CACHED = 511
"""The last token is computed: it has the logits of the first new one."""


class Keys:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "keys.toml"
        with changed_keys(self.path):
            pass

    def new(self, tenant: str, **limits: Any) -> str:
        text, key = new_key(tenant=tenant, **limits)
        with changed_keys(self.path) as known:
            known[key.id] = key
        return text

    def revoke_all(self) -> None:
        with changed_keys(self.path) as known:
            known.clear()


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@asynccontextmanager
async def serving(cluster: Cluster, keys: Keys | None) -> AsyncIterator[AsyncClient]:
    config = GatewayConfig(coordinator=cluster.address, listen="127.0.0.1:0", keys_file=keys and keys.path)
    server = GatewayServer(config, template=None)
    await server.start()
    try:
        async with AsyncClient(base_url=f"http://{server.address}", timeout=DEADLINE_S) as http:
            yield http
    finally:
        await server.stop()


async def complete(http: AsyncClient, key: str, **fields: Any) -> Response:
    body = {"prompt": PROMPT, "max_tokens": 2, **fields}
    return await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})


def cached(response: Response) -> int:
    assert response.status_code == 200, response.text
    number: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


async def test_prompts_are_cached_within_a_tenant_and_never_across(keys: Keys) -> None:
    ann, ann_too, bob = keys.new("ann"), keys.new("ann"), keys.new("bob")
    async with mock_cluster(1) as cluster, serving(cluster, keys) as http:
        assert cached(await complete(http, ann)) == 0
        assert cached(await complete(http, ann_too)) == NUM_CACHED
        for salt in ("", "ann", "0" * 64):
            assert cached(await complete(http, bob, cache_salt=salt)) == 0
            assert cached(await complete(http, bob, cache_salt=salt)) == NUM_CACHED
        assert cached(await complete(http, ann, cache_salt="own")) == 0
        assert cached(await complete(http, ann)) == NUM_CACHED


async def test_public_prefixes_are_cached_across_tenants(keys: Keys, tmp_path: Path) -> None:
    file = tmp_path / "system.json"
    file.write_text(json.dumps(PROMPT[:100]))
    ann, bob = keys.new("ann"), keys.new("bob")
    async with (
        mock_cluster(1, public_prefixes=(file,)) as cluster,
        serving(cluster, keys) as http,
    ):
        assert cached(await complete(http, ann)) == 0
        assert cached(await complete(http, bob)) == 96  # whole blocks of 8
        assert cached(await complete(http, bob)) == NUM_CACHED


async def test_attach_and_cancel_need_the_tenant_of_the_request() -> None:
    request = message(PROMPT[:4], 4000, keep_s=60.0)
    async with mock_cluster(1, "step=5ms") as cluster, Gateway(cluster.address) as gateway:
        mine = await gateway.submit(request, tenant="ann")
        await gateway.until(lambda: len(mine.tokens[0]) >= 3)
        for tenant in ("bob", ""):
            other = await gateway.attach(mine, tenant=tenant, observe=True)
            await gateway.until(lambda other=other: other.is_ended)
            assert other.failure is not None
            assert other.failure.reason == "REQUEST_NOT_FOUND"
            assert await cancel_outcome(cluster.address, mine.request_id, tenant) == (
                grpc.StatusCode.NOT_FOUND
            )
        again = await gateway.attach(mine, tenant="ann", observe=True)
        await gateway.until(lambda: len(again.tokens[0]) >= 5)
        assert await cancel_outcome(cluster.address, mine.request_id, "ann") is grpc.StatusCode.OK


async def test_an_id_of_another_tenants_request_is_served_like_an_unused_one() -> None:
    request, same = message(PROMPT[:4], 4000, keep_s=60.0), message(PROMPT[4:8], 3, keep_s=60.0)
    same.request_id = request.request_id
    async with mock_cluster(1, "step=5ms") as cluster, Gateway(cluster.address) as gateway:
        mine = await gateway.submit(request, tenant="ann")
        await gateway.until(lambda: len(mine.tokens[0]) >= 3)
        for tenant in ("bob", ""):
            other = await gateway.submit(same, tenant=tenant)
            await gateway.until(lambda other=other: other.is_ended)
            assert (other.failure, other.request_id) == (None, request.request_id)
            assert other.tokens[0] == list(mock_tokens(PROMPT[4:8], 3, vocab_size=VOCAB_SIZE))
            again = await gateway.attach(other, tenant=tenant, observe=True)
            await gateway.until(lambda again=again: again.is_ended)
            assert again.tokens[0] == other.tokens[0], "each finds its own"
        refused = await gateway.submit(same, tenant="ann")
        await gateway.until(lambda: refused.is_ended)
        assert refused.failure is not None
        assert refused.failure.reason == "REQUEST_EXISTS"
        assert await cancel_outcome(cluster.address, mine.request_id, "ann") is grpc.StatusCode.OK
        assert await cancel_outcome(cluster.address, mine.request_id, "bob") is grpc.StatusCode.OK


async def test_a_finished_request_is_found_after_a_restart_though_another_tenant_used_its_id(
    tmp_path: Path,
) -> None:
    request = message(PROMPT[:4], 3)
    wanted = dict[str, list[int]]()
    finished = dict[str, Numbered]()
    async with mock_cluster(1, journal=tmp_path / "j.db") as first, Gateway(first.address) as gateway:
        for tenant, begin in (("ann", 0), ("bob", 4), ("bob", 8), ("", 12)):
            same = message(PROMPT[begin : begin + 4], 3)
            same.request_id = request.request_id
            finished[tenant] = await gateway.submit(same, tenant=tenant)
            await gateway.until(lambda tenant=tenant: finished[tenant].is_ended)
            assert finished[tenant].failure is None
            wanted[tenant] = list(mock_tokens(PROMPT[begin : begin + 4], 3, vocab_size=VOCAB_SIZE))
        journal = crashed(tmp_path / "j.db", tmp_path / "after")
    async with mock_cluster(1, journal=journal) as second, Gateway(second.address) as gateway:
        assert (await second.client.status()).requests.kept == len(wanted)
        for tenant, tokens in wanted.items():
            again = await gateway.attach(Numbered(request.request_id), tenant=tenant)
            await gateway.until(lambda again=again: again.is_ended)
            assert (again.failure, again.tokens[0]) == (None, tokens), tenant


@pytest.mark.parametrize("replaces", [True, False], ids=["replaced", "both in the journal"])
async def test_a_restart_continues_the_last_request_of_a_name_that_was_cancelled_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaces: bool
) -> None:
    """Another tenant has the name as an id, so the tenant's two requests have other ids than their name."""
    first, accept = message(PROMPT[:4], 4000, keep_s=60.0), Journal.accept
    if not replaces:
        monkeypatch.setattr(Journal, "accept", lambda journal, accepted, replaces: accept(journal, accepted))
    monkeypatch.setattr(Durability, "sweep", lambda durability, registry: None)
    async with (
        mock_cluster(1, "step=5ms", journal=tmp_path / "j.db") as cluster,
        Gateway(cluster.address) as gateway,
    ):
        for tenant, begin in (("ann", 0), ("bob", 4), ("bob", 8)):
            request = message(PROMPT[begin : begin + 4], 4000, keep_s=60.0)
            request.request_id = first.request_id
            numbered = await gateway.submit(request, tenant=tenant)
            await gateway.until(lambda numbered=numbered: len(numbered.tokens[0]) >= 3)
            if begin == 4:  # cancelled, then dropped
                for _ in range(2):
                    outcome = await cancel_outcome(cluster.address, first.request_id, tenant)
                    assert outcome is grpc.StatusCode.OK
        journal = crashed(tmp_path / "j.db", tmp_path / "after")
        with closing(sqlite3.connect(crashed(journal, tmp_path / "counted"))) as rows:
            assert rows.execute("SELECT count(*) FROM requests").fetchone() == (2 if replaces else 3,)
    monkeypatch.undo()
    async with mock_cluster(1, journal=journal) as second, Gateway(second.address) as gateway:
        assert len(second.server.engine.live_requests) == 2
        last = await gateway.attach(Numbered(first.request_id), tenant="bob")
        await gateway.until(lambda: len(last.tokens[0]) >= 3)
        assert last.tokens[0][:3] == list(mock_tokens(PROMPT[8:12], 3, vocab_size=VOCAB_SIZE))


async def test_the_certificate_of_a_client_is_its_tenant(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    async with (
        mock_cluster(1, "step=5ms", certificates=certificates) as cluster,
        Client(cluster.address, tls_dir=certificates.of("ann", Role.CLIENT)) as ann,
        Client(cluster.address, tls_dir=certificates.of("bob", Role.CLIENT)) as bob,
    ):
        for client, expected in ((ann, 0), (bob, 0), (ann, NUM_CACHED), (bob, NUM_CACHED)):
            (done,) = await client.complete(PROMPT, max_tokens=2)
            assert done.usage.cached_tokens == expected
        mine = ann.generate(PROMPT[:4], max_tokens=3000, on_disconnect="detach", attach_secret=SECRET)
        request_id = (await anext(mine)).request_id
        with pytest.raises(RequestNotFound):
            await anext(bob.attach(request_id, secret=SECRET))
        with pytest.raises(RequestNotFound):
            await bob.cancel(request_id, secret=SECRET)
        await ann.cancel(request_id, secret=SECRET)
        with pytest.raises(Cancelled):
            async for _ in mine:
                pass


async def test_a_client_may_not_act_for_another_tenant(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    async with (
        mock_cluster(1, certificates=certificates) as cluster,
        careless_channel(certificates.of("bob", Role.CLIENT), cluster.address) as channel,
    ):
        call = inference_pb2_grpc.InferenceStub(channel).Generate(
            message(PROMPT[:4], 2), metadata=((TENANT_KEY, "client/ann"),), timeout=DEADLINE_S
        )
        with pytest.raises(grpc.aio.AioRpcError, match="client bob may not act for tenant client/ann"):
            await call.read()


async def cancel_outcome(address: str, request_id: str, tenant: str) -> grpc.StatusCode:
    metadata = ((ATTACH_SECRET_KEY, SECRET), (TENANT_KEY, tenant))
    async with PLAIN.channel(address) as channel:
        try:
            await inference_pb2_grpc.InferenceStub(channel).Cancel(
                inference_pb2.CancelRequest(request_id=request_id), metadata=metadata, timeout=DEADLINE_S
            )
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_items_of_another_tenant_cannot_be_referred_to(keys: Keys) -> None:
    ann, bob = keys.new("ann"), keys.new("bob")
    async with Cluster(None, layers=(6, 6), has_text=True) as cluster, serving(cluster, keys) as http:

        async def respond(key: str, given: Any) -> Response:
            body = {"input": given, "max_output_tokens": 3}
            return await http.post("/v1/responses", json=body, headers={"authorization": f"Bearer {key}"})

        first = await respond(ann, "Once")
        assert first.status_code == 200, first.text
        reference = [{"type": "item_reference", "id": first.json()["output"][0]["id"]}]
        refused = await respond(bob, reference)
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "input[0].id")
        assert (await respond(ann, reference)).status_code == 200


# Keys


async def test_every_path_but_health_and_the_page_needs_a_key(keys: Keys) -> None:
    key = keys.new("ann")
    async with mock_cluster(1) as cluster, serving(cluster, keys) as http:
        await until_ready(http)
        for path in ("/health", "/readyz", "/", "/static/chat.js"):
            assert (await http.get(path)).status_code == 200
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nowhere", "/tokenizer_info"):
            refused = await http.get(path)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert refused.json()["error"]["code"] == "invalid_api_key"
        refused = await http.post("/v1/messages", json={}, headers={"x-api-key": "wrong"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert (await http.get("/v1/models", headers={"x-api-key": key})).status_code == 200
        keys.revoke_all()
        assert (await complete(http, key)).status_code == 401


async def test_models_priorities_and_rates_of_a_key(keys: Keys) -> None:
    other, low = keys.new("ann", models=("other",)), keys.new("ann", max_priority="low")
    few, cheap = keys.new("ann", requests_per_minute=2), keys.new("ann", tokens_per_minute=600)
    async with mock_cluster(1) as cluster, serving(cluster, keys) as http:
        refused = await complete(http, other)
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "model")
        listed = await http.get("/v1/models", headers={"authorization": f"Bearer {other}"})
        assert listed.json()["data"] == []
        refused = await complete(http, low)
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "priority")
        assert (await complete(http, low, priority=1)).status_code == 200
        for key, codes in ((few, [200, 200, 429]), (cheap, [200, 200, 429])):
            found = [await complete(http, key) for _ in codes]
            assert [response.status_code for response in found] == codes
            assert found[-1].json()["error"]["code"] == "rate_limit_exceeded"
            assert 0 < int(found[-1].headers["retry-after"]) <= 60


async def test_what_describes_the_gateway_counts_for_no_limit(keys: Keys) -> None:
    few = keys.new("ann", requests_per_minute=1, tokens_per_minute=1)
    async with mock_cluster(1) as cluster, serving(cluster, keys) as http:
        auth = {"authorization": f"Bearer {few}"}

        async def read_all() -> None:
            for path in ("/v1/models", "/v1/models/mock"):
                assert (await http.get(path, headers=auth)).status_code == 200
                assert (await http.head(path, headers=auth)).status_code == 200
            assert (await http.get("/v1/models", headers={"authorization": "Bearer x"})).status_code == 401

        await read_all()
        assert [(await complete(http, few)).status_code for _ in range(2)] == [200, 429]
        await read_all()


async def test_the_request_after_the_limit_is_refused_in_the_shape_of_each_api(keys: Keys) -> None:
    key = keys.new("ann", requests_per_minute=1000)
    async with mock_cluster(1) as cluster, serving(cluster, keys) as http:
        for _ in range(1000):
            assert (
                await http.post("/v1/completions", json={}, headers={"x-api-key": key})
            ).status_code == 400
        for path, kind in (("/v1/completions", None), ("/v1/messages", "error")):
            refused = await http.post(path, json={}, headers={"x-api-key": key})
            assert refused.status_code == 429
            body = refused.json()
            assert (body.get("type"), body["error"]["type"]) == (kind, "rate_limit_error")
            assert body["error"]["message"].startswith("this API key may use 1000 requests per minute")
            assert 0 < int(refused.headers["retry-after"]) <= 60


async def test_the_coordinator_limits_the_sequences_of_a_tenant(keys: Keys) -> None:
    narrow, wide = keys.new("ann", max_concurrent=2), keys.new("bob")
    async with mock_cluster(1) as cluster, serving(cluster, keys) as http:
        refused = await complete(http, narrow, n=3)
        assert refused.status_code == 400, refused.text
        running = asyncio.create_task(complete(http, narrow, n=2, max_tokens=3000))
        await until(lambda: bool(cluster.server.engine.live_requests))
        refused = await complete(http, narrow)
        assert refused.status_code == 429, refused.text
        assert "client ann has 2 active sequences, the limit is 2" in refused.json()["error"]["message"]
        assert (await complete(http, wide, n=3)).status_code == 200
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_tokens_of_a_key_are_in_the_metrics_and_the_key_is_not(keys: Keys) -> None:
    key, operator, viewer = keys.new("ann"), keys.new("ops", role="operator"), keys.new("ops", role="viewer")
    async with mock_cluster(1) as cluster, serving(cluster, keys) as http:
        await complete(http, key, max_tokens=5)
        for refused in (
            await http.get("/metrics", headers={"x-api-key": key}),
            await complete(http, viewer, max_tokens=5),
            await http.get("/v1/models", headers={"x-api-key": viewer}),
        ):
            assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        text = (await http.get("/metrics", headers={"x-api-key": operator})).text
        assert (await http.get("/metrics", headers={"x-api-key": viewer})).status_code == 200
    lines = [line for line in text.splitlines() if line.startswith("stageline_gateway_key_tokens_total")]
    assert sorted(float(line.rpartition(" ")[2]) for line in lines) == [5, 512]
    assert key not in text


# Floods


def with_schema(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {name: {"type": "integer"}}}
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


@pytest.mark.parametrize("has_keys", [True, False], ids=["tenants", "hosts without keys"])
async def test_schemas_of_a_tenant_or_host_hold_up_no_other(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, has_keys: bool
) -> None:
    gate, compiling, compiled = threading.Event(), threading.Event(), GrammarCompiler.compile

    def slow(compiler: GrammarCompiler, kind: GrammarKind, texts: Sequence[str], **more: Any) -> GrammarSpec:
        if "flood" in texts[0]:
            compiling.set()
            assert gate.wait(DEADLINE_S)
        return compiled(compiler, kind, texts, **more)

    monkeypatch.setattr(GrammarCompiler, "compile", slow)
    ann, bob = keys.new("ann"), keys.new("bob")
    other_host = AsyncHTTPTransport(local_address="127.0.0.2")
    async with (
        Cluster(None, layers=(12,), has_text=True) as cluster,
        serving(cluster, keys if has_keys else None) as http,
        AsyncClient(base_url=http.base_url, timeout=DEADLINE_S, transport=other_host) as flooder,
    ):
        await until_ready(http)
        flood = [
            asyncio.create_task(complete(flooder, ann, prompt="a", response_format=with_schema(name)))
            for name in (f"flood{number}" for number in range(8))
        ]
        try:
            await until(compiling.is_set)
            async with asyncio.timeout(DEADLINE_S / 2):
                served = await complete(http, bob, prompt="a", response_format=with_schema("quiet"))
                assert served.status_code == 200, served.text
                async with Client(cluster.address) as client:
                    (done,) = await client.complete("Once upon a time", max_tokens=2)
            assert len(done.token_ids) == 2
            assert not any(task.done() for task in flood)
        finally:
            gate.set()
            responses = await asyncio.gather(*flood)
        assert [response.status_code for response in responses] == [200] * len(flood)
