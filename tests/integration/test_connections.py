"""Connections that a server keeps, closes and rejects."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes

from certificates.identity import Role
from stageline.client.errors import StatusDetails
from stageline_rpc.v1 import inference_pb2_grpc
from tests.integration.test_mock_cluster import mock_cluster
from tests.issued import Certificates
from wire import channels
from wire.channels import new_server
from wire.peer_limits import MAX_OTHER_STREAMS_PER_CALLER, MAX_USER_STREAMS_PER_CALLER, PeerLimits
from wire.reflection import ReflectionServicer
from wire.transport import PLAIN, client_transport

DEADLINE_S = 120.0
METHOD = "/test.Test/Echo"
Code = grpc.StatusCode


async def _echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


@asynccontextmanager
async def echo_server(limits: PeerLimits | None = None, handler: Any = None) -> AsyncIterator[str]:
    server = new_server(limits=limits)
    handler = handler or grpc.stream_stream_rpc_method_handler(_echo)  # type: ignore[arg-type]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Echo": handler}),))
    port = PLAIN.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def open_stream(channel: grpc.aio.Channel) -> Any:
    untyped: Any = channel
    call = untyped.stream_stream(METHOD)()
    async with asyncio.timeout(DEADLINE_S):
        await call.write(b"x")
        assert await call.read() == b"x"
    return call


def change_option(monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    changed = {**dict(channels.SERVER_OPTIONS), name: value}
    monkeypatch.setattr(channels, "SERVER_OPTIONS", tuple(changed.items()))


async def refusal(channel: grpc.aio.Channel) -> tuple[grpc.StatusCode, str, str]:
    """How a call ends that sends one message at its begin: a later write could meet the end of the call."""
    untyped: Any = channel
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await untyped.unary_stream(METHOD)(b"x").read()
    return refused.value.code(), StatusDetails.of(refused.value).reason, refused.value.details() or ""


async def test_an_idle_connection_is_closed_and_one_with_a_silent_stream_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert dict(channels.SERVER_OPTIONS)["grpc.max_connection_idle_ms"] == 300_000
    change_option(monkeypatch, "grpc.max_connection_idle_ms", 200)
    async with echo_server() as address, PLAIN.channel(address) as used, PLAIN.channel(address) as idle:
        stream = await open_stream(used)
        (await open_stream(idle)).cancel()
        async with asyncio.timeout(DEADLINE_S):
            while (state := idle.get_state()) is grpc.ChannelConnectivity.READY:
                await idle.wait_for_state_change(state)
        async with asyncio.timeout(DEADLINE_S):  # idle for longer than the other connection
            await stream.write(b"y")
            assert await stream.read() == b"y"


async def test_connections_are_bounded_and_open_ones_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "max_connections", lambda: 2)
    async with echo_server() as address, PLAIN.channel(address) as first, PLAIN.channel(address) as second:
        streams = [await open_stream(first), await open_stream(second)]
        async with PLAIN.channel(address) as third:
            assert (await refusal(third))[0] is Code.UNAVAILABLE
        for stream in streams:
            await stream.write(b"z")
            assert await asyncio.wait_for(stream.read(), DEADLINE_S) == b"z"


async def test_a_host_has_a_bounded_number_of_connections_with_calls() -> None:
    limits = PeerLimits(max_connections_per_host=2)
    async with (
        echo_server(limits) as address,
        PLAIN.channel(address) as first,
        PLAIN.channel(address) as second,
        PLAIN.channel(address) as third,
    ):
        streams = [await open_stream(first), await open_stream(second), await open_stream(second)]
        many = "host 127.0.0.1 has 2 connections with calls, the limit is 2"
        assert await refusal(third) == (Code.RESOURCE_EXHAUSTED, "OVERLOADED", many)
        await end(streams[0])
        await open_stream(third)


async def test_a_host_and_a_server_have_a_bounded_number_of_calls_and_streams() -> None:
    for limits, many in (
        (PeerLimits(max_calls_per_host=3), "host 127.0.0.1 has 3 calls, the limit is 3"),
        (PeerLimits(max_calls=3), "the server has 3 calls, the limit is 3"),
        (PeerLimits(max_other_streams_per_caller=3), "host 127.0.0.1 has 3 streams, the limit is 3"),
        (PeerLimits(max_streams=3), "the server has 3 streams, the limit is 3"),
    ):
        async with echo_server(limits) as address, PLAIN.channel(address) as channel:
            streams = [await open_stream(channel) for _ in range(3)]
            assert await refusal(channel) == (Code.RESOURCE_EXHAUSTED, "OVERLOADED", many)
            await end(streams[0])
            await open_stream(channel)


async def test_streams_of_reflection_and_of_unknown_methods_take_no_places_of_serve() -> None:
    async with mock_cluster(1) as cluster, PLAIN.channel(cluster.address) as channel:
        reflecting = [await reflection_stream(channel) for _ in range(MAX_OTHER_STREAMS_PER_CALLER)]
        with pytest.raises(grpc.aio.AioRpcError, match=r"host 127.0.0.1 has 16 streams, the limit is 16"):
            await reflection_stream(channel)
        serving = [await serve_stream(channel) for _ in range(MAX_USER_STREAMS_PER_CALLER)]
        with pytest.raises(grpc.aio.AioRpcError, match=r"host 127.0.0.1 has 16 Serve streams"):
            await serve_stream(channel)
        for stream in reflecting + serving:
            stream.cancel()


async def test_a_client_with_a_certificate_takes_no_places_of_gateways(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    client = client_transport(certificates.of("c", Role.CLIENT))
    gateway = client_transport(certificates.of("g", Role.GATEWAY))
    async with (
        mock_cluster(1, certificates=certificates) as cluster,
        client.channel(cluster.address) as first,
        gateway.channel(cluster.address) as second,
    ):
        serving = [await serve_stream(first) for _ in range(MAX_USER_STREAMS_PER_CALLER)]
        with pytest.raises(grpc.aio.AioRpcError, match="client c has 16 Serve streams, the limit is 16"):
            await serve_stream(first)
        serving.append(await serve_stream(second))
        for stream in serving:
            stream.cancel()


async def serve_stream(channel: grpc.aio.Channel) -> Any:
    """Raises AioRpcError."""
    untyped: Any = inference_pb2_grpc.InferenceStub(channel)
    call = untyped.Serve()
    async with asyncio.timeout(DEADLINE_S):
        await call.initial_metadata()
        if call.done():
            await call.read()
    return call


async def reflection_stream(channel: grpc.aio.Channel) -> Any:
    """Raises AioRpcError."""
    untyped: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = untyped.ServerReflectionInfo()
    async with asyncio.timeout(DEADLINE_S):
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert (await call.read()).list_services_response.service
    return call


async def test_a_reflection_stream_ends_after_its_time() -> None:
    server = new_server()
    servicer = ReflectionServicer((reflection.SERVICE_NAME,), max_stream_s=0.2)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    port = PLAIN.bind(server, "127.0.0.1:0")
    await server.start()
    async with asyncio.timeout(DEADLINE_S), PLAIN.channel(f"127.0.0.1:{port}") as channel:
        stream = await reflection_stream(channel)
        with pytest.raises(grpc.aio.AioRpcError, match=r"a reflection stream may last 0.2 s") as refused:
            await stream.read()
        assert refused.value.code() is Code.RESOURCE_EXHAUSTED
        done = await reflection_stream(channel)
        await end(done)
    await server.stop(None)


async def test_calls_that_clients_reset_are_no_errors_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def respond(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(50):
            yield bytes(10_000)

    def is_found() -> bool:
        return any("ExecuteBatchError" in record.getMessage() for record in caplog.records)

    handler: Any = grpc.unary_stream_rpc_method_handler(respond)  # type: ignore[arg-type]
    async with asyncio.timeout(DEADLINE_S), echo_server(handler=handler) as address:
        with caplog.at_level(logging.DEBUG, logger="wire"):
            while not is_found():
                await reset_calls(address)
    assert {record.levelno for record in caplog.records} <= {logging.DEBUG, logging.INFO}


async def reset_calls(address: str) -> None:
    """Open calls that end at once, before the server writes to them."""
    host, port = address.rsplit(":", 1)
    _, writer = await asyncio.open_connection(host, int(port))
    http = H2Connection(H2Configuration(client_side=True))
    http.initiate_connection()
    headers = [(":method", "POST"), (":scheme", "http"), (":path", METHOD), (":authority", "test")]
    headers += [("content-type", "application/grpc"), ("te", "trailers")]
    for _ in range(20):
        stream = http.get_next_available_stream_id()
        http.send_headers(stream, headers)
        http.send_data(stream, b"\0\0\0\0\1x", end_stream=True)
        writer.write(http.data_to_send())
        await asyncio.sleep(random.uniform(0, 0.004))
        http.reset_stream(stream, ErrorCodes.CANCEL)
        writer.write(http.data_to_send())
    writer.transport.abort()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def end(stream: Any) -> None:
    """End a stream, and wait until the server has."""
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is Code.OK


async def test_streams_beyond_the_limit_of_a_connection_wait_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert dict(channels.SERVER_OPTIONS)["grpc.max_concurrent_streams"] == 4096
    change_option(monkeypatch, "grpc.max_concurrent_streams", 2)
    async with echo_server() as address, PLAIN.channel(address) as channel:
        streams = [await open_stream(channel), await open_stream(channel)]
        waiting = asyncio.create_task(open_stream(channel))
        await asyncio.wait([waiting], timeout=0.3)
        assert not waiting.done()
        await end(streams[0])
        await end(await waiting)


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compressed_messages_are_refused_before_they_are_unpacked(algorithm: grpc.Compression) -> None:
    async with (
        echo_server() as address,
        grpc.aio.insecure_channel(
            address, options=[("grpc.max_send_message_length", -1)], compression=algorithm
        ) as channel,
    ):
        untyped: Any = channel
        # Unpacked, it would be too large: RESOURCE_EXHAUSTED.
        call = untyped.unary_stream(METHOD)(bytes(2 * channels.MAX_MESSAGE_BYTES))
        with pytest.raises(grpc.aio.AioRpcError, match="is disabled") as refused:
            await call.read()
        assert refused.value.code() is Code.UNIMPLEMENTED


@pytest.mark.parametrize(("size", "entries"), [(17_000, 1), (100, 200)])
async def test_metadata_beyond_its_limit_is_refused(size: int, entries: int) -> None:
    metadata = [(f"key-{index}", "x" * size) for index in range(entries)]
    async with (
        echo_server() as address,
        grpc.aio.insecure_channel(address, options=[("grpc.max_metadata_size", 1 << 20)]) as channel,
    ):
        untyped: Any = channel
        with pytest.raises(
            grpc.aio.AioRpcError, match="received metadata size exceeds hard limit"
        ) as refused:
            await untyped.stream_stream(METHOD)(metadata=metadata).read()
        assert refused.value.code() is Code.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("greeting", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
async def test_a_connection_that_does_not_finish_its_handshake_is_closed(
    greeting: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dict(channels.SERVER_OPTIONS)["grpc.server_handshake_timeout_ms"] == 10_000
    change_option(monkeypatch, "grpc.server_handshake_timeout_ms", 200)
    async with echo_server() as address:
        host, port = address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(greeting)
        async with asyncio.timeout(DEADLINE_S):
            while await reader.read(65_536):
                pass
        writer.close()
