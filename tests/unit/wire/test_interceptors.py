"""Exceptions of a servicer become the statuses of the error table. Real servers on port 0."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stageline.client.errors import StatusDetails
from stageline_rpc.internal.v1 import join_pb2_grpc
from stageline_rpc.v1 import inference_pb2_grpc
from wire.channels import new_server
from wire.condition import Condition
from wire.errors import (
    INTERNAL_ERROR_TEXT,
    STATUS_OF_ERROR,
    ClusterUnavailable,
    InvalidRequest,
    Overloaded,
    RequestNotFound,
    StepFault,
    StepFaultKind,
    Superseded,
)
from wire.interceptors import CONDITION_KEY, READINESS, HealthServicer, details_of, sent_reason
from wire.transport import PLAIN

SERVICE = "test.Echo"
Context = grpc.aio.ServicerContext[bytes, bytes]
Raise = Callable[[Context], Awaitable[None]]


class _ReadsFirst(join_pb2_grpc.MembershipServiceServicer):
    async def Join(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        yield await anext(aiter(request_iterator))


def reason_in(error: grpc.aio.AioRpcError) -> str:
    return StatusDetails.of(error).reason


class ServerStopped(grpc.aio.BaseError):
    """Same as the private class that grpc.aio raises."""


async def raise_ours(context: Context) -> None:
    raise InvalidRequest("top_k is 9, must be in [0, 8]")


async def raise_fault(context: Context) -> None:
    raise StepFault(StepFaultKind.POSITION, "expected 3, got 4", step_id=1)


async def raise_stranger(context: Context) -> None:
    raise RuntimeError("the secret /etc/path")


async def raise_group(context: Context) -> None:
    raise ExceptionGroup("several", [Overloaded("full"), ValueError("secret")])


async def abort(context: Context) -> None:
    await context.abort(grpc.StatusCode.DATA_LOSS, "said by the servicer")


async def raise_nothing(context: Context) -> None:
    return None


CASES: dict[str, tuple[Raise, grpc.StatusCode, str]] = {
    "ours": (raise_ours, grpc.StatusCode.INVALID_ARGUMENT, "top_k is 9, must be in [0, 8]"),
    "fault": (raise_fault, grpc.StatusCode.ABORTED, "POSITION: expected 3, got 4"),
    "stranger": (raise_stranger, grpc.StatusCode.INTERNAL, INTERNAL_ERROR_TEXT),
    "group": (raise_group, grpc.StatusCode.INTERNAL, INTERNAL_ERROR_TEXT),
    "abort": (abort, grpc.StatusCode.DATA_LOSS, "said by the servicer"),
}


def handlers(behave: Raise) -> grpc.GenericRpcHandler:
    async def unary_unary(request: bytes, context: Context) -> bytes:
        await behave(context)
        return request

    async def unary_stream(request: bytes, context: Context) -> AsyncIterator[bytes]:
        yield request
        await behave(context)

    async def stream_unary(requests: AsyncIterator[bytes], context: Context) -> bytes:
        received = b"".join([request async for request in requests])
        await behave(context)
        return received

    async def stream_stream(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request
        await behave(context)

    async def writing(request: bytes, context: Context) -> None:
        """Writes its responses instead of yielding them, like grpc's health service."""
        await context.write(request)
        await behave(context)

    methods: dict[str, Any] = {
        "Writing": grpc.unary_stream_rpc_method_handler(writing),
        "UnaryUnary": grpc.unary_unary_rpc_method_handler(unary_unary),
        "UnaryStream": grpc.unary_stream_rpc_method_handler(unary_stream),
        "StreamUnary": grpc.stream_unary_rpc_method_handler(stream_unary),
        "StreamStream": grpc.stream_stream_rpc_method_handler(stream_stream),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


async def call(channel: Any, method: str) -> list[bytes]:
    """Responses before the end of the call; raises AioRpcError if the call fails."""
    path = f"/{SERVICE}/{method}"

    async def requests() -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"

    async with asyncio.timeout(10):
        match method:
            case "UnaryStream" | "Writing":
                return [message async for message in channel.unary_stream(path)(b"one")]
            case "StreamUnary":
                return [await channel.stream_unary(path)(requests())]
            case "StreamStream":
                return [message async for message in channel.stream_stream(path)(requests())]
            case _:
                return [await channel.unary_unary(path)(b"one")]


async def serve_and_call(behave: Raise, method: str) -> list[bytes]:
    server = new_server()
    server.add_generic_rpc_handlers((handlers(behave),))
    port = PLAIN.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        async with PLAIN.channel(f"127.0.0.1:{port}") as channel:
            return await call(channel, method)
    finally:
        await server.stop(None)


METHODS = ["UnaryUnary", "Writing", "UnaryStream", "StreamUnary", "StreamStream"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES)
async def test_an_error_reaches_the_client_as_its_status(case: str, method: str) -> None:
    behave, code, text = CASES[case]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await serve_and_call(behave, method)
    assert (caught.value.code(), caught.value.details()) == (code, text)


@pytest.mark.parametrize(
    ("method", "received"),
    [
        ("UnaryUnary", [b"one"]),
        ("UnaryStream", [b"one"]),
        ("Writing", [b"one"]),
        ("StreamUnary", [b"onetwo"]),
        ("StreamStream", [b"one", b"two"]),
    ],
)
async def test_a_call_without_an_error_passes_unchanged(method: str, received: list[bytes]) -> None:
    assert await serve_and_call(raise_nothing, method) == received


async def test_only_unknown_exceptions_are_logged_with_their_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="wire"):
        with pytest.raises(grpc.aio.AioRpcError):
            await serve_and_call(raise_stranger, "UnaryUnary")
        with pytest.raises(grpc.aio.AioRpcError):
            await serve_and_call(raise_ours, "UnaryUnary")
        with pytest.raises(grpc.aio.AioRpcError):
            await serve_and_call(abort, "UnaryUnary")
    (record,) = caplog.records
    assert record.getMessage() == "unexpected error in /test.Echo/UnaryUnary"
    assert record.exc_info is not None
    assert "the secret /etc/path" in str(record.exc_info[1])


@pytest.mark.parametrize("method", METHODS)
async def test_errors_of_finished_calls_are_left_to_grpc(
    caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """A server that stops while a servicer reads a stream is not a defect of the servicer."""

    async def raise_ended(context: Context) -> None:
        raise ServerStopped("Server already stopped.")

    with (
        caplog.at_level(logging.WARNING, logger="wire"),
        pytest.raises(grpc.aio.AioRpcError),
    ):
        await serve_and_call(raise_ended, method)
    assert [record for record in caplog.records if record.name.startswith("wire")] == []


async def test_an_unknown_method_is_unimplemented() -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await serve_and_call(raise_nothing, "Other")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert caught.value.details() == "method '/test.Echo/Other' not found"
    assert reason_in(caught.value) == "METHOD_NOT_FOUND"


async def test_undecodable_bytes_are_rejected_with_a_reason() -> None:
    server = new_server()
    inference_pb2_grpc.add_InferenceServicer_to_server(inference_pb2_grpc.InferenceServicer(), server)
    join_pb2_grpc.add_MembershipServiceServicer_to_server(_ReadsFirst(), server)
    port = PLAIN.bind(server, "127.0.0.1:0")
    await server.start()

    async def requests() -> AsyncIterator[bytes]:
        yield b"\xff"

    try:
        async with PLAIN.channel(f"127.0.0.1:{port}") as channel:
            for call in (
                channel.unary_stream("/stageline.v1.Inference/Generate")(b"\xff", timeout=10),
                channel.stream_stream("/stageline.internal.v1.MembershipService/Join")(
                    requests(), timeout=10
                ),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    _ = [message async for message in call]
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert reason_in(caught.value) == "INVALID_REQUEST"
    finally:
        await server.stop(None)


async def test_the_health_of_an_unknown_service_is_rejected_with_a_reason() -> None:
    server = new_server()
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(lambda: Condition("loading")), server)
    port = PLAIN.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        async with PLAIN.channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            found = await stub.Check(health_pb2.HealthCheckRequest())
            assert found.status == health_pb2.HealthCheckResponse.SERVING
            ready = stub.Check(health_pb2.HealthCheckRequest(service=READINESS))
            assert (await ready).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert dict(await ready.trailing_metadata())[CONDITION_KEY] == "loading"
            listed = await stub.List(health_pb2.HealthListRequest())
            assert listed.statuses[READINESS].status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Check(health_pb2.HealthCheckRequest(service="no.such"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert reason_in(caught.value) == "SERVICE_NOT_FOUND"
    finally:
        await server.stop(None)


async def test_a_port_in_use_is_rejected_in_one_line() -> None:
    first, second = new_server(), new_server()
    port = PLAIN.bind(first, "127.0.0.1:0")
    assert port > 0
    await first.start()
    try:
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            PLAIN.bind(second, f"127.0.0.1:{port}")
    finally:
        await first.stop(None)


def status_in(error: BaseException) -> status_pb2.Status:
    ((key, data),) = details_of(error)
    assert key == "grpc-status-details-bin"
    return status_pb2.Status.FromString(data)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Superseded("another call reads"), "SUPERSEDED"),
        (ClusterUnavailable("no stages"), "CLUSTER_UNAVAILABLE"),
        (RuntimeError("a secret"), "INTERNAL_ERROR"),
    ],
)
def test_every_error_response_has_its_reason(error: Exception, reason: str) -> None:
    info = error_details_pb2.ErrorInfo()
    assert status_in(error).details[0].Unpack(info)
    assert (info.reason, info.domain) == (reason, "stageline")
    assert b"secret" not in details_of(error)[0][1]


def test_no_two_kinds_have_one_name() -> None:
    names = [sent_reason(kind.__new__(kind)) for kind in STATUS_OF_ERROR]
    assert len(set(names)) == len(names)


def test_an_overload_has_a_retry_hint() -> None:
    status = status_in(Overloaded("full", retry_after_s=1.5))
    retry = error_details_pb2.RetryInfo()
    assert (status.code, status.message) == (8, "full")
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500


@pytest.mark.parametrize("error", [Overloaded("full"), RequestNotFound("gone")])
def test_unknown_details_are_omitted(error: Exception) -> None:
    assert len(status_in(error).details) == 1
