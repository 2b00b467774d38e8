"""Sessions of browsers that logged in: random tokens, of which only digests are kept."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from web.api_keys import ApiKey

TOKEN_BYTES = 32
MAX_LIFE_S = 12 * 3600.0
MAX_IDLE_S = 3600.0
MAX_SESSIONS = 1024
MAX_USER_SESSIONS = 16


@dataclass(frozen=True, slots=True)
class User:
    """Who uses the dashboard; `key` is None for the operator token, and where no login is needed."""

    name: str
    is_operator: bool
    key: ApiKey | None = None


@dataclass(slots=True)
class _Session:
    user: User
    began_s: float
    used_s: float

    def has_ended(self, now_s: float) -> bool:
        return now_s - self.began_s >= MAX_LIFE_S or now_s - self.used_s >= MAX_IDLE_S


class Sessions:
    """Users by the token of their session; those that were used least recently make way for new ones."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, user: User) -> str:
        """Return the token of a new session, which is kept nowhere else."""
        self._make_room(user)
        token, now_s = secrets.token_urlsafe(TOKEN_BYTES), self._clock()
        self._sessions[_digest(token)] = _Session(user, now_s, now_s)
        return token

    def find(self, token: str) -> User | None:
        """The user of a session that has not ended."""
        digest, now_s = _digest(token), self._clock()
        session = self._sessions.get(digest)
        if session is None:
            return None
        if session.has_ended(now_s):
            del self._sessions[digest]
            return None
        session.used_s = now_s
        self._sessions.move_to_end(digest)
        return session.user

    def end(self, token: str) -> User | None:
        """End a session, if there is one, and return its user."""
        session = self._sessions.pop(_digest(token), None)
        return None if session is None else session.user

    def _make_room(self, user: User) -> None:
        own = [digest for digest, session in self._sessions.items() if session.user.name == user.name]
        if len(own) >= MAX_USER_SESSIONS:
            del self._sessions[own[0]]
        elif len(self._sessions) >= MAX_SESSIONS:
            self._sessions.popitem(last=False)


def _digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "replace")).digest()
