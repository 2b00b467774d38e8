"""Secrets by which processes of one cluster know each other: made by the coordinator, never shown."""

import hmac
import secrets

from wire.errors import SecretMismatch

SECRET_BYTES = 32


def new_secret() -> bytes:
    """Unguessable bytes."""
    return secrets.token_bytes(SECRET_BYTES)


def check_secret(presented: bytes, expected: bytes, *, what: str) -> None:
    """Raises SecretMismatch, which names `what` and neither value. Nothing passes while none is expected."""
    is_equal = hmac.compare_digest(presented, expected)
    if not is_equal or len(expected) != SECRET_BYTES:
        raise SecretMismatch(f"{what} does not match")
