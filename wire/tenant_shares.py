"""What tenants share: a cache and a number of places, of which each tenant has its part."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


def has_room(num_of: Mapping[str, int], tenant: str, count: int, *, limit: int) -> bool:
    """Whether `count` more of a tenant fit into `limit` places.

    Where others have filled the places, a tenant still gets an equal part of them, and at least one place. So
    no tenant can keep others out, and the total of n tenants may exceed `limit`: it is at most the sum of
    max(1, limit // k) for k from 1 to n.
    """
    if sum(num_of.values()) + count <= limit:
        return True
    owners = {owner for owner, number in num_of.items() if number} | {tenant}
    return num_of.get(tenant, 0) + count <= max(1, limit // len(owners))


class TenantCache(Generic[_Key, _Value]):
    """Least recently used entries of each tenant. The tenant that has the most makes room.

    Not thread-safe.
    """

    def __init__(self, *, max_entries: int | None = None, max_bytes: int) -> None:
        """Limits of all tenants together."""
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._entries: dict[str, OrderedDict[_Key, tuple[_Value, int]]] = {}
        self._num_entries = Counter[str]()
        self._num_bytes = Counter[str]()

    def __len__(self) -> int:
        return self._num_entries.total()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes.total()

    def get(self, tenant: str, key: _Key) -> _Value | None:
        """Return an entry, as the last one used; None for one that there is not."""
        if (entries := self._entries.get(tenant)) is None or key not in entries:
            return None
        entries.move_to_end(key)
        return entries[key][0]

    def add(self, tenant: str, key: _Key, value: _Value, *, num_bytes: int) -> list[_Value]:
        """Add or replace an entry; return those that made room for it, which may include it."""
        self.remove(tenant, key)
        self._entries.setdefault(tenant, OrderedDict())[key] = value, num_bytes
        self._num_entries[tenant] += 1
        self._num_bytes[tenant] += num_bytes
        removed: list[_Value] = []
        while (most := self._over_limit()) is not None:
            oldest = next(iter(self._entries[most]))
            removed.append(self._entries[most][oldest][0])
            self.remove(most, oldest)
        return removed

    def remove(self, tenant: str, key: _Key) -> None:
        """No effect for an entry that there is not."""
        entries = self._entries.get(tenant, OrderedDict())
        if (entry := entries.pop(key, None)) is None:
            return
        self._num_entries[tenant] -= 1
        self._num_bytes[tenant] -= entry[1]
        if not entries:
            del self._entries[tenant], self._num_entries[tenant], self._num_bytes[tenant]

    def _over_limit(self) -> str | None:
        """The tenant that has the most of what exceeds its limit."""
        if self._max_entries is not None and self._num_entries.total() > self._max_entries:
            return max(self._num_entries, key=self._num_entries.__getitem__)
        if self._num_bytes.total() > self._max_bytes:
            return max(self._num_bytes, key=self._num_bytes.__getitem__)
        return None
