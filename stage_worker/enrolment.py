"""The certificate of a worker with a join token: how it gets the first one, and renews it."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import logging
import random
import re
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from certificates import files as tls_files
from certificates.authority import identity_of, is_issued_by, new_key
from certificates.files import UnusableTlsFiles, certificate_pem, key_pem, read_tls_material
from certificates.identity import Role, parse_identity
from certificates.join_tokens import JoinToken, parse_join_token
from certificates.requests import make_request
from stage_worker.config import WorkerConfig
from stage_worker.policy import WORKER_POLICY
from wire.addresses import Address, parse_peer_address
from wire.errors import CertificateRefused
from wire.foreign_text import printable_line
from wire.transport import client_transport
from wire.user_files import read_secret

log = logging.getLogger(__name__)

TIMEOUT_S = 15.0
MAX_BYTES = 1 << 17
RENEW_AT = 1 / 3
"""Share of a certificate's life that is left when it is renewed."""
JITTER = 0.1
"""Workers that enrolled together renew at times that differ by up to this share of the wait."""
RETRY_S = (5.0, 300.0)
"""First and longest pause after a renewal that failed."""


def _directory(config: WorkerConfig, name: str) -> Path:
    """The directory of the worker's certificate. Raises OSError."""
    if config.transport.tls_directory is not None:
        return config.transport.tls_directory
    if config.state_directory is None:
        raise OSError(
            "there is no home directory for the certificate: give --tls-dir DIR, or set XDG_STATE_HOME"
        )
    return config.state_directory / "certificates" / name


class EnrolmentUnreachable(OSError):
    """No coordinator answers at the address of enrolments."""


async def enrolled(config: WorkerConfig) -> WorkerConfig:
    """Return the configuration with a certificate, which is fetched unless a former one can be used.

    Waits for the coordinator, as a worker with a certificate does. Raises OSError with one line, and
    CertificateRefused.
    """
    if config.join_token_file is None:
        return config
    name = config.name or socket.gethostname().partition(".")[0]
    directory = _directory(config, name)
    transport = replace(config.transport, tls_directory=directory)
    try:
        known = read_tls_material(directory)
    except UnusableTlsFiles as error:
        log.debug("enrolling: %s", error)
    else:
        log.info("certificate of %s in %s is used", known.identity, directory)
        return replace(config, transport=transport)
    try:
        token = parse_join_token(read_secret(config.join_token_file))
    except ValueError as error:
        raise OSError(f"--join-token-file {config.join_token_file} cannot be used: {error}") from None
    material = await _first_material(config, token, name)
    _write(directory, material)
    log.info("enrolled at %s: certificate in %s", config.enroll_address, directory)
    return replace(config, transport=transport)


async def _first_material(config: WorkerConfig, token: JoinToken, name: str) -> Mapping[str, bytes]:
    logged, pause_s = "", WORKER_POLICY.first_rejoin_delay_s
    while True:
        try:
            return await asyncio.to_thread(enrol, config.enroll_address, token, name, config.asked_hosts)
        except EnrolmentUnreachable as error:
            if (reason := str(error)) != logged:
                log.info("waiting for the coordinator: %s; it enrols with --enroll-listen", reason)
                logged = reason
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, WORKER_POLICY.max_rejoin_delay_s)


def enrol(address: str, token: JoinToken, name: str, hosts: tuple[str, ...]) -> Mapping[str, bytes]:
    """Make a key and get a certificate for it; return the files of a TLS directory.

    The secret is sent only to the coordinator whose certificate the token's authority signed.
    """
    where = parse_peer_address(address)
    authority = _pinned(_call(where, ssl._create_unverified_context(), "GET", "/ca"), token, address)
    context = ssl.create_default_context(cadata=certificate_pem(authority).decode("ascii"))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    key = new_key()
    fields = {
        "token_id": token.token_id,
        "secret": token.secret,
        "csr": make_request(name, hosts, key).decode("ascii"),
    }
    answer = _call(where, context, "POST", "/enroll", fields)
    return _files_of(answer, key, name, authority)


def renew(address: str, directory: Path) -> Mapping[str, bytes]:
    """Get a certificate for a new key with the one in a directory; return the new files."""
    transport, key = client_transport(directory), new_key()
    context, identity = transport.client_context(), transport.identity
    assert context is not None and identity is not None
    name = identity.name
    fields = {"csr": make_request(name, (), key).decode("ascii")}
    answer = _call(parse_peer_address(address), context, "POST", "/renew", fields)
    return _files_of(answer, key, name, None)


@dataclass(slots=True)
class Renewal:
    """Keeps the certificate in a directory fresh, until cancelled."""

    address: str
    directory: Path
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)

    async def run(self) -> None:
        pause_s = 0.0
        while True:
            try:
                await asyncio.sleep(pause_s or self._wait_s())
                await asyncio.to_thread(self._renew)
            except (OSError, CertificateRefused) as error:
                pause_s = min(max(2 * pause_s, RETRY_S[0]), RETRY_S[1]) * random.uniform(1 - JITTER, 1)
                log.warning("the certificate could not be renewed, retrying in %.0f s: %s", pause_s, error)
            else:
                pause_s = 0.0
                log.info("renewed the certificate in %s", self.directory)

    def _wait_s(self) -> float:
        """Seconds until the certificate is to be renewed; a process may start late in its life."""
        leaf = read_tls_material(self.directory).leaf
        begin, end = leaf.not_valid_before_utc, leaf.not_valid_after_utc
        due_s = (end - (end - begin) * RENEW_AT - self.clock()).total_seconds()
        return max(1.0, due_s * random.uniform(1 - JITTER, 1))

    def _renew(self) -> None:
        _write(self.directory, renew(self.address, self.directory))


def _write(directory: Path, content: Mapping[str, bytes]) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    tls_files.replace(directory, dict(content))


def _pinned(answer: bytes, token: JoinToken, address: str) -> x509.Certificate:
    """The authority of the token. Raises CertificateRefused if the answer does not have it."""
    try:
        found = x509.load_pem_x509_certificates(answer)
    except ValueError:
        found = []
    for certificate in found:
        if hashlib.sha256(certificate.public_bytes(Encoding.DER)).hexdigest() == token.ca_sha256:
            return certificate
    raise CertificateRefused(
        f"{address} has another authority than the join token names, {token.ca_sha256[:16]}...: "
        "the token is of another cluster, or another server answers at its address"
    )


def _files_of(
    answer: bytes, key: ec.EllipticCurvePrivateKey, name: str, authority: x509.Certificate | None
) -> Mapping[str, bytes]:
    """Check an answer before it replaces anything. Raises CertificateRefused."""
    try:
        fields = json.loads(answer)
        leaf_pem, trusted_pem = fields["certificate"].encode(), fields["authorities"].encode()
        leaf = x509.load_pem_x509_certificate(leaf_pem)
        trusted = x509.load_pem_x509_certificates(trusted_pem)
        identity = identity_of(leaf)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CertificateRefused(f"the answer to the enrolment cannot be read: {error}") from None
    if identity.name != name or leaf.public_key() != key.public_key():
        raise CertificateRefused(f"the coordinator signed a certificate of {identity}, not of {name}'s key")
    signers = trusted if authority is None else [authority]
    if not any(is_issued_by(leaf, signer) for signer in signers):
        raise CertificateRefused(f"the new certificate of {identity} is signed by another authority")
    return {KEY_FILE: key_pem(key), CERTIFICATE_FILE: leaf_pem, CA_FILE: trusted_pem}


def _call(
    where: Address, context: ssl.SSLContext, method: str, path: str, fields: Mapping[str, str] | None = None
) -> bytes:
    """Send a request to the coordinator and return the body.

    Raises EnrolmentUnreachable, other OSErrors and CertificateRefused.
    """
    connection = http.client.HTTPSConnection(where.host, where.port, timeout=TIMEOUT_S, context=context)
    try:
        connection.connect()
        if fields is not None:
            _check_coordinator(connection)
        body = None if fields is None else json.dumps(dict(fields))
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read(MAX_BYTES)
    except (OSError, http.client.HTTPException) as error:
        is_away = isinstance(error, ConnectionError | TimeoutError | socket.gaierror | ssl.SSLEOFError)
        kind = EnrolmentUnreachable if is_away else OSError
        raise kind(f"cannot enrol at {where}: {_reason(error)}") from None
    finally:
        connection.close()
    if response.status != 200:
        raise CertificateRefused(f"{where} refused {path}: {_refusal(content)}")
    return content


def _check_coordinator(connection: http.client.HTTPSConnection) -> None:
    """Raises CertificateRefused for a peer that is not a coordinator, such as another worker."""
    untyped: Any = connection.sock
    names = untyped.getpeercert().get("subjectAltName", ())
    uris = [value for kind, value in names if kind == "URI"]
    try:
        role = parse_identity(uris[0]).role if len(uris) == 1 else None
    except ValueError:
        role = None
    if role is not Role.COORDINATOR:
        raise CertificateRefused(f"{connection.host}:{connection.port} has no certificate of a coordinator")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return re.sub(r"\s+", " ", text).lower()[:200]


def _refusal(content: bytes) -> str:
    try:
        text = str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        text = content[:100].decode("ascii", "replace")
    return printable_line(text[:300])
