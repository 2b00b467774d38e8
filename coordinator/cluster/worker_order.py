"""The order of workers by the measured links between them, and which workers still measure theirs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from coordinator.cluster.membership import WorkerIdentity
from coordinator.planner.links import Link, LinkTable, best_order
from coordinator.recovery.rejoin import LinksOverdue, StartTimer
from wire.ids import Incarnation

LINKS_WAIT_S = 10.0
"""From a worker's join; an unreachable peer takes half of it."""


class WorkerOrder:
    """Owner of the measured links."""

    def __init__(self, hop_bytes: int = 0, *, by_links: bool = True) -> None:
        """`hop_bytes` are the hidden states of a step. Without `by_links`, workers are ordered by name."""
        self._hop_bytes, self._by_links = hop_bytes, by_links
        self.links = LinkTable()
        self._measuring: dict[str, Incarnation] = {}

    def of(self, names: Sequence[str], hosts: Mapping[str, Set[str]]) -> list[str]:
        """The order of these workers with the shortest steps; `hosts` are as in `WorkerIdentity`."""
        if not self._by_links:
            return list(names)
        return best_order(names, self.links.between(hosts), self._hop_bytes)

    def joined(self, identity: WorkerIdentity, present: Iterable[WorkerIdentity]) -> list[StartTimer]:
        """A worker begins to measure the ways to those that are present, if any is on another host."""
        is_apart = any(not identity.hosts & other.hosts for other in present)
        if not self._by_links or not is_apart:
            return []
        self._measuring[identity.name] = identity.incarnation
        return [StartTimer(LINKS_WAIT_S, LinksOverdue(identity.name, identity.incarnation))]

    def measured(self, name: str, links: Mapping[str, Link]) -> bool:
        """Store the links of a worker; False unless it was awaited."""
        self.links.put(name, links)
        return self._measuring.pop(name, None) is not None

    def overdue(self, name: str, incarnation: Incarnation) -> bool:
        """A worker had long enough; False unless this process of it was awaited."""
        is_awaited = self._measuring.get(name) == incarnation
        if is_awaited:
            del self._measuring[name]
        return is_awaited

    def lost(self, name: str) -> None:
        """A lost worker measures nothing."""
        self._measuring.pop(name, None)

    @property
    def awaited(self) -> str:
        """Names of the workers that measure their links; empty if there are none."""
        return ", ".join(sorted(self._measuring))
