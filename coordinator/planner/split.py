"""Finds the best layer ranges of a pipeline, in terms of layers, costs and limits.

Layers may differ. For a bound on the cost of the slowest stage and a number of blocks, each stage has a room
for costs and bytes, and every part of a range that fits a stage fits it, too. Sets of cuts that a pipeline's
first or last stages can reach are therefore found stage by stage, as few intervals of cuts. Both bounds are
monotone and found by bisection. The most even split under them is found by dynamic programming.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise, permutations
from operator import and_, sub

from wire.ids import StageRole


@dataclass(frozen=True, slots=True)
class Costs:
    """Cost of each layer on one worker, and of the head. Not negative."""

    layers: tuple[int, ...]
    head: int

    @property
    def total(self) -> int:
        """Of the whole model."""
        return sum(self.layers) + self.head


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitProblem:
    """Input of `best_split`, with 1 <= num_workers <= len(legal_cuts) + 1.

    `costs` are per worker, and the same object for equal ones. `weight_bytes` and `block_bytes` (of one KV
    block) are per layer and not negative. A layer holds at most `block_limits` of the blocks, and
    `entry_bytes` beside each block without such a limit. A stage may begin with layer 0 or with one of
    `legal_cuts`. `room(worker, role, num_blocks)` is the worker's memory beside layers in bytes. It may be
    negative, and must not grow with num_blocks.

    `table_bytes` are the part of `weight_bytes` in tables. A worker has them in a memory of its own, of
    `table_rooms` bytes, or with the other weights (None). `table_rooms` is empty for models without tables.
    """

    num_workers: int
    costs: tuple[Costs, ...]
    weight_bytes: tuple[int, ...]
    block_bytes: tuple[int, ...]
    block_limits: tuple[int, ...]
    entry_bytes: tuple[int, ...]
    legal_cuts: frozenset[int]
    min_blocks: int
    max_blocks: int
    room: Callable[[int, StageRole, int], int]
    table_bytes: tuple[int, ...] = ()
    table_rooms: tuple[int | None, ...] = ()

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return len(self.weight_bytes)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Layers at which a range can begin or end, with both ends of the model."""
        return (0, *sorted(self.legal_cuts), self.num_layers)

    def table_room(self, worker: int) -> int | None:
        """Bytes of tables that the worker has beside its memory; None if they are in its memory."""
        return self.table_rooms[worker] if self.table_rooms else None

    def layer_bytes(self, num_blocks: int, *, has_tables: bool) -> list[int]:
        """Bytes of each layer: weights, with tables or without, and KV of `num_blocks` blocks or fewer."""
        sizes = zip(self.weight_bytes, self.block_bytes, self.block_limits, self.entry_bytes, strict=True)
        found = [
            weights + min(num_blocks, limit) * block + num_blocks * entries
            for weights, block, limit, entries in sizes
        ]
        return found if has_tables else list(map(sub, found, self.table_bytes))

    def cost_room(self, worker: int, role: StageRole, slowest: int) -> int:
        """Maximum cost of a stage's layers, if its whole cost is at most `slowest`."""
        return slowest - (self.costs[worker].head if role.has_head else 0)

    def measures(self) -> list[_Measure]:
        """Of the costs of ranges on each worker; equal workers share one."""
        found = {costs: _Measure(costs.layers, self.cuts) for costs in set(self.costs)}
        return [found[costs] for costs in self.costs]


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


def _best_of_ends(problem: SplitProblem, choices: Sequence[Ends]) -> Split | None:
    bounds = _best_bounds(problem, choices)
    if bounds is None:
        return None
    reach = _Reach(problem, bounds)
    ends = next(ends for ends in choices if reach.holds_model(ends))
    order = stage_order(problem.num_workers, ends)
    return Split(order=order, layers=_most_even_split(problem, reach, order), num_blocks=bounds.num_blocks)


def stage_order(num_workers: int, ends: Ends) -> tuple[int, ...]:
    """Workers in stage order, for a choice of ends."""
    if num_workers == 1:
        return (0,)
    middle = (worker for worker in range(num_workers) if worker not in ends)
    return (ends[0], *middle, ends[1])


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Every stage costs at most `slowest` and holds `num_blocks` blocks."""

    slowest: int
    num_blocks: int


def _best_bounds(problem: SplitProblem, choices: Sequence[Ends]) -> _Bounds | None:
    """The tightest bounds that a choice satisfies; None if no split fits.

    Only choices that improve on all earlier ones are bisected. These are few, because the order of visits
    has nothing to do with how good a choice is.
    """
    best: _Bounds | None = None
    better = [_Reach(problem, _Bounds(_most_cost(problem), problem.min_blocks))]
    for ends in _scattered(choices):
        if any(reach.holds_model(ends) for reach in better):
            best = _bounds_of_ends(problem, ends)
            cheaper = _Bounds(best.slowest - 1, problem.min_blocks)
            larger = _Bounds(best.slowest, best.num_blocks + 1)
            better = [_Reach(problem, cheaper)]
            if best.num_blocks < problem.max_blocks:
                better.append(_Reach(problem, larger))
    return best


def _most_cost(problem: SplitProblem) -> int:
    """Of the whole model on the slowest worker."""
    return max(costs.total for costs in problem.costs)


def _scattered(choices: Sequence[Ends]) -> list[Ends]:
    """The choices in a fixed order without a trend (Knuth's multiplicative hash of their positions)."""
    order = sorted(range(len(choices)), key=lambda position: position * 2654435761 % (1 << 32))
    return [choices[position] for position in order]


def _bounds_of_ends(problem: SplitProblem, ends: Ends) -> _Bounds:
    """The tightest bounds of a choice that fits with `min_blocks` blocks."""

    def holds(slowest: int, num_blocks: int) -> bool:
        return _Reach(problem, _Bounds(slowest, num_blocks)).holds_model(ends)

    costs = range(_most_cost(problem) + 1)
    slowest = bisect_left(costs, True, key=lambda cost: holds(cost, problem.min_blocks))
    candidates = range(problem.min_blocks, problem.max_blocks + 1)
    too_many = bisect_left(candidates, True, key=lambda blocks: not holds(slowest, blocks))
    return _Bounds(slowest, candidates[too_many - 1])


class _Measure:
    """Sizes of the ranges between cuts, by the numbers of the cuts. A set of cuts is a bit mask."""

    def __init__(self, sizes: Sequence[int], cuts: Sequence[int]) -> None:
        sums = [0, *accumulate(sizes)]
        self._sums = [sums[cut] for cut in cuts]
        steps = [end - begin for begin, end in pairwise(self._sums)]
        by_size = sorted(range(len(steps)), key=steps.__getitem__)
        self._steps = [steps[begin] for begin in by_size]
        self._small = list(accumulate((1 << begin for begin in by_size), int.__or__, initial=0))

    def size(self, begin: int, end: int) -> int:
        return self._sums[end] - self._sums[begin]

    def furthest(self, begin: int, room: int) -> int:
        """The last cut to which a range from `begin` fits; before `begin` for a negative room."""
        return bisect_right(self._sums, self._sums[begin] + room) - 1

    def nearest(self, end: int, room: int) -> int:
        """The first cut from which a range to `end` fits; after `end` for a negative room."""
        return bisect_left(self._sums, self._sums[end] - room)

    def small(self, room: int) -> int:
        """The cuts from which a range to the next cut fits."""
        return self._small[bisect_right(self._steps, room)]


class _Stage:
    """A worker in a role, under bounds: which ranges fit it. A limit is a measure, and the room for it."""

    def __init__(self, *limits: tuple[_Measure, int]) -> None:
        self._limits = limits
        self._small = reduce(and_, (measure.small(room) for measure, room in limits))

    def furthest(self, begin: int) -> int:
        """The last cut to which a range from `begin` fits, at most `begin` if none does."""
        return min(measure.furthest(begin, room) for measure, room in self._limits)

    def nearest(self, end: int) -> int:
        """The first cut from which a range to `end` fits, at least `end` if none does."""
        return max(measure.nearest(end, room) for measure, room in self._limits)

    def ends(self, begins: int) -> int:
        """Every cut at which a range that fits and begins at one of `begins` can end."""
        found = 0
        # Within a run of cuts from which a step fits, the ranges' ends have no gap.
        for low, high in _runs(begins & self._small):
            found |= _interval(low + 1, self.furthest(high))
        return found

    def begins(self, ends: int) -> int:
        """Every cut at which a range that fits and ends at one of `ends` can begin."""
        found = 0
        for low, high in _runs(ends & self._small << 1):
            found |= _interval(self.nearest(low), high - 1)
        return found


def _interval(low: int, high: int) -> int:
    return (2 << high) - (1 << low)


def _runs(cuts: int) -> Iterator[tuple[int, int]]:
    """First and last cut of every run of consecutive cuts."""
    while cuts:
        low = (cuts & -cuts).bit_length() - 1
        rest = cuts + (1 << low)
        end = (rest & -rest).bit_length() - 1
        yield low, end - 1
        cuts &= -1 << end


class _Reach:
    """Cuts that the first and the last stages of any choice of ends can reach under bounds.

    Choices share their first and last stages, whose cuts are computed once.
    """

    def __init__(self, problem: SplitProblem, bounds: _Bounds) -> None:
        self._problem = problem
        self._bounds = bounds
        self._costs = problem.measures()
        self._memory = {
            has_tables: _Measure(problem.layer_bytes(bounds.num_blocks, has_tables=has_tables), problem.cuts)
            for has_tables in {problem.table_room(worker) is None for worker in range(problem.num_workers)}
        }
        self._tables = _Measure(problem.table_bytes or [0] * problem.num_layers, problem.cuts)
        self._stages: dict[tuple[int, StageRole], _Stage] = {}
        self._after: dict[int, list[int]] = {}
        self._before: dict[int, list[int]] = {}

    @property
    def last_cut(self) -> int:
        """Number of the cut at the end of the model."""
        return len(self._problem.legal_cuts) + 1

    def holds_model(self, ends: Ends) -> bool:
        """Whether a split gives every stage at least one layer and covers the model."""
        first, last = ends
        if first == last:
            return self.stage(first, StageRole.ONLY).furthest(0) == self.last_cut
        if first < last:
            return bool(self._after_first(first, last) & self._before_last(last, last + 1))
        cuts, begins = self._after_first(first, last), self._before_last(last, first + 1)
        if not cuts or not begins:
            return False
        for worker in range(last + 1, first):
            cuts = self.stage(worker, StageRole.MIDDLE).ends(cuts)
        return bool(cuts & begins)

    def stage(self, worker: int, role: StageRole) -> _Stage:
        """What fits the worker in this role."""
        found = self._stages.get((worker, role))
        if found is None:
            cost_room = self._problem.cost_room(worker, role, self._bounds.slowest)
            memory_room = self._problem.room(worker, role, self._bounds.num_blocks)
            table_room = self._problem.table_room(worker)
            limits = (self._costs[worker], cost_room), (self._memory[table_room is None], memory_room)
            found = _Stage(*limits) if table_room is None else _Stage(*limits, (self._tables, table_room))
            self._stages[worker, role] = found
        return found

    def _after_first(self, first: int, end: int) -> int:
        """Cuts at which the stages of `first` and then of all other workers before `end` can end."""
        rows = self._after.get(first)
        if rows is None:
            rows = self._after[first] = [self.stage(first, StageRole.FIRST).ends(1)]
        while len(rows) <= end:
            worker, cuts = len(rows) - 1, rows[-1]
            rows.append(cuts if worker == first else self.stage(worker, StageRole.MIDDLE).ends(cuts))
        return rows[end]

    def _before_last(self, last: int, begin: int) -> int:
        """Cuts at which the stages of all other workers from `begin` on, and then of `last`, can begin."""
        rows = self._before.get(last)
        if rows is None:
            rows = self._before[last] = [self.stage(last, StageRole.LAST).begins(1 << self.last_cut)]
        while len(rows) <= self._problem.num_workers - begin:
            worker, cuts = self._problem.num_workers - len(rows), rows[-1]
            rows.append(cuts if worker == last else self.stage(worker, StageRole.MIDDLE).begins(cuts))
        return rows[self._problem.num_workers - begin]


_Tail = tuple[int, tuple[int, ...]]
"""Sum of the squared costs of the stages from a cut on, and the cuts from there to the end of the model."""


def _most_even_split(problem: SplitProblem, reach: _Reach, order: tuple[int, ...]) -> tuple[int, ...]:
    """Layer counts with the least sum of squared costs; of equal sums, earlier stages get more layers."""
    roles = [StageRole.of_stage(stage, len(order)) for stage in range(len(order))]
    stages = [reach.stage(worker, role) for worker, role in zip(order, roles, strict=True)]
    begins = list(accumulate(stages[:-1], lambda cuts, stage: stage.ends(cuts), initial=1))
    measures = problem.measures()
    tails: dict[int, _Tail] = {reach.last_cut: (0, (reach.last_cut,))}
    for worker, stage, role, reached in reversed(list(zip(order, stages, roles, begins, strict=True))):
        extra = problem.costs[worker].head if role.has_head else 0
        ends = sum(1 << end for end in tails)
        tails = {
            begin: _best_tail(stage, measures[worker], extra, begin, tails)
            for begin in _cuts_in(reached & stage.begins(ends))
        }
    _, cuts = tails[0]
    layers = [problem.cuts[cut] for cut in cuts]
    return tuple(end - begin for begin, end in pairwise(layers))


def _best_tail(stage: _Stage, costs: _Measure, extra: int, begin: int, tails: Mapping[int, _Tail]) -> _Tail:
    """Prepend the best range from `begin` to one of `tails`; a stage costs `extra` beside its layers."""
    ends = [end for end in range(stage.furthest(begin), begin, -1) if end in tails]
    sums = [(costs.size(begin, end) + extra) ** 2 + tails[end][0] for end in ends]
    least = min(sums)
    return least, (begin, *tails[ends[sums.index(least)]][1])


def _cuts_in(cuts: int) -> Iterator[int]:
    for low, high in _runs(cuts):
        yield from range(low, high + 1)
