"""Finds the best layer counts of a pipeline, in terms of layers, costs and limits.

All layers cost the same, so the exact solution is cheap. For a bound on the cost of the slowest stage and a
number of blocks, each stage has a maximum layer count, and a split exists if and only if these counts sum up
to at least the model. Both bounds are monotone and found by bisection. The most even split under them is
found greedily, which is exact because the sum of squared costs is separable and convex in the layer counts.
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
    """Input of `best_split`, with num_layers >= num_workers >= 1.

    `max_layers(worker, role, num_blocks)` is the maximum number of layers in the worker's memory. It may be
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
    """Stage i runs `layers[i]` layers on worker `order[i]`; every stage holds `num_blocks` KV blocks."""

    order: tuple[int, ...]
    layers: tuple[int, ...]
    num_blocks: int


Ends = tuple[int, int]
"""The workers of the FIRST and of the LAST stage; the same one twice for ONLY."""


def best_split(problem: SplitProblem) -> Split | None:
    """The split with the least cost of the slowest stage, then the most blocks, then the most even one.

    Workers keep their order if any split fits. Otherwise any two workers may be FIRST and LAST, which have
    the embeddings and the head, and the others keep their order in between; of equally good choices, the one
    closest to the given order wins. None if no split fits.
    """
    last = problem.num_workers - 1
    found = _best_of_ends(problem, [(0, last)])
    if found is None and last > 0:
        found = _best_of_ends(problem, sorted(permutations(range(last + 1), 2), key=_displacement(last)))
    return found


def _displacement(last: int) -> Callable[[Ends], tuple[int, int]]:
    return lambda ends: ((ends[0] != 0) + (ends[1] != last), ends[0] + last - ends[1])


def _best_of_ends(problem: SplitProblem, choices: list[Ends]) -> Split | None:
    slowest = _min_bottleneck_cost(problem, choices)
    if slowest is None:
        return None
    num_blocks = _max_blocks(problem, choices, slowest)
    limits = _LayerLimits(problem, slowest, num_blocks)
    ends = next(ends for ends in choices if limits.holds_model(ends))
    order = stage_order(problem.num_workers, ends)
    return Split(
        order=order, layers=_most_even_split(problem, limits.of_stages(order)), num_blocks=num_blocks
    )


def stage_order(num_workers: int, ends: Ends) -> tuple[int, ...]:
    """Workers in stage order, for a choice of ends."""
    if num_workers == 1:
        return (0,)
    middle = (worker for worker in range(num_workers) if worker not in ends)
    return (ends[0], *middle, ends[1])


def _min_bottleneck_cost(problem: SplitProblem, choices: list[Ends]) -> int | None:
    """Minimum cost of the slowest stage; None if no split fits."""
    counts = range(1, problem.num_layers + 1)
    costs = {n * problem.layer_cost for n in counts}
    bounds = sorted(costs | {cost + problem.head_cost for cost in costs})
    fits = bisect_left(
        bounds, True, key=lambda bound: _LayerLimits(problem, bound, problem.min_blocks).holds_any(choices)
    )
    return bounds[fits] if fits < len(bounds) else None


def _max_blocks(problem: SplitProblem, choices: list[Ends], slowest: int) -> int:
    """Maximum number of blocks under the bound `slowest`, which `min_blocks` satisfies."""
    candidates = range(problem.min_blocks, problem.max_blocks + 1)
    too_many = bisect_left(
        candidates, True, key=lambda blocks: not _LayerLimits(problem, slowest, blocks).holds_any(choices)
    )
    return candidates[too_many - 1]


class _LayerLimits:
    """Maximum layers of each worker in each role, under the bounds on cost and blocks."""

    def __init__(self, problem: SplitProblem, slowest: int, num_blocks: int) -> None:
        self._problem = problem
        workers = range(problem.num_workers)
        self._by_role = {
            role: [_max_layers(problem, worker, role, slowest, num_blocks) for worker in workers]
            for role in ((StageRole.ONLY,) if problem.num_workers == 1 else _CHAIN)
        }
        middle = self._by_role.get(StageRole.MIDDLE, [])
        self._middle_sum = sum(middle)
        # Three are enough: at most two of them can be ends.
        self._useless = [worker for worker, layers in enumerate(middle) if layers < 1][:3]

    def holds_any(self, choices: Iterable[Ends]) -> bool:
        return any(self.holds_model(ends) for ends in choices)

    def holds_model(self, ends: Ends) -> bool:
        """Whether a split gives every stage at least one layer and covers the model."""
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


def _most_even_split(problem: SplitProblem, limits: list[int]) -> tuple[int, ...]:
    """Layer counts up to `limits` with the least sum of squared costs; ties favor earlier stages."""
    layers = [1] * len(limits)
    costs = [problem.layer_cost] * len(limits)
    costs[-1] += problem.head_cost
    growing = [(cost, stage) for stage, cost in enumerate(costs) if limits[stage] > 1]
    heapq.heapify(growing)
    for _ in range(problem.num_layers - len(limits)):
        cost, stage = heapq.heappop(growing)
        layers[stage] += 1
        if layers[stage] < limits[stage]:
            heapq.heappush(growing, (cost + problem.layer_cost, stage))
    return tuple(layers)
