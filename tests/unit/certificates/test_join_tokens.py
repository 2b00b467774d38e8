"""Join tokens and the requests for certificates that they come with."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from certificates.authority import new_key
from certificates.files import UnusableTlsFiles
from certificates.identity import Role
from certificates.join_tokens import MAX_USES, NEW_TOKEN, JoinTokenStore, JoinTokenUnusable, parse_join_token
from certificates.requests import make_request, parse_request

CA = "ab" * 32
HOUR = timedelta(hours=1)


class Clock:
    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "tokens.json"


def test_a_token_names_authority_and_secret_and_the_file_neither(path: Path) -> None:
    token = JoinTokenStore(path).create(CA, Role.WORKER, life=HOUR, uses=4)
    assert parse_join_token(f"{token.text}\n") == token
    assert token.secret not in path.read_text()
    assert token.secret not in repr(token)
    assert path.stat().st_mode & 0o777 == 0o600
    (record,) = JoinTokenStore(path).records()
    assert (record.token_id, record.role, record.uses_left) == (token.token_id, Role.WORKER, 4)


@pytest.mark.parametrize("text", ["", "sl-join.1.2.3", "sl-join." + CA + ".0123456789ab." + "x" * 44])
def test_other_texts_are_no_tokens_and_are_not_repeated(text: str) -> None:
    with pytest.raises(ValueError, match="it is not a join token") as refused:
        parse_join_token(text)
    assert not text or text not in str(refused.value)


def test_a_token_is_used_as_often_as_it_says(path: Path) -> None:
    """Each thread opens the lock by itself, as processes do."""
    token = JoinTokenStore(path).create(CA, Role.WORKER, life=HOUR, uses=5)

    def use(number: int) -> bool:
        try:
            JoinTokenStore(path).redeem(token.token_id, token.secret, f"key {number}")
        except JoinTokenUnusable as error:
            return str(error) != f"join token {token.token_id} was used 5 times, the limit: {NEW_TOKEN}"
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(use, range(40))) == 5
    (record,) = JoinTokenStore(path).records()
    assert record.uses_left == 0
    # An answer that was lost on its way can be asked for again.
    assert JoinTokenStore(path).redeem(token.token_id, token.secret, record.keys[0]) is Role.WORKER


def test_unknown_and_wrong_tokens_get_the_same_answer(path: Path) -> None:
    clock = Clock()
    store = JoinTokenStore(path, clock=clock)
    token = store.create(CA, Role.WORKER, life=HOUR, uses=1)
    clock.now += HOUR
    for token_id, secret in ((token.token_id, "x" * 43), ("0" * 12, token.secret)):
        with pytest.raises(JoinTokenUnusable, match=f"^the join token is unknown: {NEW_TOKEN}$"):
            store.redeem(token_id, secret, "key")
    with pytest.raises(JoinTokenUnusable, match=r"ended at 2026-01-01T01:00:00\+00:00"):
        store.redeem(token.token_id, token.secret, "key")
    assert store.records()[0].uses_left == 1


def test_a_token_can_be_revoked_and_goes_after_its_end(path: Path) -> None:
    clock = Clock()
    store = JoinTokenStore(path, clock=clock)
    first, second = (store.create(CA, Role.WORKER, life=HOUR, uses=1) for _ in range(2))
    assert store.revoke(first.token_id)
    assert not store.revoke(first.token_id)
    with pytest.raises(JoinTokenUnusable, match="unknown"):
        store.redeem(first.token_id, first.secret, "key")
    clock.now += timedelta(days=8)
    third = store.create(CA, Role.WORKER, life=HOUR, uses=1)
    assert [record.token_id for record in store.records()] == [third.token_id]
    assert second.token_id != third.token_id


def test_limits_and_damaged_files_are_refused(path: Path) -> None:
    store = JoinTokenStore(path)
    for uses in (0, MAX_USES + 1):
        with pytest.raises(ValueError, match=f"{uses} uses are not in"):
            store.create(CA, Role.WORKER, life=HOUR, uses=uses)
    for role in set(Role) - {Role.WORKER}:
        with pytest.raises(ValueError, match=f"cannot give the role {role.value}"):
            store.create(CA, role, life=HOUR, uses=1)
    store.create(CA, Role.WORKER, life=HOUR, uses=1)
    path.chmod(0o640)
    with pytest.raises(UnusableTlsFiles, match="has mode 0640"):
        store.records()
    path.chmod(0o600)
    path.write_text('{"tokens": [{"id": 1}]}')
    with pytest.raises(UnusableTlsFiles, match="is not a file of join tokens, or damaged"):
        store.records()


# Requests for certificates


def test_a_request_has_name_hosts_and_key() -> None:
    key = new_key()
    request = parse_request(make_request("gpu-a", ["gpu-a.lan", "10.0.0.2", "gpu-a.lan"], key))
    assert (request.name, request.hosts) == ("gpu-a", ("gpu-a.lan", "10.0.0.2"))
    assert request.key == key.public_key()


def _csr(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, *names: str, uri: str | None = None) -> bytes:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names]
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name(attributes))
    if uri is not None:
        uris = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
        builder = builder.add_extension(uris, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def test_requests_that_are_refused() -> None:
    key = new_key()
    good = make_request("a", (), key)
    other = x509.load_pem_x509_csr(make_request("b", (), new_key())).public_bytes(Encoding.DER)
    der = bytearray(x509.load_pem_x509_csr(good).public_bytes(Encoding.DER))
    der[-8:] = other[-8:]
    try:
        forged = x509.load_der_x509_csr(bytes(der)).public_bytes(Encoding.PEM)
    except ValueError:
        forged = b"no request"
    cases = {
        b"": "not one in PEM form, or damaged",
        good[: len(good) // 2]: "not one in PEM form, or damaged",
        forged: "not signed with its key|damaged",
        _csr(rsa.generate_private_key(65537, 2048), "a"): "not one of the curve P-256",
        _csr(ec.generate_private_key(ec.SECP384R1()), "a"): "not one of the curve P-256",
        _csr(key): "0 names",
        _csr(key, "a", "b"): "2 names",
        _csr(key, "a", uri="spiffe://d/stageline/c/operator/a"): "neither DNS names nor IP addresses",
        make_request("a", [f"h{number}" for number in range(33)], key): "33 hosts, the limit is 32",
    }
    for pem, problem in cases.items():
        with pytest.raises(ValueError, match=problem):
            parse_request(pem)
