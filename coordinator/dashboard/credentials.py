"""Users of the dashboard: API keys of role viewer or operator, and the operator token."""

from __future__ import annotations

import asyncio
import hmac

from starlette.exceptions import HTTPException

from coordinator.api.call_context import TOKEN_HOLDER
from coordinator.dashboard.sessions import User
from web.api_keys import OPERATOR, ApiKey, KeyRefused, KeysFile
from wire.audit import Action
from wire.peer_secrets import RefusedPeers

OPERATOR_TOKEN = User(TOKEN_HOLDER, is_operator=True)


class Credentials:
    """Checks keys and the token; wrong ones are counted and logged, and limited by host."""

    def __init__(self, keys: KeysFile | None, token: str | None, refused: RefusedPeers) -> None:
        self._keys, self._token, self._refused = keys, token, refused

    async def user_of(self, text: str, *, call: str, host: str, action: Action = Action.DENIAL) -> User:
        """Return the holder of a key or token. Raises Overloaded, and HTTPException for a wrong one.

        Above the limit of its host only right keys pass, whose 256 random bits nobody guesses.
        """
        try:
            key = await self._key_of(text)
        except KeyRefused as error:
            if text:
                self._refused.check_tries(host)
            if self.is_token(text):
                return OPERATOR_TOKEN
            if text:
                self._refused.note(call, str(error), host=host, action=action)
            raise unauthorized(str(error)) from None
        if not key.may_watch:
            problem = f"a key of role {key.role} opens no dashboard: it needs viewer or operator"
            self._refused.note(call, problem, host=host, who=key.holder, action=action)
            raise HTTPException(403, problem)
        return _user(key)

    async def current(self, user: User) -> User | None:
        """Return the user with what its key permits by now; None after the end of the key."""
        if user.key is None:
            return user
        keys = await self._refreshed()
        key = None if keys is None else keys.current(user.key)
        return None if key is None or not key.may_watch else _user(key)

    def is_token(self, text: str) -> bool:
        """Compare with the operator token in constant time."""
        return self._token is not None and hmac.compare_digest(
            text.encode("utf-8", "replace"), self._token.encode()
        )

    async def _key_of(self, text: str) -> ApiKey:
        """Raises KeyRefused."""
        if (keys := await self._refreshed()) is None:
            raise KeyRefused("the operator token is wrong")
        return keys.find(text)

    async def _refreshed(self) -> KeysFile | None:
        """Read a large file in a thread: the event loop serves the pipeline."""
        if self._keys is not None and self._keys.has_changed():
            await asyncio.to_thread(self._keys.refresh)
        return self._keys


def unauthorized(problem: str) -> HTTPException:
    return HTTPException(401, problem, {"WWW-Authenticate": "Bearer"})


def _user(key: ApiKey) -> User:
    return User(key.holder, is_operator=key.role == OPERATOR, key=key)
