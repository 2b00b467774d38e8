"""Secrets between the processes of a cluster."""

import pytest

from wire.errors import SecretMismatch, StaleStream
from wire.peer_secrets import HopSecrets, RefusedPeers, is_secret, new_secret
from wire.refused_tries import MAX_TRIES


def test_the_secret_itself_passes_and_is_never_the_same() -> None:
    secret = new_secret()
    assert is_secret(secret, secret)
    assert len(secret) == 32 and new_secret() != secret


@pytest.mark.parametrize("presented", [b"", b"x" * 31, b"x" * 33, b"y" * 32])
def test_anything_else_is_refused_without_telling_what_was_expected(presented: bytes) -> None:
    assert not is_secret(presented, b"x" * 32)
    refused = RefusedPeers(lambda: 0.0)
    error = refused.secret_mismatch("a stream", "hop secret", host="10.0.0.9")
    assert str(error) == "hop secret does not match"


def test_an_empty_secret_passes_nothing() -> None:
    assert not is_secret(b"", b"")


def test_refusals_of_every_kind_count_together_by_host(caplog: pytest.LogCaptureFixture) -> None:
    refused = RefusedPeers(lambda: 0.0)
    secrets = HopSecrets(refused)
    secrets.begin_epoch(b"x" * 32)
    for _ in range(MAX_TRIES - 1):
        with pytest.raises(SecretMismatch, match=r"hop secret does not match$"):
            secrets.check(b"y" * 32, host="10.0.0.9")
    assert refused.note("a stream", "too many", host="10.0.0.9")
    assert caplog.messages[-1] == f"refused a stream: too many, host=10.0.0.9 tries={MAX_TRIES}"
    error = refused.secret_mismatch("ComputeReference", "reference secret", host="10.0.0.9")
    assert str(error) == f"reference secret does not match, like {MAX_TRIES} others of your host just now"
    assert len(caplog.messages) == MAX_TRIES
    assert refused.note("a stream", "too many", host="10.0.0.8")


def test_the_secret_of_an_epoch_that_is_over_is_no_refused_try(caplog: pytest.LogCaptureFixture) -> None:
    secrets = HopSecrets(RefusedPeers(lambda: 0.0))
    secrets.begin_epoch(b"x" * 32)
    secrets.begin_epoch(b"y" * 32)
    secrets.check(b"y" * 32, host="10.0.0.9")
    with pytest.raises(StaleStream):
        secrets.check(b"x" * 32, host="10.0.0.9")
    assert caplog.messages == []
