"""Secrets between the processes of a cluster."""

import pytest

from certificates.identity import Role
from wire.errors import SecretMismatch, StaleStream
from wire.peer_secrets import (
    MAX_PEERS,
    MAX_TRIES,
    WINDOW_S,
    HopSecrets,
    RefusedPeers,
    RefusedTries,
    is_secret,
    new_secret,
)


def test_the_right_secret_passes_and_new_secrets_differ() -> None:
    secret = new_secret()
    assert is_secret(secret, secret)
    assert len(secret) == 32 and new_secret() != secret


@pytest.mark.parametrize("presented", [b"", b"x" * 31, b"x" * 33, b"y" * 32])
def test_a_wrong_secret_is_rejected_without_revealing_the_right_one(presented: bytes) -> None:
    assert not is_secret(presented, b"x" * 32)
    refused = RefusedPeers(lambda: 0.0)
    error = refused.secret_mismatch("a stream", "hop secret", host="10.0.0.9")
    assert str(error) == "hop secret does not match"


def test_an_empty_secret_passes_nothing() -> None:
    assert not is_secret(b"", b"")


def test_refusals_of_every_kind_share_one_count_per_host(caplog: pytest.LogCaptureFixture) -> None:
    refused = RefusedPeers(lambda: 0.0)
    secrets = HopSecrets(refused)
    secrets.begin_epoch(b"x" * 32, (Role.WORKER, "w0"))
    for _ in range(MAX_TRIES - 1):
        with pytest.raises(SecretMismatch, match=r"hop secret does not match$"):
            secrets.check(b"y" * 32, host="10.0.0.9")
    assert refused.note("a stream", "too many", host="10.0.0.9")
    assert caplog.messages[-1] == f"refused a stream: too many, host=10.0.0.9 tries={MAX_TRIES}"
    error = refused.secret_mismatch("ComputeReference", "reference secret", host="10.0.0.9")
    assert (
        str(error)
        == f"reference secret does not match; {MAX_TRIES} earlier attempts from this host failed too"
    )
    assert len(caplog.messages) == MAX_TRIES
    assert refused.note("a stream", "too many", host="10.0.0.8")


def test_every_refusal_is_counted_logged_or_not() -> None:
    counted: list[None] = []
    refused = RefusedPeers(lambda: 0.0, lambda: counted.append(None))
    logged = [refused.note("a stream", "wrong", host="10.0.0.9") for _ in range(MAX_TRIES + 5)]
    assert (logged.count(True), len(counted)) == (MAX_TRIES, MAX_TRIES + 5)


def test_the_secret_of_a_past_epoch_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    secrets = HopSecrets(RefusedPeers(lambda: 0.0))
    secrets.begin_epoch(b"x" * 32, (Role.WORKER, "w0"))
    secrets.begin_epoch(b"y" * 32, (Role.WORKER, "w0"))
    secrets.check(b"y" * 32, host="10.0.0.9")
    with pytest.raises(StaleStream):
        secrets.check(b"x" * 32, host="10.0.0.9")
    assert caplog.messages == []


def test_attempts_are_counted_per_host_and_expire_after_a_minute() -> None:
    tries = RefusedTries()
    assert [tries.note("a", float(second)) for second in range(MAX_TRIES + 5)][-1] == MAX_TRIES + 1
    assert tries.note("b", 3.0) == 1
    assert tries.note("a", MAX_TRIES + 5 + WINDOW_S) == 1


def test_the_table_of_hosts_is_bounded() -> None:
    tries = RefusedTries()
    for number in range(10 * MAX_PEERS):
        tries.note(f"host-{number}", 0.0)
    assert len(tries._refused) == MAX_PEERS


def test_addresses_of_one_ipv6_network_share_their_tries() -> None:
    tries = RefusedTries()
    for number in range(MAX_TRIES):
        tries.note(f"2001:db8::{number:x}", 0.0)
    assert tries.wait_s("2001:db8::ffff", 0.0) == WINDOW_S
    assert tries.wait_s("2001:db8:0:1::1", 0.0) == 0.0
