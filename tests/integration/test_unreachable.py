"""What callers are told where no coordinator answers: one server for each mistake."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import grpc.aio
import pytest

import stageline
from certificates import CERTIFICATE_FILE, KEY_FILE
from certificates.identity import Identity, Role
from tests.issued import Certificates
from tests.ports import unused_address
from wire.transport import PLAIN, Transport, client_transport
from wire.unreachable import OF_HTTP, unreachable_cause


@pytest.fixture
def certified(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@asynccontextmanager
async def grpc_server(transport: Transport) -> AsyncIterator[str]:
    server = grpc.aio.server()
    port = transport.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def http_server(context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Answers whatever comes as a server of HTTP/1 does."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("is_secure", [False, True])
async def test_a_name_or_a_port_that_is_nowhere(certified: Certificates, is_secure: bool) -> None:
    caller = client_transport(certified.of("me", Role.OPERATOR)) if is_secure else PLAIN
    assert await unreachable_cause("no-such-host.invalid:7480", caller) == (
        "no host is named no-such-host.invalid: check the name"
    )
    assert await unreachable_cause(unused_address(), caller) == (
        "nothing listens there: check the port, or start the coordinator"
    )


async def test_certificates_on_one_side_only(certified: Certificates) -> None:
    coordinator = Transport(client_transport(certified.of("head", Role.COORDINATOR)).files)
    caller = client_transport(certified.of("me", Role.OPERATOR))
    async with grpc_server(coordinator) as secure, grpc_server(PLAIN) as plain:
        assert await unreachable_cause(secure, PLAIN) == "it wants certificates: give --tls-dir DIR"
        assert await unreachable_cause(plain, caller) == (
            "it serves without certificates: leave out --tls-dir"
        )


async def test_a_certificate_for_another_host(certified: Certificates, tmp_path: Path) -> None:
    directory = tmp_path / "head"
    directory.mkdir()
    certified.write(directory, head(), hosts=["head", "10.0.0.1"])
    async with grpc_server(client_transport(directory)) as address:
        assert await unreachable_cause(address, client_transport(certified.of("me", Role.OPERATOR))) == (
            "its certificate is for head, 10.0.0.1, not for 127.0.0.1: call it by that name"
        )


async def test_a_certificate_of_another_authority(certified: Certificates, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Certificates(tmp_path / "other")
    async with grpc_server(client_transport(other.of("head", Role.COORDINATOR))) as address:
        cause = await unreachable_cause(address, client_transport(certified.of("me", Role.OPERATOR)))
    assert cause.startswith("its certificate is not of the authority in --tls-dir (")
    assert cause.endswith("): take the ca.crt of its cluster")


async def test_a_certificate_that_has_expired(certified: Certificates, tmp_path: Path) -> None:
    certified.write(tmp_path, head(), made_in=timedelta(days=-4000))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / CERTIFICATE_FILE, tmp_path / KEY_FILE)
    async with http_server(context) as address:
        assert await unreachable_cause(address, client_transport(certified.of("me", Role.OPERATOR))) == (
            "its certificate has expired: renew it on its host"
        )


@pytest.mark.parametrize("is_secure", [False, True])
@pytest.mark.parametrize("serves_https", [False, True])
async def test_the_port_of_a_gateway_or_a_dashboard(
    certified: Certificates, is_secure: bool, serves_https: bool
) -> None:
    caller = client_transport(certified.of("me", Role.OPERATOR)) if is_secure else PLAIN
    gateway = client_transport(certified.of("gw", Role.GATEWAY))
    async with http_server(gateway.http_context() if serves_https else None) as address:
        cause = await unreachable_cause(address, caller)
    assert cause == OF_HTTP


async def test_a_server_that_is_silent_or_speaks_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert await unreachable_cause(f"127.0.0.1:{port}", PLAIN) == (
            "it listens, but does not answer in time"
        )

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await unreachable_cause(f"127.0.0.1:{port}", PLAIN) == (
            f"it answers neither gRPC nor HTTP: check the port, {port}"
        )


async def test_a_sound_coordinator_is_only_slow(certified: Certificates) -> None:
    coordinator = client_transport(certified.of("head", Role.COORDINATOR))
    async with grpc_server(coordinator) as secure, grpc_server(PLAIN) as plain:
        caller = client_transport(certified.of("me", Role.OPERATOR))
        assert await unreachable_cause(secure, caller) == "it listens, but does not answer in time"
        assert await unreachable_cause(plain, PLAIN) == "it listens, but does not answer in time"


async def test_a_client_names_the_cause(certified: Certificates) -> None:
    coordinator = client_transport(certified.of("head", Role.COORDINATOR))
    named = r"^no coordinator at .* within 0\.2 s: it wants certificates: give --tls-dir DIR$"
    async with (
        grpc_server(coordinator) as address,
        stageline.Client(address, connect_timeout_s=0.2) as client,
    ):
        with pytest.raises(stageline.Unavailable, match=named):
            await client.status()


def head() -> Identity:
    return Identity(cluster="default", role=Role.COORDINATOR, name="head")
