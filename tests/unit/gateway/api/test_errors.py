"""Every error has OpenAI's shape, a status of the table and the headers that say whether to retry."""

from __future__ import annotations

import json
from dataclasses import replace

import grpc
import pytest

from gateway.upstream.contract import Tokens, UpstreamFailure
from tests.unit.gateway.fake_upstream import builtin_codec, failure, serve

PATH = "/v1/completions"
NO_RETRY = {"x-should-retry": "false"}
Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "headers"),
    [
        (
            failure(Code.INVALID_ARGUMENT, "INVALID_REQUEST"),
            400,
            "invalid_request_error",
            None,
            {"x-should-retry": "false"},
        ),
        (failure(Code.UNAUTHENTICATED), 401, "authentication_error", "invalid_api_key", {}),
        (failure(Code.PERMISSION_DENIED), 403, "permission_error", "reason", {}),
        (failure(Code.NOT_FOUND, "REQUEST_NOT_FOUND"), 404, "not_found_error", "request_not_found", {}),
        (
            failure(Code.ALREADY_EXISTS, "REQUEST_EXISTS"),
            409,
            "conflict_error",
            "request_exists",
            {"x-should-retry": "false"},
        ),
        (
            failure(Code.RESOURCE_EXHAUSTED, "OVERLOADED", retry_after_s=2.25),
            429,
            "rate_limit_error",
            "rate_limit_exceeded",
            {"retry-after": "3", "retry-after-ms": "2250"},
        ),
        (failure(Code.CANCELLED), 499, "cancelled_error", "request_cancelled", NO_RETRY),
        (failure(Code.UNAVAILABLE), 503, "service_unavailable_error", "unavailable", {"retry-after": "1"}),
        (
            failure(Code.DEADLINE_EXCEEDED),
            504,
            "timeout_error",
            "deadline_exceeded",
            {"x-should-retry": "false"},
        ),
        (failure(Code.ABORTED, "STEP_FAILED"), 500, "server_error", "step_failed", {}),
        (failure(Code.INTERNAL, "SLICE_FAILED"), 500, "server_error", "slice_failed", NO_RETRY),
        (failure(Code.INTERNAL, "INTERNAL_ERROR"), 500, "server_error", "internal_error", {}),
    ],
)
async def test_failures_of_the_coordinator(
    error: UpstreamFailure, status: int, kind: str, code: str | None, headers: dict[str, str]
) -> None:
    async with serve() as served:
        served.upstream.refusal = error
        for extra in ({}, {"stream": True}):  # refused before the stream begins, so with a status
            response = await served.client.post(PATH, json={"prompt": "a", **extra})
            assert response.status_code == status
            expected = {"message": "it failed", "type": kind, "param": None, "code": code}
            assert response.json() == {"error": expected}
            assert {name: response.headers.get(name) for name in headers} == headers


async def test_a_failure_in_the_middle_ends_a_stream_without_done() -> None:
    token = builtin_codec().encode(" a")[0]
    error = failure(Code.ABORTED, "STEP_FAILED")
    async with serve(lambda _: [Tokens(0, 0, [token]), error]) as served:
        response = await served.client.post(PATH, json={"prompt": "a", "stream": True})
        first, last = [line for line in response.text.split("\n\n") if line]
        assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == " a"
        expected = {"message": "it failed", "type": "server_error", "param": None, "code": "step_failed"}
        assert json.loads(last.removeprefix("data: ")) == {"error": expected}
        response = await served.client.post(PATH, json={"prompt": "a"})
        assert (response.status_code, response.json()) == (500, {"error": expected})


async def test_a_request_id_in_use_is_a_conflict() -> None:
    async with serve() as served:
        served.upstream.refusal = failure(Code.PERMISSION_DENIED, "ATTACH_SECRET_MISMATCH")
        request_id = "018f0000-0000-7000-8000-000000000001"
        response = await served.client.post(PATH, json={"prompt": "a"}, headers={"x-request-id": request_id})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (409, "request_exists")
        assert (
            error["message"]
            == f"request id {request_id} is in use: its request is live, or its output is kept"
        )
        assert response.headers["x-should-retry"] == "false"


async def test_one_refused_prompt_cancels_the_others() -> None:
    async with serve() as served:
        submit = served.upstream.submit

        async def refuse_second(request: object, **named: object) -> object:
            if served.upstream.streams:
                raise failure(Code.RESOURCE_EXHAUSTED, "OVERLOADED")
            return await submit(request, **named)  # type: ignore[arg-type]

        served.upstream.submit = refuse_second  # type: ignore[assignment,method-assign]
        response = await served.client.post(PATH, json={"prompt": ["a", "b"]})
        assert response.status_code == 429
        assert served.upstream.streams[0].cancelled.is_set()


async def test_a_defect_is_an_error_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: object) -> list[Tokens]:
        raise RuntimeError("secret detail")

    async with serve(broken) as served:
        response = await served.client.post(PATH, json={"prompt": "a"}, headers={"x-request-id": "mine"})
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "internal error; the gateway's log has the detail"
        assert response.headers["x-request-id"] == "mine"
        assert "secret detail" in caplog.text


async def test_errors_of_http_have_the_same_shape() -> None:
    async with serve(max_body_bytes=1000) as served:
        post, text = served.client.post, {"content-type": "text/plain"}
        cases = (
            (await post(PATH, content=b"{}", headers=text), 415, "unsupported_media_type"),
            (await post(PATH, content=b'{"prompt": "' + b"a" * 1000 + b'"}'), 413, "body_too_large"),
            (await post(PATH, content=_chunks()), 413, "body_too_large"),
            (await served.client.get(PATH), 405, "method_not_allowed"),
            (await served.client.get("/v1/embeddings"), 404, "not_found"),
            (await served.client.get("/v1/models/other"), 404, "model_not_found"),
            (await post(PATH, json={"prompt": "a", "model": "other"}), 404, "model_not_found"),
            (await post(PATH, content=b"{"), 400, None),
            (await post(PATH, content=b'{"prompt": "\xff"}'), 400, None),
            (await post(PATH, content=b'{"prompt": "\\ud800"}'), 400, None),
            (await post(PATH, content=b'{"prompt": "a", "x": ' + b"[" * 300 + b"]" * 300 + b"}"), 400, None),
            (await post(PATH, content=b'{"prompt": "a", "temperature": NaN}'), 400, None),
            (await post(PATH, content=b"[]"), 400, None),
            (await post(PATH, content=b'{"prompt": 1' + b"0" * 400 + b"}"), 400, None),
        )
        for response, status, code in cases:
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (status, code), response.text
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]


async def _chunks():  # type: ignore[no-untyped-def]
    for _ in range(30):
        yield b" " * 100


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_text_beyond_the_context_is_refused_without_tokenizing(path: str) -> None:
    async with serve() as served:
        text = "long " * 200_000
        body = {"prompt": text} if "chat" not in path else {"messages": [{"role": "user", "content": text}]}
        response = await served.client.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 256 tokens" in error["message"]


async def test_before_the_first_plan_there_is_no_limit_to_exceed() -> None:
    async with serve() as served:
        served.upstream.model = replace(served.upstream.model, max_sequence_tokens=0)
        for body in ({"prompt": [1]}, {"prompt": "a"}, {"prompt": [1], "max_tokens": 5}):
            response = await served.client.post(PATH, json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")
            assert response.headers["retry-after"] == "1"


async def test_tokens_beyond_the_context_are_refused_with_the_numbers() -> None:
    async with serve() as served:
        response = await served.client.post(PATH, json={"prompt": [1] * 250, "max_tokens": 7})
        assert response.json()["error"] == {
            "message": "this model's maximum context length is 256 tokens: the prompt has 250 and "
            "max_tokens is 7, 257 in all",
            "type": "invalid_request_error",
            "param": "max_tokens",
            "code": "context_length_exceeded",
        }
        response = await served.client.post(PATH, json={"prompt": [1] * 250})
        assert response.status_code == 200
        assert served.request.max_tokens == 6
