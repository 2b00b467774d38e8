"""Paths beside generation: models, tokens, process, schema."""

from __future__ import annotations

import pytest

from gateway.api.app import ROUTES
from gateway.api.chat import ChatRequest
from gateway.parsers.conversation import read_tools, template_tools
from tests.unit.gateway.fake_upstream import builtin_codec, serve
from text.chat_template import TemplateOptions


async def test_the_model_is_listed_under_all_names() -> None:
    async with serve(served_model_names=("mine", "org/mine"), dashboard_url="http://head:7481/") as served:
        listed = (await served.client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["mine", "org/mine"]
        assert listed["data"][0]["max_model_len"] == 256
        extension = {"has_chat_template": True, "dashboard_url": "http://head:7481/"}
        assert listed["data"][0]["stageline"] == extension
        one = await served.client.get("/v1/models/org/mine")
        assert one.json() == listed["data"][1]
        for name in ("mine", "org/mine", ""):
            response = await served.client.post("/v1/completions", json={"prompt": "a", "model": name})
            assert response.json()["model"] == (name or "mine")
        assert (await served.client.get("/v1/models/tiny")).status_code == 404


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenizing_and_back(prefix: str) -> None:
    codec = builtin_codec()
    ids = codec.encode("Once upon")
    async with serve() as served:
        post = served.client.post
        response = await post(f"{prefix}/tokenize", json={"prompt": "Once upon", "return_token_strs": True})
        pieces = [codec.piece(token) for token in ids]
        assert response.json() == {"count": 2, "max_model_len": 256, "tokens": ids, "token_strs": pieces}
        response = await post(f"{prefix}/detokenize", json={"tokens": [*ids, 0]})
        assert response.json() == {"prompt": "Once upon<|endoftext|>"}
        messages = [{"role": "user", "content": "hi"}]
        response = await post(f"{prefix}/tokenize", json={"messages": messages})
        assert response.json()["tokens"] == codec.encode_messages(messages)
        tool = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
        response = await post(f"{prefix}/tokenize", json={"messages": messages, "tools": [tool]})
        options = TemplateOptions(tools=template_tools(read_tools([tool])))
        assert response.json()["tokens"] == codec.encode_messages(messages, options)
        info = (await served.client.get(f"{prefix}/tokenizer_info")).json()
        assert info["eos_token"] == "<|endoftext|>"
        assert info["chat_template"] == codec.chat_template


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [], "tools": [5]}, "tools[0]"),
        ("/tokenize", {"messages": [{"role": "user"}], "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ],
)
async def test_wrong_tokens_and_texts_are_refused(path: str, body: dict[str, object], param: str) -> None:
    async with serve() as served:
        response = await served.client.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


async def test_paths_of_the_process() -> None:
    async with serve() as served:
        get = served.client.get
        for path in ("/health", "/ping", "/version", "/readyz", "/"):
            assert (await get(path)).status_code == 200
            assert (await served.client.head(path)).status_code == 200
        served.upstream.is_ready = False
        response = await get("/readyz")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
        assert (await get("/health")).status_code == 200
        metrics = (await get("/metrics")).text
        assert 'stageline_gateway_requests_total{endpoint="process",status="503"} 1.0' in metrics


async def test_a_gateway_that_reads_the_tokenizer_is_not_ready() -> None:
    async with serve() as served:
        served.gateway.is_waiting = True
        for response in (
            await served.client.post("/v1/completions", json={"prompt": "a"}),
            await served.client.get("/readyz"),
        ):
            assert response.status_code == 503
            assert "the gateway is waiting for the coordinator" in response.json()["error"]["message"]


async def test_a_draining_gateway_refuses_new_requests() -> None:
    async with serve() as served:
        served.gateway.is_draining = True
        for response in (
            await served.client.post("/v1/completions", json={"prompt": "a"}),
            await served.client.get("/readyz"),
        ):
            assert response.status_code == 503
            assert response.json()["error"]["message"] == "the gateway is draining"
            assert response.headers["retry-after"] == "1"


async def test_the_schema_describes_every_path_and_field() -> None:
    async with serve() as served:
        schema = (await served.client.get("/openapi.json")).json()
        assert {path.replace(":path", "") for path in schema["paths"]} == {
            route.path.replace(":path", "") for route in ROUTES
        }
        parts = schema["components"]["schemas"]
        assert set(parts["ChatRequest"]["properties"]) == set(ChatRequest.model_fields)
        post = schema["paths"]["/v1/chat/completions"]["post"]
        reference = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert reference == "#/components/schemas/ChatRequest"
        assert "422" not in post["responses"]
        get = schema["paths"]["/v1/responses/{response_id}"]["get"]
        assert [(each["name"], each["in"]) for each in get["parameters"]] == [
            ("response_id", "path"),
            ("stream", "query"),
            ("starting_after", "query"),
        ]


async def test_a_wrong_method_names_those_of_the_path() -> None:
    async with serve() as served:
        one = f"/v1/responses/resp_{'0' * 64}"
        counted = "/v1/responses/input_tokens"
        for path, methods in ((one, "DELETE, GET, HEAD"), ("/v1/completions", "POST"), (counted, "POST")):
            response = await served.client.options(path)
            assert (response.status_code, response.headers["allow"]) == (405, methods)


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/v1/embeddings", "embeddings"),
        ("/embeddings", "embeddings"),
        ("/v1/files", "files"),
        ("/v1/files/file-1/content", "files"),
        ("/v1/batches", "batches"),
        ("/v1/audio/speech", "audio"),
        ("/v1/images/generations", "images"),
        ("/v1/moderations", "moderations"),
        ("/v2/rerank", "reranking"),
        ("/v1/fine_tuning/jobs", "fine-tuning"),
        ("/v1/assistants", "assistants"),
        ("/v1/vector_stores/vs_1/search", "vector stores"),
        ("/v1/responses/compact", "other calls of responses"),
        ("/v1/messages/batches", "batches"),
        ("/v1/chat/completions/chatcmpl-1", "stored chat completions"),
    ],
)
async def test_paths_of_other_servers_say_what_is_not_served(path: str, what: str) -> None:
    async with serve() as served:
        response = await served.client.post(path, json={"input": "a"})
        assert response.status_code == 404, response.text
        error = response.json()["error"]
        assert f"POST {path}: {what}" in error["message"] and "not served" in error["message"]
        assert error["type"] == "not_found_error"
        assert "allow" not in response.headers


@pytest.mark.parametrize("path", ["/v1/none", "/v1", "/v1/completions/", "/v2/chat"])
async def test_other_unknown_paths_are_not_found(path: str) -> None:
    async with serve() as served:
        response = await served.client.post(path, json={})
        assert (response.status_code, response.json()["error"]["message"]) == (404, f"POST {path}: not found")


async def test_every_answer_has_an_id_and_names_what_it_ignored() -> None:
    async with serve() as served:
        get, post = served.client.get, served.client.post
        paths = ("/v1/none", "/v1/completions/", "/v1/responses/0?include=x")
        for response in (*[await get(path) for path in paths], await post("/v1/completions", content=b"{")):
            assert response.status_code in (400, 404), response.text
            assert response.headers["x-request-id"]
        assert (await get("/v1/none", headers={"x-request-id": "mine"})).headers["x-request-id"] == "mine"
        listed = await get("/v1/models?limit=5")
        assert listed.headers["x-stageline-ignored"] == "limit"
    async with serve(strict_fields=True) as served:
        response = await served.client.get("/v1/models?limit=5")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "limit")
