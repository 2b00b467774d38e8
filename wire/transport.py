"""How a process connects and listens: in plain text, or with certificates at both ends.

Every connection between processes of a cluster is made here. Certificates are read again when their files
change: by listeners at each handshake, by callers at each new channel; open connections stay as they are.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import grpc

from certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from certificates.identity import Identity, Role
from wire.addresses import Address, parse_address
from wire.audit import NO_AUDIT, AuditLog
from wire.channels import CHANNEL_OPTIONS
from wire.flags import Flag, file_path

if TYPE_CHECKING:
    from certificates.files import TlsDirectory, TlsMaterial


ENDING_SHARE = 0.2


def tls_directory(text: str) -> Path:
    """Return the absolute path of a directory with a certificate. Raises ValueError.

    Links stay links: Kubernetes replaces files by changing one.
    """
    path = Path(os.path.abspath(text))
    if not path.is_dir():
        raise ValueError(
            f"directory {text!r} does not exist: it must hold {CA_FILE}, {CERTIFICATE_FILE} and {KEY_FILE}"
        )
    return path


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportSettings:
    """How a process connects and listens."""

    tls_directory: Annotated[
        Path | None,
        Flag(
            "--tls-dir",
            "DIR",
            f"Directory with {CA_FILE}, {CERTIFICATE_FILE} and {KEY_FILE}; both ends of every connection "
            "then prove who they are",
            unset="plain text",
            panel="Certificates",
            parse=tls_directory,
        ),
    ] = None
    deny_list: Annotated[
        Path | None,
        Flag(
            "--deny-list",
            "FILE",
            "Certificates to refuse: lines such as worker/gpu-a or serial:HEX; read again when it changes",
            unset="none",
            panel="Certificates",
            parse=file_path,
        ),
    ] = None
    insecure: Annotated[
        bool,
        Flag(
            "--insecure",
            None,
            "Listen beyond this host without certificates: anyone who reaches a port gets in",
            panel="Certificates",
        ),
    ] = False

    def check_listen(self, flag: str, address: str) -> None:
        """Raises ValueError for plain text on an address that other hosts may reach."""
        if self.tls_directory is None and not self.insecure and not is_loopback(address):
            raise ValueError(
                f"{flag} {address} can be reached from other hosts: give --tls-dir DIR, or --insecure to let "
                "in anyone who reaches it"
            )


PLAIN_SETTINGS = TransportSettings()


def is_loopback(address: str) -> bool:
    """Whether only this host reaches an address HOST:PORT."""
    return is_loopback_host(parse_address(address).host)


def is_loopback_host(host: str) -> bool:
    """Whether a host name or address is this host's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


@dataclass(frozen=True, slots=True)
class CertificateLife:
    """When the certificate of a process ends."""

    expires_at: datetime
    left_s: float
    is_ending: bool
    """Less than a fifth of its life is left: whatever renews it does not."""


class Transport:
    """Makes the channels and listening ports of a process."""

    def __init__(self, files: TlsDirectory | None = None) -> None:
        """Without `files`, in plain text."""
        self.files = files

    @property
    def identity(self) -> Identity | None:
        """Who this process is; None in plain text."""
        return None if self.files is None else self.files.current().identity

    def certificate_life(self) -> CertificateLife | None:
        """Of the certificate in use; None in plain text."""
        if self.files is None:
            return None
        material, now = self.files.current(), datetime.now(UTC)
        left_s = (material.expires_at - now).total_seconds()
        return CertificateLife(material.expires_at, left_s, material.life_left(now) < ENDING_SHARE)

    def channel(self, address: str, *, peer_host: str | None = None) -> grpc.aio.Channel:
        """Return a channel to HOST:PORT; with certificates, the peer's must name the host, or `peer_host`."""
        if self.files is None:
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return _secure_channel(address, self.files.current(), peer_host)

    def bind(self, server: grpc.aio.Server, address: str) -> int:
        """Bind `address` and return the port. Raises OSError with one line that names the cause."""
        _check_free(parse_address(address))
        try:
            if self.files is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, _server_credentials(self.files))
        except RuntimeError:
            port = 0
        if port == 0:
            raise OSError(
                f"cannot listen on {address}: the port is in use or the address is not local: choose another"
            )
        return port

    def http_context(self, *, asks_certificates: bool = False) -> ssl.SSLContext | None:
        """For an HTTP server, whose clients need no certificate; None in plain text.

        Each handshake has the newest certificate. With `asks_certificates` clients that have one prove it.
        """
        if self.files is None:
            return None
        files, used = self.files, self.files.current()
        newest = _http_context(used, asks_certificates=asks_certificates)

        def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            nonlocal used, newest
            if (material := files.current()) is not used:
                used = material
                newest = _http_context(material, asks_certificates=asks_certificates)
            connection.context = newest

        context = _http_context(used, asks_certificates=asks_certificates)
        context.sni_callback = choose
        return context

    def client_context(self) -> ssl.SSLContext | None:
        """For connections of this process without gRPC; None in plain text."""
        return None if self.files is None else _context(self.files.current(), ssl.Purpose.SERVER_AUTH)

    def server_context(self) -> ssl.SSLContext | None:
        """For connections to this process without gRPC, whose callers show a certificate."""
        return None if self.files is None else _context(self.files.current(), ssl.Purpose.CLIENT_AUTH)


PLAIN = Transport()


def open_transport(settings: TransportSettings, role: Role, audit: AuditLog = NO_AUDIT) -> Transport:
    """Read the certificate of a serving process. Raises UnusableTlsFiles, also for one of another role."""
    if settings.tls_directory is None:
        return PLAIN
    # Imported late: the library takes 10 MB and more, which processes in plain text do not need.
    from certificates.files import TlsDirectory, UnusableTlsFiles

    files = TlsDirectory(settings.tls_directory)
    if (found := files.current().identity).role is not role:
        raise UnusableTlsFiles(
            f"{settings.tls_directory / CERTIFICATE_FILE} is of {found}, must be of a {role.value}"
        )
    files.on_reload = audit.reloaded
    return Transport(files)


def client_transport(directory: Path) -> Transport:
    """Read the certificate of a client. Raises UnusableTlsFiles."""
    from certificates.files import TlsDirectory

    return Transport(TlsDirectory(directory))


class RenewedChannel:
    """A channel to one address that is replaced when certificates have changed."""

    def __init__(self, transport: Transport, address: str) -> None:
        self._transport, self._address = transport, address
        self._channel: grpc.aio.Channel | None = None
        self._material: TlsMaterial | None = None

    def current(self) -> grpc.aio.Channel:
        """Return the channel for new calls; calls on former ones go on, and keep their connection."""
        files = self._transport.files
        material = None if files is None else files.current()
        if self._channel is None or material is not self._material:
            self._material, self._channel = material, self._transport.channel(self._address)
        return self._channel

    async def close(self) -> None:
        """End every call, except those on former channels."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


def _secure_channel(address: str, material: TlsMaterial, peer_host: str | None) -> grpc.aio.Channel:
    credentials = grpc.ssl_channel_credentials(material.ca_pem, material.key_pem, material.chain_pem)
    named = () if peer_host is None else (("grpc.ssl_target_name_override", peer_host),)
    return grpc.aio.secure_channel(address, credentials, options=(*CHANNEL_OPTIONS, *named))


def _server_credentials(files: TlsDirectory) -> grpc.ServerCredentials:
    def configuration(material: TlsMaterial) -> Any:
        pairs = [(material.key_pem, material.chain_pem)]
        return grpc.ssl_server_certificate_configuration(pairs, material.ca_pem)

    used = files.current()

    def newest() -> Any:
        """Called in a thread of gRPC for each handshake."""
        nonlocal used
        if (material := files.current()) is used:
            return None
        used = material
        return configuration(material)

    return grpc.dynamic_ssl_server_credentials(
        configuration(used), newest, require_client_authentication=True
    )


def _http_context(material: TlsMaterial, *, asks_certificates: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if asks_certificates:
        context.verify_mode = ssl.CERT_OPTIONAL
        context.load_verify_locations(cadata=material.ca_pem.decode("ascii"))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    material.load_chain(context)
    return context


def _context(material: TlsMaterial, purpose: ssl.Purpose) -> ssl.SSLContext:
    context = ssl.create_default_context(purpose, cadata=material.ca_pem.decode("ascii"))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    material.load_chain(context)
    return context


def _check_free(address: Address) -> None:
    """Bind a plain socket first: gRPC prints its own lines to stderr and does not report the cause."""
    try:
        candidates = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {error.strerror}") from None
    problems = [_bind_problem(family, sockaddr) for family, _, _, _, sockaddr in candidates]
    # A host name with several addresses is served on those that can be bound.
    if all(problems):
        raise OSError(f"cannot listen on {address}: {problems[0]}; give another --listen")


def _bind_problem(family: socket.AddressFamily, sockaddr: tuple[Any, ...]) -> str | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(sockaddr)
    except OSError as error:
        return error.strerror
    return None
