"""Who calls, by the certificate of the connection."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import grpc

from certificates.identity import Identity, parse_identity
from wire.errors import CertificateRefused

Context = grpc.aio.ServicerContext[Any, Any]


def peer_identity(context: Context) -> Identity | None:
    """The identity that the caller's certificate proves; None in plain text. Raises CertificateRefused."""
    return identity_in(auth_context(context))


def auth_context(context: Context) -> Mapping[str, list[bytes]]:
    """What TLS tells of the caller."""
    untyped: Any = context  # the stubs lack it
    found: Mapping[str, list[bytes]] = untyped.auth_context()
    return found


def identity_in(auth: Mapping[str, list[bytes]]) -> Identity | None:
    """The identity of a caller; None in plain text. Raises CertificateRefused."""
    if auth.get("transport_security_type") != [b"ssl"]:
        return None
    uris = auth.get("peer_uri", [])
    if len(uris) != 1:
        raise CertificateRefused(f"the certificate has {len(uris)} URIs, must be 1 SPIFFE id")
    try:
        return _parsed(uris[0])
    except ValueError as error:
        raise CertificateRefused(f"the certificate's {error}") from None


@lru_cache(maxsize=1024)
def _parsed(uri: bytes) -> Identity:
    return parse_identity(uri.decode("ascii", "backslashreplace"))
