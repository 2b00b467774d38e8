"""Bytes of large bodies in memory, from their first byte until they are parsed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType

from gateway.api.errors import ApiError, unavailable

FREE_BYTES = 64 * 1024
"""Bytes of each body that are not counted; the number of connections limits them."""
BODIES_PER_OWNER = 4
BODIES = 16
SLOW_S = 10.0
"""A body that takes longer ends when another one needs its place."""


class BodyBudget:
    """Bytes of bodies beyond their first `FREE_BYTES`: a few bodies of the largest size for each owner.

    An owner is a tenant, or the host of a client without one.
    """

    def __init__(self, max_body_bytes: int, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._max_per_owner, self._max_bytes = BODIES_PER_OWNER * max_body_bytes, BODIES * max_body_bytes
        self._num_of_owner = Counter[str]()
        self._now_s = now_s
        self._large: dict[HeldBody, float] = {}
        """Bodies with counted bytes and when they began, the oldest first."""

    def body_of(self, owner: str) -> HeldBody:
        """A context that holds one body of an owner."""
        return HeldBody(self, owner, self._now_s())

    def take(self, body: HeldBody, num_bytes: int) -> None:
        """Count more bytes of `body`; slow bodies end if they occupy its place.

        Raises ApiError (503) for bytes beyond a limit, which are not counted.
        """
        owner, max_of_owner = body.owner, self._max_per_owner - num_bytes
        if self._num_of_owner[owner] > max_of_owner:
            self._end_slow(lambda other: other.owner == owner and self._num_of_owner[owner] > max_of_owner)
        if self._num_of_owner[owner] > max_of_owner:
            raise _exceeded(f"bodies of {owner}", self._max_per_owner)
        max_of_all = self._max_bytes - num_bytes
        if self._num_of_owner.total() > max_of_all:
            self._end_slow(lambda _: self._num_of_owner.total() > max_of_all)
        if self._num_of_owner.total() > max_of_all:
            raise _exceeded("bodies of all clients", self._max_bytes)
        self._num_of_owner[owner] += num_bytes
        if num_bytes:
            self._large.setdefault(body, body.began_s)

    def give_back(self, body: HeldBody, num_bytes: int) -> None:
        self._large.pop(body, None)
        self._num_of_owner[body.owner] -= num_bytes
        if not self._num_of_owner[body.owner]:
            del self._num_of_owner[body.owner]

    def _end_slow(self, is_in_the_way: Callable[[HeldBody], bool]) -> None:
        latest_s = self._now_s() - SLOW_S
        for other, began_s in list(self._large.items()):
            if began_s <= latest_s and is_in_the_way(other):
                other.end()


class HeldBody:
    """The bytes of one body, until the context ends. While it is read, `patience` ends its reader."""

    def __init__(self, budget: BodyBudget, owner: str, began_s: float) -> None:
        self.owner, self.began_s = owner, began_s
        self._budget = budget
        self._patience: asyncio.Timeout | None = None
        self._size = self._counted = 0

    def __enter__(self) -> HeldBody:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()

    def read_within(self, patience: asyncio.Timeout | None) -> None:
        """End the reader by this timeout if others need the place; None once the body is complete."""
        self._patience = patience

    def add(self, num_bytes: int) -> None:
        """Raises ApiError (503) for a body that does not fit beside the others."""
        self._size += num_bytes
        more = max(0, self._size - FREE_BYTES) - self._counted
        self._budget.take(self, more)
        self._counted += more

    def end(self) -> None:
        """End the reader, if there is one: a body that is complete is soon parsed."""
        if self._patience is not None:
            self._patience.reschedule(asyncio.get_running_loop().time())
            self._patience = None
            self._give_back()

    def _give_back(self) -> None:
        self._budget.give_back(self, self._counted)
        self._counted = 0


def slow_body() -> ApiError:
    """The error of a body that had to make room."""
    return unavailable(f"the body took longer than {SLOW_S:g} s, and others needed its place")


def _exceeded(what: str, limit: int) -> ApiError:
    return unavailable(f"{what} that are being read exceed {limit} bytes: send fewer at once")
