"""Orders workers so that a step passes the links between them in the shortest time. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise
from statistics import median

from checkpoint.dtypes import ScaledDType
from coordinator.planner.plan import Plan
from wire.tensors import WireDType, payload_bytes, wire_dtype_name

COORDINATOR = ""
"""Name of the coordinator in links; workers have other names."""
MIN_GAIN, MIN_GAIN_S = 0.1, 0.002
"""Share of the time on links, and time, that another order must save: measurements vary."""
MIN_SAVING_S = 0.02
"""Time of a step on a link that is worth another wire dtype."""
MAX_EXACT = 10
"""Workers up to which every order is considered; above, only those that moves of one worker reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way between two processes: round trip in seconds, and bytes per second (0: not measured)."""

    round_trip_s: float
    bytes_per_s: float = 0.0

    def transfer_s(self, num_bytes: int) -> float:
        """Time of a message of this size, one way."""
        return self.round_trip_s / 2 + (num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)


class Links:
    """Measured links between processes, in both directions alike."""

    def __init__(self, links: Mapping[tuple[str, str], Link]) -> None:
        self._links = links

    def __bool__(self) -> bool:
        return bool(self._links)

    def between(self, one: str, other: str) -> Link | None:
        """The link, as either end measured it."""
        return self._links.get((one, other)) or self._links.get((other, one))

    @cached_property
    def typical(self) -> Link:
        """Stands for links that were not measured, from links between hosts.

        Raises ValueError without such a link.
        """
        links = [link for link in self._links.values() if link is not SAME_HOST]
        rates = [link.bytes_per_s for link in links if link.bytes_per_s]
        return Link(
            round_trip_s=median(link.round_trip_s for link in links),
            bytes_per_s=median(rates) if rates else 0.0,
        )

    def step_s(self, order: Sequence[str], num_bytes: int) -> float:
        """Time that a step of hidden states of `num_bytes` spends on links, from the coordinator and back.

        Tokens and results, on the first and the last link, are small.
        """
        ends = (COORDINATOR, order[0]), (order[-1], COORDINATOR)
        hops = sum(self.hop_s(one, other, num_bytes) for one, other in pairwise(order))
        return hops + sum(self.hop_s(one, other, 0) for one, other in ends)

    def hop_s(self, one: str, other: str, num_bytes: int) -> float:
        """Time of a message between two processes."""
        return (self.between(one, other) or self.typical).transfer_s(num_bytes)


SAME_HOST = Link(round_trip_s=0.0)


class LinkTable:
    """Measurements by worker."""

    def __init__(self) -> None:
        self._measured: dict[tuple[str, str], Link] = {}

    def put(self, worker: str, links: Mapping[str, Link]) -> None:
        """Store the links of a worker to others, by their names; a rate stays until it is measured again."""
        for other, link in links.items():
            known = self.find(worker, other)
            rate = link.bytes_per_s or (known.bytes_per_s if known else 0.0)
            self._measured.pop((other, worker), None)
            self._measured[worker, other] = replace(link, bytes_per_s=rate)

    def find(self, one: str, other: str) -> Link | None:
        """The link between two workers, as either measured it."""
        return self._measured.get((one, other)) or self._measured.get((other, one))

    def between(self, hosts: Mapping[str, Set[str]]) -> Links:
        """Links between workers with these names of their hosts, and from the coordinator to them.

        Nothing was measured within a host.
        """
        found: dict[tuple[str, str], Link] = {}
        for one, other in combinations(hosts, 2):
            link = SAME_HOST if hosts[one] & hosts[other] else self.find(one, other)
            if link is not None:
                found[one, other] = link
        for name in hosts:
            if (way := self.find(COORDINATOR, name)) is not None:
                found[COORDINATOR, name] = way
        return Links(found if any(link is not SAME_HOST for link in found.values()) else {})


def hops_of(plan: Plan) -> list[tuple[str, str]]:
    """Both ends of each hop of a step; the way back from a single stage is the way to it."""
    workers = [stage.worker for stage in plan.stages]
    back = [COORDINATOR] if len(workers) > 1 else []
    return [*pairwise([COORDINATOR, *workers, *back])]


def wire_dtype_advice(link: Link, num_tokens: int, width: int, used: WireDType) -> str:
    """Say how much sooner hidden states [num_tokens, width] would pass in int8; empty for less than 20 ms."""
    if not link.bytes_per_s:
        return ""
    now_s, then_s = (
        payload_bytes(dtype, (num_tokens, width)) / link.bytes_per_s for dtype in (used, ScaledDType.I8)
    )
    if now_s - then_s < MIN_SAVING_S:
        return ""
    return (
        f"a step of {num_tokens} tokens takes {now_s * 1e3:.0f} ms, {then_s * 1e3:.0f} ms with "
        f"--wire-dtype {wire_dtype_name(ScaledDType.I8)}"
    )


def best_order(workers: Sequence[str], links: Links, num_bytes: int) -> list[str]:
    """The order with the shortest step, or `workers` as they are if none is better by MIN_GAIN."""
    if len(workers) < 2 or not links:
        return list(workers)
    search = _exact if len(workers) <= MAX_EXACT else _moved
    found = search(workers, links, num_bytes)
    before, after = links.step_s(workers, num_bytes), links.step_s(found, num_bytes)
    return found if before - after >= max(before * MIN_GAIN, MIN_GAIN_S) else list(workers)


def _exact(workers: Sequence[str], links: Links, num_bytes: int) -> list[str]:
    """Dynamic programming over sets of workers and their last one (Held and Karp, 1962)."""
    best = {(frozenset({name}), name): (links.hop_s(COORDINATOR, name, 0), [name]) for name in workers}
    for _ in range(len(workers) - 1):
        longer: dict[tuple[frozenset[str], str], tuple[float, list[str]]] = {}
        for (used, last), (time_s, order) in best.items():
            for name in workers:
                if name not in used:
                    key = (used | {name}, name)
                    new_s = time_s + links.hop_s(last, name, num_bytes)
                    if key not in longer or new_s < longer[key][0]:
                        longer[key] = (new_s, [*order, name])
        best = longer
    return min((order for _, order in best.values()), key=lambda order: links.step_s(order, num_bytes))


def _moved(workers: Sequence[str], links: Links, num_bytes: int) -> list[str]:
    """Move one worker at a time while the step gets shorter."""
    order = list(workers)
    while True:
        better = min(_moves(order), key=lambda moved: links.step_s(moved, num_bytes))
        if links.step_s(better, num_bytes) >= links.step_s(order, num_bytes):
            return order
        order = better


def _moves(order: list[str]) -> Iterator[list[str]]:
    for begin in range(len(order)):
        rest = order[:begin] + order[begin + 1 :]
        for end in range(len(order)):
            if end != begin:
                yield [*rest[:end], order[begin], *rest[end:]]
