"""Secrets between processes of one cluster; failed attempts are bounded and counted."""

import hmac
import logging
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable

from wire.errors import SecretMismatch, StaleStream

log = logging.getLogger(__name__)


MAX_TRIES = 10
WINDOW_S = 60.0
MAX_PEERS = 256


class RefusedTries:
    """Times of the last refusals, by host of the peer; the host refused longest ago is forgotten first.

    Only wrong secrets count, and a right one always passes: an attacker locks out nobody on its own host.
    """

    def __init__(self) -> None:
        self._refused: OrderedDict[str, deque[float]] = OrderedDict()

    def note(self, host: str, now_s: float) -> int:
        """One more refusal; how many there are within the window, up to MAX_TRIES + 1."""
        times = self._refused.setdefault(host, deque(maxlen=MAX_TRIES + 1))
        self._refused.move_to_end(host)
        times.append(now_s)
        while len(self._refused) > MAX_PEERS:
            self._refused.popitem(last=False)
        return sum(now_s - each < WINDOW_S for each in times)


SECRET_BYTES = 32
PAST_EPOCHS = 16
"""Epochs whose secrets are remembered: a late stream of the cluster is told that its epoch is over."""


def new_secret() -> bytes:
    """Unguessable bytes."""
    return secrets.token_bytes(SECRET_BYTES)


def is_secret(presented: bytes, expected: bytes) -> bool:
    """Whether both are equal, compared in constant time. False while none is expected."""
    return hmac.compare_digest(presented, expected) and len(expected) == SECRET_BYTES


class RefusedPeers:
    """Counts refused tries by host of the peer, and logs the first MAX_TRIES of a minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tries = RefusedTries()

    def note(self, call: str, problem: str, *, host: str) -> bool:
        """Counts a refused `call`. False, and nothing is logged, once `host` has had its tries."""
        if (num_tries := self._tries.note(host, self._clock())) > MAX_TRIES:
            return False
        log.warning("refused %s: %s, host=%s tries=%d", call, problem, host, num_tries)
        return True

    def secret_mismatch(self, call: str, what: str, *, host: str) -> SecretMismatch:
        """The error for a `call` with a wrong secret, which is counted; it names `what` and neither value."""
        problem = f"{what} does not match"
        if not self.note(call, problem, host=host):
            return SecretMismatch(f"{problem}, like {MAX_TRIES} others of your host just now")
        return SecretMismatch(problem)


class HopSecrets:
    """The receiving end of a hop: the secret of the present epoch, and those of the last ones before."""

    def __init__(self, refused: RefusedPeers) -> None:
        self._refused = refused
        self._present = b""
        self._past: deque[bytes] = deque(maxlen=PAST_EPOCHS)

    def begin_epoch(self, secret: bytes) -> None:
        """`secret` is the one that the stream of the new epoch presents."""
        self._past.append(self._present)
        self._present = secret

    def check(self, presented: bytes, *, host: str) -> None:
        """Raises StaleStream for the secret of an epoch that is over, else SecretMismatch for a wrong one.

        `host` is the peer's.
        """
        if is_secret(presented, self._present):
            return
        if sum(is_secret(presented, past) for past in self._past):
            raise StaleStream("the stream is of an epoch that is over")
        raise self._refused.secret_mismatch("a stream", "hop secret", host=host)
