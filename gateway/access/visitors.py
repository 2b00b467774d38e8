"""Who makes a request of a gateway, and what the key permits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from gateway.upstream.contract import RequestOwner
from web.api_keys import PRIORITIES, VIEWER, ApiKey, KeyRefused, KeysFile

REQUESTS, TOKENS = "requests", "tokens"


class NotAdmitted(Exception):
    """A request without a key that permits it."""


class NoKey(NotAdmitted):
    """There is no key, or none that is known and in force."""


class NotPermitted(NotAdmitted):
    """The key does not permit this; `field` is the field that asks for it."""

    def __init__(self, text: str, *, field: str) -> None:
        super().__init__(text)
        self.field = field


class TooMany(NotAdmitted):
    """The key has used up its requests or tokens of this minute."""

    def __init__(self, text: str, *, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


CountTokens = Callable[[str, str, int], None]
"""Called with the key's id, `prompt` or `completion`, and a number of tokens."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """Caller of a request; without a `key`, anyone at a `host`, whom nothing limits."""

    key: ApiKey | None = None
    spend: Callable[[str, int], None] = lambda kind, num_tokens: None
    """Counts tokens of a kind, `prompt` or `completion`."""
    host: str = ""

    @property
    def tenant(self) -> str:
        return "" if self.key is None else self.key.tenant

    @property
    def share(self) -> str:
        """Owner of a part of what visitors share: the tenant, or the host of a visitor without one."""
        return f"tenant {self.tenant}" if self.tenant else f"host {self.host}"

    @property
    def owner(self) -> RequestOwner:
        """Of the visitor's requests to the coordinator."""
        if self.key is None:
            return RequestOwner(client=self.host)
        return RequestOwner(
            tenant=self.key.tenant,
            max_sequences=self.key.max_concurrent or 0,
            spend=lambda num_tokens: self.spend("completion", num_tokens),
        )

    def may_use(self, model: str) -> bool:
        return self.key is None or not self.key.models or model in self.key.models

    def check_model(self, model: str) -> None:
        """Raises NotPermitted."""
        if not self.may_use(model):
            raise NotPermitted(f"this API key is not for model {model!r}", field="model")

    def check_watcher(self, what: str) -> None:
        """Raises NotPermitted."""
        if self.key is not None and not self.key.may_watch:
            raise NotPermitted(
                f"{what} tells of all tenants: it needs a key of role viewer or operator", field=""
            )

    def check_requests(self) -> None:
        """Raises NotPermitted."""
        if self.key is not None and self.key.role == VIEWER:
            raise NotPermitted("a key of role viewer makes no requests", field="")

    def check_priority(self, priority: str) -> None:
        """Raises NotPermitted."""
        if self.key is not None and PRIORITIES.index(priority) > PRIORITIES.index(self.key.max_priority):
            raise NotPermitted(
                f"this API key is for priority {self.key.max_priority} at most", field="priority"
            )


ANYONE = Visitor()


@dataclass(slots=True)
class _Window:
    ends_s: float
    used: int = 0


class MinuteWindows:
    """Amounts that keys have used, each in a minute that begins with its first use."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` must not jump: a key would have no limit, or wait for longer than a minute."""
        self._clock = clock
        self._windows: dict[tuple[str, str], _Window] = {}

    def add(self, kind: str, key_id: str, amount: int) -> int:
        """Add to a key's current minute; return what it has used."""
        window = self._current(kind, key_id)
        window.used += amount
        return window.used

    def used(self, kind: str, key_id: str) -> int:
        return self._current(kind, key_id).used

    def left_s(self, kind: str, key_id: str) -> float:
        """Rest of the key's current minute."""
        return self._current(kind, key_id).ends_s - self._clock()

    def _current(self, kind: str, key_id: str) -> _Window:
        now_s, window = self._clock(), self._windows.get((kind, key_id))
        if window is None or window.ends_s <= now_s:
            window = self._windows[kind, key_id] = _Window(now_s + 60.0)
        return window


class Doorkeeper:
    """Admits requests with a key of a file."""

    def __init__(
        self, keys: KeysFile, count: CountTokens, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keys, self._count = keys, count
        self._rates = MinuteWindows(clock)

    def admit(self, text: str, *, counts: bool = True) -> Visitor:
        """Admit the holder of a key; a request that `counts` only within its limits.

        Raises NoKey and TooMany.
        """
        try:
            key = self._keys.find(text)
        except KeyRefused as error:
            raise NoKey(str(error)) from None
        if counts:
            self._check_tokens(key)
            self._take_request(key)
        return Visitor(key, lambda kind, num_tokens: self._spend(key, kind, num_tokens))

    def _take_request(self, key: ApiKey) -> None:
        if (limit := key.requests_per_minute) is None:
            return
        if self._rates.add(REQUESTS, key.id, 1) > limit:
            raise self._too_many(key, limit, REQUESTS)

    def _check_tokens(self, key: ApiKey) -> None:
        """A request's tokens are known as they are generated: it begins while any are left."""
        if (limit := key.tokens_per_minute) is None:
            return
        if self._rates.used(TOKENS, key.id) >= limit:
            raise self._too_many(key, limit, TOKENS)

    def _too_many(self, key: ApiKey, limit: int, what: str) -> TooMany:
        retry_after_s = max(1, math.ceil(self._rates.left_s(what, key.id)))
        return TooMany(
            f"this API key may use {limit} {what} per minute; retry in {retry_after_s} s",
            retry_after_s=retry_after_s,
        )

    def _spend(self, key: ApiKey, kind: str, num_tokens: int) -> None:
        self._count(key.id, kind, num_tokens)
        if key.tokens_per_minute is not None and num_tokens:
            self._rates.add(TOKENS, key.id, num_tokens)
