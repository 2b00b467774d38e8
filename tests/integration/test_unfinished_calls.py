"""Calls whose message does not end: few are read at once, and who may not call is refused before."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from certificates.identity import Role
from tests.integration.footprint import resident_bytes
from tests.integration.test_connections import DEADLINE_S
from tests.integration.test_mock_cluster import mock_cluster
from tests.issued import Certificates
from tests.unfinished_calls import PREFIX_BYTES, UnfinishedCalls
from wire.channels import MAX_MESSAGE_BYTES, new_server
from wire.message_reads import MessageReads
from wire.peer_limits import PeerLimits
from wire.transport import PLAIN, client_transport

METHOD = "/test.Test/Echo"
MESSAGE = bytes(1 << 20)
INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNAUTHENTICATED = "3", "8", "16"


async def _echo(request: bytes, context: Any) -> bytes:
    return request


@asynccontextmanager
async def echo_server(reads: MessageReads, handler: Any = None) -> AsyncIterator[str]:
    server = new_server(limits=PeerLimits(reads=reads))
    handler = handler or grpc.unary_unary_rpc_method_handler(_echo)  # type: ignore[arg-type]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Echo": handler}),))
    port = PLAIN.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_others_are_served_while_unfinished_messages_fill_the_memory() -> None:
    """10 messages of 16 MiB, of which 2 may go on."""
    reads = MessageReads(max_per_host=2, max_growth_bytes=32 * 2**20)
    large = bytes(MAX_MESSAGE_BYTES - 1)
    async with (
        asyncio.timeout(DEADLINE_S),
        echo_server(reads) as address,
        UnfinishedCalls(address) as attacker,
        PLAIN.channel(address) as channel,
    ):
        before = resident_bytes()
        for _ in range(10):
            attacker.open(METHOD, large)
        ends = asyncio.create_task(attacker.until(lambda: len(attacker.ended) >= 8))
        untyped: Any = channel
        while not ends.done():
            assert await untyped.unary_unary(METHOD)(b"x") == b"x"
        assert len(attacker.ended) == 8
        assert resident_bytes() - before < 96 * 2**20
        for code, text in attacker.ended.values():
            assert (code, "and host 127.0.0.1 has " in text) == (RESOURCE_EXHAUSTED, True), text


async def test_a_message_in_small_frames_that_fills_the_memory_is_ended() -> None:
    """gRPC keeps 2 KiB for each 24 bytes of it: 1.4 GB for the whole message."""
    reads = MessageReads(max_growth_bytes=16 * 2**20, max_reads_growth_bytes=32 * 2**20)
    async with (
        asyncio.timeout(DEADLINE_S),
        echo_server(reads) as address,
        UnfinishedCalls(address, max_frame_bytes=24, num_pings=120) as attacker,
    ):
        before = resident_bytes()
        stream = attacker.open(METHOD, bytes(MAX_MESSAGE_BYTES - 1))
        await attacker.until(lambda: bool(attacker.ended))
        code, text = attacker.ended[stream]
        assert code == RESOURCE_EXHAUSTED
        assert "MiB since, the limit of all such messages is 32 MiB" in text
        assert attacker.num_sent[stream] < MAX_MESSAGE_BYTES // 4
        assert resident_bytes() - before < 96 * 2**20


@pytest.mark.parametrize(
    ("after", "problem"),
    [(b"", "the call has more than one message"), (MESSAGE, "the call's message is incomplete, after 0.")],
    ids=["whole", "unfinished"],
)
async def test_what_comes_after_the_only_message_of_a_call_ends_it(after: bytes, problem: str) -> None:
    """Nothing would read it while the call goes on."""

    async def hold(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield request
        await asyncio.Event().wait()

    async with (
        asyncio.timeout(DEADLINE_S),
        echo_server(MessageReads(timeout_s=0.1), grpc.unary_stream_rpc_method_handler(hold)) as address,
        UnfinishedCalls(address) as attacker,
    ):
        stream = attacker.open(METHOD, after, before=b"x")
        await attacker.until(lambda: bool(attacker.ended))
        assert attacker.ended[stream][1].startswith(problem)
        assert not attacker.answered


async def test_a_call_whose_only_message_is_unfinished_at_its_end_is_refused() -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        echo_server(MessageReads()) as address,
        UnfinishedCalls(address) as caller,
    ):
        stream = caller.open(METHOD, MESSAGE)
        await caller.until(lambda: caller.num_sent[stream] == PREFIX_BYTES + len(MESSAGE) - 1)
        caller.finish(stream, b"")
        await caller.until(lambda: bool(caller.ended))
        assert caller.ended[stream] == (INVALID_ARGUMENT, "the call has no complete message")


async def test_a_message_that_ends_in_time_is_served() -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        echo_server(MessageReads()) as address,
        UnfinishedCalls(address) as caller,
    ):
        stream = caller.open(METHOD, MESSAGE)
        await caller.until(lambda: caller.num_sent[stream] == PREFIX_BYTES + len(MESSAGE) - 1)
        assert not caller.ended
        caller.finish(stream, MESSAGE)
        await caller.until(lambda: bool(caller.ended))
        assert caller.ended[stream] == ("0", "")


async def test_a_message_that_does_not_end_has_a_deadline() -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        echo_server(MessageReads(timeout_s=0.1)) as address,
        UnfinishedCalls(address) as caller,
    ):
        stream = caller.open(METHOD, MESSAGE)
        await caller.until(lambda: bool(caller.ended))
        code, text = caller.ended[stream]
        assert (code, text.partition(", after")[0]) == (
            RESOURCE_EXHAUSTED,
            "the call's message is incomplete",
        )


async def test_a_denied_certificate_is_refused_before_its_message_is_read(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    certificates.deny_list.write_text("client/x\n")
    tls = client_transport(certificates.of("x", Role.CLIENT)).client_context()
    assert isinstance(tls, ssl.SSLContext)
    tls.set_alpn_protocols(["h2"])
    async with (
        asyncio.timeout(DEADLINE_S),
        mock_cluster(1, certificates=certificates) as cluster,
        UnfinishedCalls(cluster.address, tls) as attacker,
    ):
        large = bytes(MAX_MESSAGE_BYTES - 1)
        stream = attacker.open("/stageline.v1.Inference/Generate", large)
        await attacker.until(lambda: bool(attacker.ended))
        text = "the certificate of client x is on the deny list"
        assert attacker.ended[stream] == (UNAUTHENTICATED, text)
        assert attacker.num_sent[stream] < len(large) // 2
