"""Certificates prove one identity each, for the hosts that they name, as long as they are valid."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from certificates.authority import (
    MAX_LEAF_LIFE,
    MAX_NAMES,
    KeyPair,
    hosts_of,
    identity_of,
    is_issued_by,
    issue,
    make_authority,
    new_key,
)
from certificates.files import certificate_pem, key_pem
from certificates.identity import Identity, Role, parse_identity

DAY = timedelta(days=1)
WORKER = Identity(cluster="c", role=Role.WORKER, name="w0")
CLIENT = replace(WORKER, role=Role.CLIENT, name="ann")


@pytest.fixture(scope="module")
def authority() -> KeyPair:
    return make_authority("test", life=DAY)


def leaf_of(authority: KeyPair, identity: Identity = WORKER, hosts: Sequence[str] = ()) -> KeyPair:
    key = new_key()
    return KeyPair(issue(authority, identity, hosts, key.public_key(), life=DAY), key)


@pytest.mark.parametrize("role", list(Role))
def test_an_identity_is_a_spiffe_id(role: Role) -> None:
    identity = Identity(cluster="my-cluster", role=role, name="gpu_0.a", trust_domain="example.org")
    assert identity.uri == f"spiffe://example.org/stageline/my-cluster/{role.value}/gpu_0.a"
    assert parse_identity(identity.uri) == identity


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("spiffe://d/stageline/c/worker", "is not spiffe://"),
        ("spiffe://d/stageline/c/worker/a/b", "is not spiffe://"),
        ("spiffe://d/other/c/worker/a", "is not spiffe://"),
        ("https://d/stageline/c/worker/a", "is not spiffe://"),
        ("spiffe://d/stageline/c/root/a", "role 'root' is unknown"),
        ("spiffe://D/stageline/c/worker/a", "trust domain 'D'"),
        ("spiffe://d/stageline//worker/a", "cluster ''"),
        ("spiffe://d/stageline/c/worker/a b", "name 'a b'"),
        ("spiffe://d/stageline/c/worker/..", "name '..'"),
        ("spiffe://d/stageline/c/worker/" + "a" * 64, "has 64 characters, the limit is 63"),
    ],
)
def test_other_uris_are_no_identities(uri: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_identity(uri)


def test_a_leaf_has_one_identity_and_the_hosts_that_were_asked_for(authority: KeyPair) -> None:
    leaf = leaf_of(authority, hosts=("gpu-a", "10.0.0.7", "::1", "gpu-a")).certificate
    assert identity_of(leaf) == WORKER
    assert hosts_of(leaf) == ["gpu-a", "10.0.0.7", "::1"]
    assert is_issued_by(leaf, authority.certificate)
    assert not is_issued_by(leaf, make_authority("test", life=DAY).certificate)
    assert leaf.serial_number != leaf_of(authority).certificate.serial_number
    with pytest.raises(ValueError, match="has 0 URIs"):
        identity_of(authority.certificate)


def test_a_leaf_is_verified_for_its_hosts_and_its_time(authority: KeyPair) -> None:
    leaf = leaf_of(authority, hosts=("gpu-a",)).certificate
    store, now = Store([authority.certificate]), datetime.now(UTC)
    verifiers = PolicyBuilder().store(store)
    verifiers.time(now).build_server_verifier(x509.DNSName("gpu-a")).verify(leaf, [])
    assert verifiers.time(now).build_client_verifier().verify(leaf, []).subjects
    with pytest.raises(VerificationError):
        verifiers.time(now).build_server_verifier(x509.DNSName("gpu-b")).verify(leaf, [])
    for moment in (now - timedelta(minutes=6), now + DAY + timedelta(minutes=1)):
        with pytest.raises(VerificationError):
            verifiers.time(moment).build_client_verifier().verify(leaf, [])
    foreign = leaf_of(make_authority("other", life=DAY)).certificate
    with pytest.raises(VerificationError):
        verifiers.time(now).build_client_verifier().verify(foreign, [])


def test_a_leaf_signs_nothing(authority: KeyPair) -> None:
    leaf = leaf_of(authority)
    below = leaf_of(leaf).certificate
    verifier = PolicyBuilder().store(Store([authority.certificate])).build_client_verifier()
    with pytest.raises(VerificationError):
        verifier.verify(below, [leaf.certificate])


@pytest.mark.parametrize(
    ("hosts", "life", "reason"),
    [
        (("a b",), DAY, "host 'a b' is neither"),
        (("",), DAY, "host '' is neither"),
        (("*",), DAY, "is neither"),
        (tuple(f"h{n}" for n in range(MAX_NAMES + 1)), DAY, "33 hosts, the limit is 32"),
        ((), MAX_LEAF_LIFE + DAY, "at most 90 days"),
        ((), timedelta(0), "not above 0"),
    ],
)
def test_what_no_certificate_can_say_is_refused(
    authority: KeyPair, hosts: tuple[str, ...], life: timedelta, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        issue(authority, WORKER, hosts, new_key().public_key(), life=life)


def test_two_processes_shake_hands_in_tls_1_3(authority: KeyPair, tmp_path: Path) -> None:
    server, client = _context(authority, tmp_path, WORKER, ("gpu-a",)), _context(authority, tmp_path, CLIENT)
    assert shake_hands(server, client, "gpu-a") == ("TLSv1.3", WORKER.uri, CLIENT.uri)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, client, "gpu-b")
    stranger = _context(make_authority("other", life=DAY), tmp_path, CLIENT)
    with pytest.raises(ssl.SSLError):
        shake_hands(server, stranger, "gpu-a")


def _context(
    authority: KeyPair, directory: Path, identity: Identity, hosts: Sequence[str] = ()
) -> ssl.SSLContext:
    leaf = leaf_of(authority, identity, hosts)
    files = {
        CA_FILE: certificate_pem(authority.certificate),
        CERTIFICATE_FILE: certificate_pem(leaf.certificate),
        KEY_FILE: key_pem(leaf.key),
    }
    for name, content in files.items():
        (directory / name).write_bytes(content)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if hosts else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(directory / CA_FILE)
    context.load_cert_chain(directory / CERTIFICATE_FILE, directory / KEY_FILE)
    return context


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> tuple[str | None, str, str]:
    """Return the version, and the URIs that the client and the server saw. Raises SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(10):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    seen = [dict(end.getpeercert() or {})["subjectAltName"] for end in ends]
    uris = [next(value for kind, value in names if kind == "URI") for names in seen]  # type: ignore[misc]
    return ends[0].version(), uris[0], uris[1]


def test_an_authority_of_another_tool_signs_without_a_key_identifier(authority: KeyPair) -> None:
    made, key = authority.certificate, new_key()
    builder = x509.CertificateBuilder(
        made.issuer, made.subject, key.public_key(), 7, made.not_valid_before_utc, made.not_valid_after_utc
    )
    usage = x509.BasicConstraints(ca=True, path_length=0)
    bare = KeyPair(builder.add_extension(usage, critical=True).sign(key, hashes.SHA256()), key)
    leaf = issue(bare, WORKER, (), new_key().public_key(), life=DAY / 2)
    assert is_issued_by(leaf, bare.certificate)
    assert not is_issued_by(leaf, made)
    assert leaf.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
