"""Surfaces of certificates: the files of a `--tls-dir`, and requests to the enrolment port.

A case of `tls-files` is the name of a file, a line break, and its content. A case of `enrolment` is the kind
of connection (`+` with a certificate, `-` without) and what is sent on it.
"""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from random import Random
from unittest.mock import patch

import coordinator.enrolment.server
from certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from certificates.files import TlsDirectory, UnusableTlsFiles, read_tls_material, write_authority
from certificates.identity import Role
from certificates.join_tokens import MAX_USES, JoinToken, JoinTokenStore
from tests.fuzz.background import Background, errors_logged
from tests.fuzz.harness import Broken, Opened, Surface
from tests.fuzz.http_requests import exchange
from tests.fuzz.mutations import json_bytes, mutate_bytes, mutate_json
from tests.integration.test_mock_cluster import mock_cluster
from tests.issued import LIFE, Certificates
from wire.addresses import Address
from wire.transport import Transport

_DATA = Path(__file__).parents[1] / "data" / "certificates"
"""Of a worker, valid for a hundred years."""
_FILES = (CA_FILE, CERTIFICATE_FILE, KEY_FILE)
_TOKEN_ID, _SECRET = "TOKEN-" * 2, "SECRET-" * 6 + "x"
"""Stand in for those of a token, which is another one each time."""


# Files of --tls-dir


def make_tls_file(random: Random) -> bytes:
    """A file with changed text, or with changed bytes of what it encodes."""
    name = random.choice(_FILES)
    content = _valid_files()[name]
    match random.randrange(4):
        case 0:
            changed = mutate_bytes(content, random)
        case 1:
            other = _valid_files()[random.choice(_FILES)]
            changed = random.choice((content + other, other, other + content, content * 30))
        case _:
            changed = _changed_der(content, random)
    return name.encode() + b"\n" + changed


def _changed_der(pem: bytes, random: Random) -> bytes:
    first, *middle, last = pem.strip().splitlines()
    der = mutate_bytes(base64.b64decode(b"".join(middle)), random, most=2)
    return b"\n".join((first, base64.encodebytes(der).strip(), last, b""))


@cache
def _valid_files() -> dict[str, bytes]:
    return {name: (_DATA / name).read_bytes() for name in _FILES}


@contextmanager
def opened_tls_files() -> Iterator[Opened]:
    """Takes a case by reading a directory with this file in it, and by serving with it if it is usable."""
    with tempfile.TemporaryDirectory(prefix="stageline-fuzz-") as made:
        directory = Path(made)

        def examine(data: bytes) -> str:
            changed, _, content = data.partition(b"\n")
            for name, valid in _valid_files().items():
                path = directory / name
                path.touch(0o600)
                path.write_bytes(content if name == changed.decode() else valid)
            try:
                read_tls_material(directory)
            except UnusableTlsFiles as error:
                if len(str(error)) > 2_000:
                    raise Broken(f"an error of {len(str(error))} characters") from None
                return "UnusableTlsFiles"
            _use(Transport(TlsDirectory(directory)))
            return "ok"

        def check() -> None:
            if examine(CA_FILE.encode() + b"\n" + _valid_files()[CA_FILE]) != "ok":
                raise Broken("valid files are refused")

        yield Opened(examine, check, (os.getpid(),))


def _use(transport: Transport) -> None:
    """What a process does with files that were read."""
    contexts = (transport.http_context(asks_certificates=True), transport.client_context())
    if None in (*contexts, transport.server_context()):
        raise Broken("a connection would be in plain text")
    transport.certificate_life()


# Enrolment


def make_enrolment(random: Random) -> bytes:
    kind = random.choice(("enroll", "enroll", "renew", "ca"))
    fields: dict[str, object] = {"csr": _changed_request(random)}
    if kind == "enroll":
        is_known = random.random() < 0.7
        fields["token_id"] = _TOKEN_ID if is_known else random.choice(("ab12" * 3, "", "x" * 300, "\ud800"))
        fields["secret"] = _SECRET if is_known else random.choice(("s" * 43, "", "\udc80", "é"))
    value = mutate_json(fields, random) if random.random() < 0.3 else fields
    body = b"" if kind == "ca" else json_bytes(value, random)
    method = "GET" if kind == "ca" else "POST"
    head = f"{method} /{kind} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    data = head.encode() + body
    return random.choice((b"+", b"-")) + (mutate_bytes(data, random) if random.random() < 0.1 else data)


def _changed_request(random: Random) -> str:
    """A certificate request: one of four is valid, the others have changed text or bytes."""
    pem = random.choice(_requests())
    match random.randrange(4):
        case 0:
            return pem.decode()
        case 1:
            return mutate_bytes(pem, random).decode(errors="surrogateescape")
        case _:
            return _changed_der(pem, random).decode()


@cache
def _requests() -> list[bytes]:
    """Without hosts, with two, with one for a name of 64 letters, and with too many."""
    return [path.read_bytes() for path in sorted(_DATA.glob("*.csr"))]


@asynccontextmanager
async def _serving(certificates: Certificates) -> AsyncIterator[tuple[Address, JoinToken]]:
    authority = certificates.folder / "ca"
    write_authority(authority, certificates.authority)
    token = JoinTokenStore(authority / "tokens.json").create("a" * 64, Role.WORKER, life=LIFE, uses=MAX_USES)
    async with mock_cluster(
        1, certificates=certificates, num_workers=0, waits=False, enrolment=authority
    ) as cluster:
        assert cluster.server.enrolment is not None
        yield cluster.server.enrolment.address, token


@contextmanager
def opened_enrolment() -> Iterator[Opened]:
    """Without the limit of requests per minute, which would hide all but the first."""
    background = Background()
    with (
        tempfile.TemporaryDirectory(prefix="stageline-fuzz-") as made,
        patch.object(coordinator.enrolment.server, "MAX_TRIES", 1_000_000),
        errors_logged() as errors,
    ):
        certificates = Certificates(Path(made))
        callers = {b"+": _caller(certificates, is_known=True), b"-": _caller(certificates, is_known=False)}
        with background.entered(lambda: _serving(certificates)) as (address, token):

            def examine(data: bytes) -> str:
                sent = data[1:].replace(_TOKEN_ID.encode(), token.token_id.encode())
                sent = sent.replace(_SECRET.encode(), token.secret.encode())
                ended = background.run(exchange(address, sent, callers[data[:1]]))
                errors.check()
                return ended

            def check() -> None:
                request = b"-GET /ca HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
                if (status := examine(request)) != "200":
                    raise Broken(f"a valid request: {status}")

            yield Opened(examine, check, (os.getpid(),))
    background.close()


def _caller(certificates: Certificates, *, is_known: bool) -> ssl.SSLContext:
    directory = certificates.of("w0", Role.WORKER)
    context = ssl.create_default_context(cafile=directory / CA_FILE)
    if is_known:
        context.load_cert_chain(directory / CERTIFICATE_FILE, directory / KEY_FILE)
    return context


SURFACES = (
    Surface(name="tls-files", share=5, make=make_tls_file, opened=opened_tls_files),
    Surface(name="enrolment", share=4, make=make_enrolment, opened=opened_enrolment),
)
