"""Secrets of callers and peers; every wrong one is counted, and logged up to a limit per host."""

import hmac
import logging
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from math import ceil

from certificates.identity import Identity, Role
from wire.addresses import counted_host
from wire.audit import NO_AUDIT, Action, AuditLog, AuditOutcome, Who
from wire.errors import AccessDenied, Overloaded, SecretMismatch, StaleStream

log = logging.getLogger(__name__)


MAX_TRIES = 10
WINDOW_S = 60.0
MAX_PEERS = 256


class RefusedTries:
    """Times of recent rejected attempts by peer host; the oldest host is evicted first.

    Only wrong secrets count and a correct one always passes, so an attacker cannot lock out its own host.
    """

    def __init__(self) -> None:
        self._refused: OrderedDict[str, deque[float]] = OrderedDict()

    def note(self, host: str, now_s: float) -> int:
        """Record a rejected attempt; return the number within the window, at most MAX_TRIES + 1."""
        host = counted_host(host)
        times = self._refused.setdefault(host, deque(maxlen=MAX_TRIES + 1))
        self._refused.move_to_end(host)
        times.append(now_s)
        while len(self._refused) > MAX_PEERS:
            self._refused.popitem(last=False)
        return sum(now_s - time_s < WINDOW_S for time_s in times)

    def wait_s(self, host: str, now_s: float) -> float:
        """Time until fewer than MAX_TRIES attempts are within the window; 0 if it is so."""
        times = self._refused.get(counted_host(host), ())
        recent = [time_s for time_s in times if now_s - time_s < WINDOW_S]
        return WINDOW_S - (now_s - recent[-MAX_TRIES]) if len(recent) >= MAX_TRIES else 0.0


SECRET_BYTES = 32
PAST_EPOCHS = 16
"""Number of past epochs whose secrets are kept, so that a late stream is rejected as stale."""


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def is_secret(presented: bytes, expected: bytes) -> bool:
    """Compare in constant time. False while no secret is expected."""
    return hmac.compare_digest(presented, expected) and len(expected) == SECRET_BYTES


class RefusedPeers:
    """Counts rejected attempts by peer host and logs the first MAX_TRIES per minute.

    Attempts themselves are limited by `check_tries` only: above MAX_TRIES they are counted and rejected
    without a log line.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        on_refused: Callable[[], None] = lambda: None,
        audit: AuditLog = NO_AUDIT,
    ) -> None:
        """`on_refused` is called for each attempt, logged or not; `audit` gets those that are logged."""
        self._clock = clock
        self._on_refused = on_refused
        self.audit = audit
        self._tries = RefusedTries()

    def check_tries(self, host: str) -> None:
        """Raises Overloaded, and counts, after MAX_TRIES rejected attempts of a host within WINDOW_S."""
        if (wait_s := self._tries.wait_s(host, self._clock())) > 0:
            self._on_refused()
            raise Overloaded(
                f"{MAX_TRIES} attempts of this host were refused within {WINDOW_S:g} s, the limit: retry in "
                f"{ceil(wait_s)} s",
                retry_after_s=wait_s,
            )

    def note(
        self, call: str, problem: str, *, host: str, who: Who | None = None, action: Action = Action.DENIAL
    ) -> bool:
        """Count and log a rejected `call`; return False, without logging, above MAX_TRIES."""
        self._on_refused()
        if (num_tries := self._tries.note(host, self._clock())) > MAX_TRIES:
            return False
        log.warning("refused %s: %s, host=%s tries=%d", call, problem, host, num_tries)
        self.audit.record(
            action,
            AuditOutcome.REFUSED,
            who=who or f"host {host}",
            host=host,
            call=call,
            problem=problem,
            tries=num_tries,
        )
        return True

    def secret_mismatch(self, call: str, what: str, *, host: str) -> SecretMismatch:
        """Count a wrong secret and return the error, which names `what` and neither value."""
        problem = f"{what} does not match"
        if not self.note(call, problem, host=host):
            return SecretMismatch(f"{problem}; {MAX_TRIES} earlier attempts from this host failed too")
        return SecretMismatch(problem)


class HopSecrets:
    """Checks secret and sender of incoming streams against the current and recent epochs."""

    def __init__(self, refused: RefusedPeers) -> None:
        self._refused = refused
        self._current = b""
        self._sender: tuple[Role, str] | None = None
        self._past: deque[bytes] = deque(maxlen=PAST_EPOCHS)

    def begin_epoch(self, secret: bytes, sender: tuple[Role, str]) -> None:
        """Expect `secret` from the stream of the new epoch, and `sender` as the holder of its certificate.

        An empty name is any process of the role.
        """
        self._past.append(self._current)
        self._current, self._sender = secret, sender

    def check(self, presented: bytes, *, host: str, caller: Identity | None = None) -> None:
        """Check a stream of `caller`; None in plain text.

        Raises StaleStream for a recent epoch's secret, AccessDenied for another process than the sender,
        SecretMismatch for a wrong secret.
        """
        is_sender = caller is None or self._is_sender(caller)
        if is_secret(presented, self._current) and is_sender:
            return
        if sum(is_secret(presented, past) for past in self._past):
            raise StaleStream("the stream belongs to an earlier epoch")
        if not is_sender:
            expected = "nobody" if self._sender is None else f"{self._sender[0].value} {self._sender[1]}"
            problem = f"{caller} may not send here: the epoch names {expected.strip()}"
            self._refused.note("a stream", problem, host=host, who=caller)
            raise AccessDenied(problem)
        raise self._refused.secret_mismatch("a stream", "hop secret", host=host)

    def _is_sender(self, caller: Identity) -> bool:
        return self._sender is not None and self._sender in ((caller.role, caller.name), (caller.role, ""))
