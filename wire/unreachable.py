"""The cause when no coordinator answers at an address, found by connections of their own.

gRPC has one status for all of them. A wrong name, port or certificate, and a server of another kind, show
at the first bytes of a connection.
"""

from __future__ import annotations

import asyncio
import socket
import ssl

from wire.addresses import Address, parse_address
from wire.transport import Transport

PROBE_TIMEOUT_S = 2.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""A client of HTTP/2 begins with it, and with empty settings (RFC 9113, 3.4)."""
_SETTINGS = 4
_HOST_NAME, _HOST_ADDRESS, _EXPIRED = 62, 64, 10
"""X509_V_ERR_HOSTNAME_MISMATCH, _IP_ADDRESS_MISMATCH and _CERT_HAS_EXPIRED."""

SILENT = "it listens, but does not answer in time"
OF_HTTP = "it answers HTTP, as gateways and dashboards do: the port of a coordinator is 7480 by default"
WANTS_CERTIFICATES = "it wants certificates: give --tls-dir DIR"
WITHOUT_CERTIFICATES = "it serves without certificates: leave out --tls-dir"


async def unreachable_cause(address: str, transport: Transport) -> str:
    """Return what is wrong at HOST:PORT for a caller with `transport`, and what to do. Takes some seconds."""
    where = parse_address(address)
    try:
        async with asyncio.timeout(2 * PROBE_TIMEOUT_S):
            if transport.files is None:
                return await _plain_cause(where)
            return await _secure_cause(where, transport)
    except socket.gaierror:
        return f"no host is named {where.host}: check the name"
    except ConnectionRefusedError:
        return "nothing listens there: check the port, or start the coordinator"
    except TimeoutError:
        return "its host does not answer: check the address and firewalls"
    except OSError as error:
        return (error.strerror or str(error)).lower()


async def _plain_cause(where: Address) -> str:
    first = await _first_bytes(where, None)
    if _is_http1(first):
        return OF_HTTP
    if _is_http2(first):
        return SILENT
    protocol = await _tls_protocol(where)
    if protocol is None:
        return f"it answers neither gRPC nor HTTP: check the port, {where.port}" if first else SILENT
    return WANTS_CERTIFICATES if protocol == "h2" else OF_HTTP


async def _secure_cause(where: Address, transport: Transport) -> str:
    context = transport.client_context()
    assert context is not None, "a transport with files"
    context.set_alpn_protocols(["h2"])
    try:
        first = await _first_bytes(where, context)
    except ssl.SSLCertVerificationError as error:
        return await _untrusted_cause(where, error)
    except ssl.SSLError as error:
        if await _tls_protocol(where) is None:
            first = await _first_bytes(where, None)
            return OF_HTTP if _is_http1(first) else WITHOUT_CERTIFICATES
        reason = (error.reason or str(error)).lower().replace("_", " ")
        return f"it refuses the certificate in --tls-dir: {reason}"
    if _is_http1(first):
        return OF_HTTP
    return SILENT


async def _untrusted_cause(where: Address, error: ssl.SSLCertVerificationError) -> str:
    match error.verify_code:
        case code if code in (_HOST_NAME, _HOST_ADDRESS):
            names = ", ".join(await _certified_names(where)) or "no host"
            return f"its certificate is for {names}, not for {where.host}: call it by that name"
        case code if code == _EXPIRED:
            return "its certificate has expired: renew it on its host"
        case _:
            return (
                f"its certificate is not of the authority in --tls-dir ({error.verify_message}): "
                "take the ca.crt of its cluster"
            )


async def _first_bytes(where: Address, context: ssl.SSLContext | None) -> bytes:
    """Begin as HTTP/2 does and return the first answer; empty if there is none. Raises OSError."""
    reader, writer = await _connected(where, context)
    try:
        writer.write(_PREFACE)
        async with asyncio.timeout(PROBE_TIMEOUT_S / 2):
            return await reader.read(64)
    except (TimeoutError, ConnectionError):
        return b""
    finally:
        writer.transport.abort()


async def _tls_protocol(where: Address) -> str | None:
    """The protocol that a server with certificates chooses; "" for none, None if it has no certificates."""
    try:
        _, writer = await _connected(where, _trusting_context())
    except (ssl.SSLError, ConnectionError, TimeoutError):
        return None
    writer.transport.abort()
    connection: ssl.SSLObject = writer.get_extra_info("ssl_object")
    return connection.selected_alpn_protocol() or ""


async def _certified_names(where: Address) -> list[str]:
    from cryptography import x509  # imported late: only those with certificates have need of it

    _, writer = await _connected(where, _trusting_context())
    connection: ssl.SSLObject = writer.get_extra_info("ssl_object")
    writer.transport.abort()
    der = connection.getpeercert(binary_form=True)
    assert der is not None, "a server shows its certificate"
    try:
        found = x509.load_der_x509_certificate(der).extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
    except (ValueError, x509.ExtensionNotFound):
        return []
    names = found.value.get_values_for_type(x509.DNSName)
    return [*names, *map(str, found.value.get_values_for_type(x509.IPAddress))]


def _trusting_context() -> ssl.SSLContext:
    """For a look at the certificate; nothing is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


async def _connected(
    where: Address, context: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(PROBE_TIMEOUT_S):
        name = None if context is None else where.host
        return await asyncio.open_connection(where.host, where.port, ssl=context, server_hostname=name)


def _is_http1(first: bytes) -> bool:
    return first.startswith(b"HTTP/1")


def _is_http2(first: bytes) -> bool:
    return len(first) >= 9 and first[3] == _SETTINGS
