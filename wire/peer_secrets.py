"""Secrets by which processes of one cluster know each other: made by the coordinator, never shown."""

import hmac
import logging
import secrets
from collections import deque
from collections.abc import Callable

from wire.errors import SecretMismatch, StaleStream
from wire.refused_tries import MAX_TRIES, RefusedTries

log = logging.getLogger(__name__)

SECRET_BYTES = 32
PAST_EPOCHS = 16
"""Epochs whose secrets are remembered: a late stream of the cluster is told that its epoch is over."""


def new_secret() -> bytes:
    """Unguessable bytes."""
    return secrets.token_bytes(SECRET_BYTES)


def check_secret(presented: bytes, expected: bytes, *, what: str) -> None:
    """Raises SecretMismatch, which names `what` and neither value. Nothing passes while none is expected."""
    if not is_secret(presented, expected):
        raise SecretMismatch(f"{what} does not match")


def is_secret(presented: bytes, expected: bytes) -> bool:
    """Whether both are equal, compared in constant time. False while none is expected."""
    return hmac.compare_digest(presented, expected) and len(expected) == SECRET_BYTES


class HopSecrets:
    """The receiving end of a hop: the secret of the present epoch, and those of the last ones before."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._present = b""
        self._past: deque[bytes] = deque(maxlen=PAST_EPOCHS)
        self._tries = RefusedTries()

    def begin_epoch(self, secret: bytes) -> None:
        """`secret` is the one that the stream of the new epoch presents."""
        self._past.append(self._present)
        self._present = secret

    def check(self, presented: bytes, *, host: str) -> None:
        """Raises StaleStream for the secret of an epoch that is over, else SecretMismatch for a wrong one.

        `host` is the peer's: once it has had its tries of the last minute, nothing is logged of it.
        """
        if is_secret(presented, self._present):
            return
        if sum(is_secret(presented, past) for past in self._past):
            raise StaleStream("the stream is of an epoch that is over")
        if (num_tries := self._tries.note(host, self._clock())) > MAX_TRIES:
            raise SecretMismatch(f"hop secret does not match, like {MAX_TRIES} others of your host just now")
        log.warning("refused a stream: hop secret does not match, host=%s tries=%d", host, num_tries)
        raise SecretMismatch("hop secret does not match")
