"""Channels and contexts with certificates that change, and addresses that need them."""

from __future__ import annotations

import asyncio
import gc
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from certificates.files import TlsDirectory, read_certificates
from certificates.identity import Identity, Role
from tests.issued import Certificates
from wire.channels import new_server
from wire.flags import directory_path, existing_file, file_path
from wire.transport import PLAIN, RenewedChannel, Transport, TransportSettings, open_transport, tls_directory

DEADLINE_S = 20.0
SERVER = Identity(cluster="default", role=Role.COORDINATOR, name="server")
CLIENT = Identity(cluster="default", role=Role.CLIENT, name="client")


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@pytest.fixture
async def echo(certificates: Certificates) -> AsyncIterator[str]:
    """Address of a server that returns the serial number of the caller's certificate for each message."""

    async def serials(requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield context.auth_context()["x509_pem_cert"][0]

    server = new_server()
    handler = grpc.stream_stream_rpc_method_handler(serials)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Echo": handler}),))
    transport = Transport(TlsDirectory(certificates.of("server", Role.COORDINATOR)))
    port = transport.bind(server, "127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def seen(call: Any) -> bytes:
    await call.write(b"")
    answer: bytes = await call.read()
    return answer


def leaf(directory: Path) -> bytes:
    return (directory / "tls.crt").read_bytes()


async def test_new_calls_use_new_certificates_and_calls_before_go_on(
    certificates: Certificates, echo: str
) -> None:
    directory = certificates.of("client", Role.CLIENT)
    renewed, first = RenewedChannel(Transport(TlsDirectory(directory)), echo), leaf(directory)
    before: Any = renewed.current().stream_stream("/test/Echo")()
    assert await seen(before) == first
    assert renewed.current() is renewed.current()
    certificates.write(directory, CLIENT)
    after: Any = renewed.current().stream_stream("/test/Echo")()
    assert (await seen(after), await seen(before)) == (leaf(directory), first) != (first, first)
    gc.collect()
    assert await seen(before) == first
    await renewed.close()
    async with asyncio.timeout(DEADLINE_S):
        assert await after.code() == grpc.StatusCode.CANCELLED
    before.cancel()


async def test_an_http_server_uses_a_new_certificate_at_the_next_handshake(
    certificates: Certificates,
) -> None:
    directory = certificates.of("server", Role.COORDINATOR)
    context = Transport(TlsDirectory(directory)).http_context()
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    trusted = ssl.create_default_context(cafile=directory / "ca.crt")

    async def shown() -> str:
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusted)
        found = writer.get_extra_info("peercert")["serialNumber"]
        writer.close()
        return str(found)

    def written() -> str:
        return f"{read_certificates(directory / 'tls.crt')[0].serial_number:X}"

    async with server:
        first = written()
        assert int(await shown(), 16) == int(first, 16)
        certificates.write(directory, SERVER)
        assert int(await shown(), 16) == int(written(), 16) != int(first, 16)
        (directory / "tls.crt").write_bytes(b"damaged")
        assert int(await shown(), 16) != int(first, 16)  # the one before stays in use


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"])
def test_loopback_needs_no_certificate(address: str) -> None:
    TransportSettings().check_listen("--listen", address)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.0.0.7:1", "gpu-a:1", "localhost.example:1"])
def test_other_addresses_need_a_certificate_or_a_word(address: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give --tls-dir DIR, or --insecure"):
        TransportSettings().check_listen("--listen", address)
    TransportSettings(insecure=True).check_listen("--listen", address)
    TransportSettings(tls_directory=tmp_path).check_listen("--listen", address)


def test_without_certificates_nothing_is_encrypted() -> None:
    assert open_transport(TransportSettings(), Role.WORKER) is PLAIN
    found = (PLAIN.identity, PLAIN.http_context(), PLAIN.client_context(), PLAIN.server_context())
    assert found == (None, None, None, None)


def test_paths_of_replaced_files_stay_links(tmp_path: Path) -> None:
    """Kubernetes changes the link `..data`, and removes the directory that it led to."""
    (tmp_path / "..v1" / "pod").mkdir(parents=True)
    (tmp_path / "..v1" / "keys.toml").touch()
    (tmp_path / "..data").symlink_to("..v1")
    for name in ("pod", "keys.toml"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    assert tls_directory(str(tmp_path / "pod")) == tmp_path / "pod"
    assert existing_file(str(tmp_path / "keys.toml")) == tmp_path / "keys.toml"
    assert file_path(f"{tmp_path}/pod/../keys.toml") == tmp_path / "keys.toml"


def test_the_path_of_a_directory_is_no_loop_of_links(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "new")
    with pytest.raises(ValueError, match="a' is a loop of links: give the path of a directory"):
        directory_path(str(tmp_path / "a"))
    assert directory_path(str(tmp_path / "link")) == tmp_path / "new"
