"""Requests that cannot be served are rejected at once with the numbers, and affect no other request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from stageline import Client
from stageline_rpc.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.clusters import Served, is_idle, random_prompt, tokens_of, wait_for_status
from wire.ids import id_text, new_request_id

pytestmark = pytest.mark.asyncio(loop_scope="package")

Stub = inference_pb2_grpc.InferenceStub


@pytest_asyncio.fixture(loop_scope="package")
async def stub(served: Served) -> AsyncIterator[Stub]:
    async with grpc.aio.insecure_channel(served.address) as channel:
        yield Stub(channel)
    await wait_for_status(served.address, is_idle)


def _request(
    ids: list[int] | None = None, *, max_tokens: int = 4, **sampling: float
) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=[5, 6, 7] if ids is None else ids),
        max_tokens=max_tokens,
        sampling=inference_pb2.SamplingParameters(**sampling),  # type: ignore[arg-type]
    )


ABSURD = {
    "max_tokens-billion": (_request(max_tokens=10**9), r"1000000003 tokens, more than the 4096 that fit"),
    "min_tokens-more": (_request(max_tokens=4, min_tokens=5), r"min_tokens is 5, must be in \[0, 4\]"),
    "choices-none": (_request(n=0), r"n is 0, must be in \[1, 64\]"),
    "prompt-too-long": (_request(random_prompt(4097)), r"prompt of 4097 \+ .* more than the 4096 that fit"),
    "prompt-empty": (_request([]), "no tokens"),
    "prompt-missing": (inference_pb2.GenerateRequest(max_tokens=4), "a prompt is needed"),
    "token-outside": (_request([1, 128]), r"token id 128 is outside the vocabulary \[0, 128\)"),
    "token-huge": (_request([2**32 - 1]), "4294967295"),
    "temperature-nan": (_request(temperature=math.nan), "temperature is nan"),
    "temperature-inf": (_request(temperature=math.inf), "temperature is inf"),
    "temperature-negative": (_request(temperature=-0.5), r"temperature is -0.5"),
    "top_p-zero": (_request(top_p=0.0), r"top_p is 0"),
    "top_p-nan": (_request(top_p=math.nan), "top_p is nan"),
    "top_k-huge": (_request(top_k=10**6), "top_k is 1000000"),
    "text-without-tokenizer": (inference_pb2.GenerateRequest(text="hi"), "no tokenizer"),
    "request-id": (inference_pb2.GenerateRequest(request_id="seven"), "seven"),
}


@pytest.mark.parametrize(("request_message", "text"), ABSURD.values(), ids=ABSURD.keys())
async def test_an_absurd_request_is_rejected_with_the_numbers(
    stub: Stub, request_message: inference_pb2.GenerateRequest, text: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=text) as refused:
        await _drain(stub, request_message)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "\n" not in (refused.value.details() or "")


async def test_an_unknown_field_is_rejected_by_its_number(stub: Stub) -> None:
    request = inference_pb2.GenerateRequest.FromString(
        _request().SerializeToString() + b"\xf8\x06\x01"  # field 111, varint 1
    )
    with pytest.raises(grpc.aio.AioRpcError, match="111"):
        await _drain(stub, request)


async def test_a_request_id_in_use_is_rejected_and_its_request_continues(served: Served, stub: Stub) -> None:
    request = _request(max_tokens=150)
    request.request_id = id_text(new_request_id())
    async with Client(served.address) as client:
        first = asyncio.create_task(tokens_of(client, [5, 6, 7], 150, request_id=request.request_id))
        await wait_for_status(served.address, lambda status: status.requests.decode == 1)
        with pytest.raises(grpc.aio.AioRpcError, match=request.request_id) as refused:
            await _drain(stub, request)
        assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert len(await first) == 150


async def test_a_cancel_of_an_unknown_request_is_not_found(stub: Stub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Cancel(inference_pb2.CancelRequest(request_id=id_text(new_request_id())), timeout=10)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def _drain(stub: Stub, request: inference_pb2.GenerateRequest) -> None:
    async for _ in stub.Generate(request, timeout=20):
        pass
