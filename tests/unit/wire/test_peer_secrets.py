"""Secrets between the processes of a cluster."""

import pytest

from wire.errors import SecretMismatch
from wire.peer_secrets import check_secret, new_secret


def test_the_secret_itself_passes_and_is_never_the_same() -> None:
    secret = new_secret()
    check_secret(secret, secret, what="secret")
    assert len(secret) == 32 and new_secret() != secret


@pytest.mark.parametrize("presented", [b"", b"x" * 31, b"x" * 33, b"y" * 32])
def test_anything_else_is_refused_without_telling_what_was_expected(presented: bytes) -> None:
    with pytest.raises(SecretMismatch) as caught:
        check_secret(presented, b"x" * 32, what="hop secret")
    assert str(caught.value) == "hop secret does not match"


def test_an_empty_secret_passes_nothing() -> None:
    with pytest.raises(SecretMismatch):
        check_secret(b"", b"", what="secret")
