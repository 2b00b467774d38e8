"""The secret that attaching to a request takes: only its digest is kept."""

import hashlib
import hmac
import re
import secrets

from wire.errors import AttachSecretMismatch, InvalidRequest

_GIVEN = re.compile(r"[\x21-\x7e]{32,128}")


def new_attach_secret() -> str:
    """43 characters of base64url, for a request whose client brings none."""
    return secrets.token_urlsafe(32)


def digest_of(secret: str) -> bytes:
    """What is kept of a secret. Raises InvalidRequest for one that is too short to be one."""
    if not _GIVEN.fullmatch(secret):
        raise InvalidRequest(
            f"the attach secret has {len(secret)} characters, must be 32 to 128 of printable ASCII"
        )
    return hashlib.sha256(secret.encode()).digest()


def check_attach_secret(given: str, digest: bytes) -> None:
    """Raises AttachSecretMismatch unless `digest` is that of `given`; for an empty one nothing passes."""
    is_it = hmac.compare_digest(hashlib.sha256(given.encode()).digest(), digest)
    if not is_it:
        raise AttachSecretMismatch("the attach secret of the request is missing or wrong")
