"""Finds the best layer counts for a row of stages. Knows layers, costs and limits, but no bytes.

All layers cost the same, which makes the exact answer cheap: for a bound on the slowest stage and a number of
blocks, each stage has a largest layer count, and a split exists exactly when the largest counts add up to the
model. Both bounds are monotone, so each is found by bisection; the most even split under them is found
greedily, which is exact because the sum of squared costs is separable and convex in the layer counts.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import permutations

from wire.ids import StageRole


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitProblem:
    """What to split; num_layers >= num_workers >= 1.

    `max_layers(worker, role, num_blocks)` is the most layers that the worker's memory holds. It may be
    negative or above num_layers, and must not grow with num_blocks.
    """

    num_workers: int
    num_layers: int
    layer_cost: int
    head_cost: int
    min_blocks: int
    max_blocks: int
    max_layers: Callable[[int, StageRole, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Stage i runs `layers[i]` layers on worker `order[i]`; `num_blocks` is the most that every stage
    holds."""

    order: tuple[int, ...]
    layers: tuple[int, ...]
    num_blocks: int


Ends = tuple[int, int]
"""The workers of the FIRST and of the LAST stage; the same one twice for ONLY."""


def best_split(problem: SplitProblem) -> Split | None:
    """The split whose slowest stage costs least, among those the one with the most blocks, among those the
    most even.

    Workers keep their order where any split fits in that order. Otherwise FIRST and LAST, which carry
    embeddings and head, may be any two workers and the others keep their order between them (which of them is
    where changes nothing); among the best such choices the one that leaves most of the given order wins. None
    when nothing fits.
    """
    last = problem.num_workers - 1
    found = _best_among(problem, [(0, last)])
    if found is None and last > 0:
        found = _best_among(problem, sorted(permutations(range(last + 1), 2), key=_displacement(last)))
    return found


def _displacement(last: int) -> Callable[[Ends], tuple[int, int]]:
    return lambda ends: ((ends[0] != 0) + (ends[1] != last), ends[0] + last - ends[1])


def _best_among(problem: SplitProblem, choices: list[Ends]) -> Split | None:
    slowest = _least_slowest(problem, choices)
    if slowest is None:
        return None
    num_blocks = _most_blocks(problem, choices, slowest)
    room = _Room(problem, slowest, num_blocks)
    ends = next(ends for ends in choices if room.holds_model(ends))
    order = stage_order(problem.num_workers, ends)
    return Split(order=order, layers=_most_even(problem, room.of_stages(order)), num_blocks=num_blocks)


def stage_order(num_workers: int, ends: Ends) -> tuple[int, ...]:
    """Workers by stage, for a choice of ends."""
    if num_workers == 1:
        return (0,)
    middle = (worker for worker in range(num_workers) if worker not in ends)
    return (ends[0], *middle, ends[1])


def _least_slowest(problem: SplitProblem, choices: list[Ends]) -> int | None:
    """The least cost of a slowest stage, of all costs that a stage can have."""
    counts = range(1, problem.num_layers + 1)
    costs = {n * problem.layer_cost for n in counts}
    bounds = sorted(costs | {cost + problem.head_cost for cost in costs})
    fits = bisect_left(
        bounds, True, key=lambda bound: _Room(problem, bound, problem.min_blocks).holds_any(choices)
    )
    return bounds[fits] if fits < len(bounds) else None


def _most_blocks(problem: SplitProblem, choices: list[Ends], slowest: int) -> int:
    """The most blocks with which that bound can still be met; min_blocks can."""
    candidates = range(problem.min_blocks, problem.max_blocks + 1)
    too_many = bisect_left(
        candidates, True, key=lambda blocks: not _Room(problem, slowest, blocks).holds_any(choices)
    )
    return candidates[too_many - 1]


class _Room:
    """The most layers that each worker may get in each role, under bounds on a stage's cost and on memory."""

    def __init__(self, problem: SplitProblem, slowest: int, num_blocks: int) -> None:
        self._problem = problem
        workers = range(problem.num_workers)
        self._by_role = {
            role: [_max_layers(problem, worker, role, slowest, num_blocks) for worker in workers]
            for role in ((StageRole.ONLY,) if problem.num_workers == 1 else _CHAIN)
        }
        middle = self._by_role.get(StageRole.MIDDLE, [])
        self._middle_sum = sum(middle)
        # three are as bad as more: only two of them can be ends
        self._useless = [worker for worker, layers in enumerate(middle) if layers < 1][:3]

    def holds_any(self, choices: Iterable[Ends]) -> bool:
        return any(self.holds_model(ends) for ends in choices)

    def holds_model(self, ends: Ends) -> bool:
        """Whether some split gives every stage at least one layer and covers the model."""
        needed = self._problem.num_layers
        if self._problem.num_workers == 1:
            return self._by_role[StageRole.ONLY][0] >= needed
        first, last = self._by_role[StageRole.FIRST][ends[0]], self._by_role[StageRole.LAST][ends[1]]
        if first < 1 or last < 1 or any(worker not in ends for worker in self._useless):
            return False
        middle = self._by_role[StageRole.MIDDLE]
        covered = self._middle_sum - middle[ends[0]] - middle[ends[1]] + first + last
        return covered >= needed

    def of_stages(self, order: tuple[int, ...]) -> list[int]:
        roles = (StageRole.of_stage(stage, len(order)) for stage in range(len(order)))
        return [self._by_role[role][worker] for role, worker in zip(roles, order, strict=True)]


_CHAIN = (StageRole.FIRST, StageRole.MIDDLE, StageRole.LAST)


def _max_layers(problem: SplitProblem, worker: int, role: StageRole, slowest: int, num_blocks: int) -> int:
    in_time = (slowest - (problem.head_cost if role.has_head else 0)) // problem.layer_cost
    return min(in_time, problem.max_layers(worker, role, num_blocks), problem.num_layers)


def _most_even(problem: SplitProblem, room: list[int]) -> tuple[int, ...]:
    """Layer counts within `room` with the least sum of squared costs; at a tie earlier stages get more."""
    layers = [1] * len(room)
    costs = [problem.layer_cost] * len(room)
    costs[-1] += problem.head_cost
    growing = [(cost, stage) for stage, cost in enumerate(costs) if room[stage] > 1]
    heapq.heapify(growing)
    for _ in range(problem.num_layers - len(room)):
        cost, stage = heapq.heappop(growing)
        layers[stage] += 1
        if layers[stage] < room[stage]:
            heapq.heappush(growing, (cost + problem.layer_cost, stage))
    return tuple(layers)
