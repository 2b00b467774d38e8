"""Chooses the next plan, and remembers refused ones. Pure."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

from coordinator.cluster.membership import Members, WorkerRecord
from coordinator.planner.plan import Plan, PlanImpossible, StagePlan, WorkerCapacity
from coordinator.recovery.policy import RecoveryPolicy
from wire.sizes import format_size


class PlanRefused(PlanImpossible):
    """The plan has failed its self-check before; the text is the problem."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one worker computes in a plan: layers, with -1 for the embedding and one more for the head."""

    worker: str
    layers: range

    @classmethod
    def of(cls, stage: StagePlan) -> "_Part":
        begin = stage.layer_begin - stage.role.has_embeddings
        return cls(stage.worker, range(begin, stage.layer_end + stage.role.has_head))


_Placement = tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class _Failure:
    """How a plan has failed, whose results were wrong, where that is known, and against whose reference."""

    problem: str
    cause: str | None
    source: str


class PlanRefusals:
    """What was wrong with plans, by who runs which layers in them.

    A worker is above doubt for those layers with which it was part of a plan that has passed. Of every plan
    that has failed, one of the others must be the cause, unless the check has found who was.
    """

    def __init__(self) -> None:
        self._failures: dict[_Placement, _Failure] = {}
        self._proven: dict[str, set[int]] = {}

    def add(self, plan: Plan, problem: str, *, cause: str | None = None, source: str = "") -> None:
        """This plan, and any other that gives the same layers to the same workers, is refused."""
        names = ", ".join(stage.worker for stage in plan.stages)
        self._failures[_placement(plan)] = _Failure(f"the self-check of {names} {problem}", cause, source)

    def add_passed(self, plan: Plan) -> None:
        """Nothing is wrong with these workers as far as they run these layers."""
        for part in _placement(plan):
            self._proven.setdefault(part.worker, set()).update(part.layers)

    def forget(self, worker: str) -> None:
        """A new process has this name: what is known of the one before says nothing of it."""
        self._proven.pop(worker, None)
        self._failures = {
            placement: failure
            for placement, failure in self._failures.items()
            if worker not in (part.worker for part in placement)
        }

    def forget_source(self, worker: str) -> None:
        """The reference of `worker` may be wrong: what was found out with it does not count."""
        self._proven.clear()
        self._failures = {
            placement: failure for placement, failure in self._failures.items() if failure.source != worker
        }

    def check(self, plan: Plan) -> None:
        """Raises PlanRefused."""
        failure = self._failures.get(_placement(plan))
        if failure is not None:
            raise PlanRefused(failure.problem)

    def doubts(self, worker: str) -> list[str]:
        """How plans failed that this worker may be the cause of, the latest last."""
        return [
            failure.problem
            for placement, failure in self._failures.items()
            if worker in self._suspects(placement, failure)
        ]

    def culprits(self) -> dict[str, str]:
        """Workers that must be the cause, because nobody else can be, with how their plan failed."""
        return {
            suspects[0]: failure.problem
            for placement, failure in self._failures.items()
            if len(suspects := self._suspects(placement, failure)) == 1
        }

    def _suspects(self, placement: _Placement, failure: _Failure) -> list[str]:
        if failure.cause is not None:
            return [failure.cause]
        return [part.worker for part in placement if not self._is_proven(part)]

    def _is_proven(self, part: _Part) -> bool:
        return self._proven.get(part.worker, set()).issuperset(part.layers)


def _placement(plan: Plan) -> _Placement:
    return tuple(map(_Part.of, plan.stages))


ROOM_FOR_ANYTHING_BYTES = 1 << 60

MakePlan = Callable[[Sequence[WorkerCapacity]], Plan]


class TooFewWorkers(Exception):
    """Fewer workers than the plan needs; the message has the numbers."""


class PlanChoice:
    """Remembers the last plan with all stages, whose places are kept, and the plans that are not good."""

    def __init__(self, num_stages: int, make_plan: MakePlan, policy: RecoveryPolicy) -> None:
        """`make_plan` may raise PlanImpossible; it is given workers in the order in which to use them."""
        self._num_stages = num_stages
        self._policy = policy
        self._make_plan = make_plan
        self._refusals = PlanRefusals()
        self._template: Plan | None = None
        self._good_template: Plan | None = None

    def keep_places(self, plan: Plan) -> None:
        """Later plans look like this one, if it has all stages."""
        if len(plan.stages) == self._num_stages:
            self._template = plan

    def best(self, members: Members, *, may_shrink: bool, uses_held: bool = False) -> Plan:
        """A plan for the workers that are usable now, with `uses_held` also for those that are to wait.

        Those with a stage in the last plan with all stages keep their place; others take the places of those
        who are gone, by name, so that the order of arrival does not matter. Where no plan fits those, the
        workers with the most memory are taken, and where that plan has failed its self-check, others. With
        `may_shrink` the plan may have fewer stages than were asked for, if it must. Raises TooFewWorkers or
        PlanImpossible.
        """
        usable = [record for record in members if record.is_usable or (uses_held and record.is_held)]
        if not usable or (len(usable) < self._num_stages and not may_shrink):
            here = f"{len(usable)} of {self._num_stages} workers are here"
            raise TooFewWorkers(f"{here}{self._what_is_missing(usable)}{members.quarantine}")
        most = min(len(usable), self._num_stages)
        problem: PlanImpossible | None = None
        for num_stages in range(most, 0, -1) if may_shrink else (most,):
            for chosen in self._choices(usable, num_stages):
                try:
                    plan = self._make_plan(list(map(_capacity, chosen)))
                    self._refusals.check(plan)
                    return plan
                except PlanImpossible as error:
                    problem = _more_telling(problem, error, is_first_size=num_stages == most)
        raise PlanImpossible(f"{problem}{members.quarantine}")

    def _what_is_missing(self, usable: list[WorkerRecord]) -> str:
        """Which layers have nobody, as if workers with room for anything took the free places."""
        places = self._places(usable)
        places += [None] * (self._num_stages - len(places))
        capacities = [
            _imaginary(place) if record is None else _capacity(record) for place, record in enumerate(places)
        ]
        try:
            plan = self._make_plan(capacities)
        except PlanImpossible:
            return ""
        names = {record.identity.name for record in usable}
        missing = [stage for stage in plan.stages if stage.worker not in names]
        layers = ", ".join(
            f"{stage.layers_text} need{'s' * (stage.num_layers == 1)} {format_size(stage.weight_bytes)}"
            for stage in missing
        )
        room = ", ".join(
            f"worker {stage.worker} {format_size(stage.memory_bytes - stage.weight_bytes)}"
            for stage in plan.stages
            if stage.worker in names
        )
        return f"; {layers} for weights" + (f"; free: {room}" if room else "")

    def note_failed(
        self, plan: Plan, problem: str, members: Members, *, cause: str | None = None, source: str = ""
    ) -> None:
        """The plan has failed its self-check, and is not made again; `cause` is the worker at fault, where
        that is known, and `source` the worker with whose reference it was compared.
        """
        self._refusals.add(plan, problem, cause=cause, source=source)
        self._template = self._good_template
        self._note_doubts(members)

    def note_passed(self, plan: Plan, members: Members) -> None:
        """The plan has passed its self-check; quarantines a worker that must be the cause of a failed one."""
        self._refusals.add_passed(plan)
        self._good_template = self._template
        self._note_doubts(members)
        for name, problem in self._refusals.culprits().items():
            record = members.find(name)
            if record is not None and record.stage is None:
                record.quarantine(problem)
                record.is_culprit = True

    def forget(self, worker: str, members: Members) -> None:
        """A new process has this name."""
        self._refusals.forget(worker)
        self._note_doubts(members)

    def forget_source(self, worker: str, members: Members) -> None:
        """The reference of `worker` may be wrong: plans that failed against it may be made again, and workers
        that are out because of that are not.
        """
        self._refusals.forget_source(worker)
        self._note_doubts(members)
        for record in members:
            if record.is_culprit and not record.doubts:
                record.readmit()

    def _note_doubts(self, members: Members) -> None:
        for record in members:
            record.doubts = tuple(self._refusals.doubts(record.identity.name))

    def _choices(self, usable: list[WorkerRecord], num_stages: int) -> Iterator[list[WorkerRecord]]:
        """Sets of so many workers in stage order, the best first."""
        by_rank = sorted(usable, key=self._rank)
        by_size = sorted(usable, key=lambda each: (-each.identity.memory_bytes, _by_name(each)))
        choices = [by_rank[:num_stages], by_size[:num_stages]]
        if any(record.doubts for record in usable):
            sets = islice(combinations(by_rank, num_stages), self._policy.max_plan_candidates)
            choices += map(list, sets)
        seen = set[frozenset[str]]()
        for chosen in choices:
            names = frozenset(record.identity.name for record in chosen)
            if names not in seen:
                seen.add(names)
                yield self._in_places(chosen)

    def _rank(self, record: WorkerRecord) -> tuple[object, ...]:
        """Orders by doubts, failed loads and silence, then by place and name."""
        place = (not self._has_place(record), _by_name(record))
        return (len(record.doubts), record.num_failed_loads, record.is_silent, *place)

    def _has_place(self, record: WorkerRecord) -> bool:
        stages = self._template.stages if self._template else ()
        return any(stage.worker == record.identity.name for stage in stages)

    def _in_places(self, chosen: list[WorkerRecord]) -> list[WorkerRecord]:
        """In stage order, without free places."""
        return [record for record in self._places(chosen) if record is not None]

    def _places(self, chosen: list[WorkerRecord]) -> list[WorkerRecord | None]:
        """In stage order; None for a free place."""
        stages = self._template.stages if self._template else ()
        by_name = {record.identity.name: record for record in chosen}
        places = [by_name.pop(stage.worker, None) for stage in stages]
        newcomers = iter(sorted(by_name.values(), key=_by_name))
        filled = [place or next(newcomers, None) for place in places]
        return [*filled, *newcomers]


def _more_telling(
    before: PlanImpossible | None, error: PlanImpossible, *, is_first_size: bool
) -> PlanImpossible:
    """The more specific of two problems: a failed check, then the one of the largest workers (tried last)."""
    if before is None or isinstance(error, PlanRefused):
        return error if not isinstance(before, PlanRefused) else before
    return error if is_first_size and not isinstance(before, PlanRefused) else before


def _capacity(record: WorkerRecord) -> WorkerCapacity:
    worker = record.identity
    return WorkerCapacity(
        name=worker.name, memory_bytes=worker.memory_bytes, supports_bf16=worker.supports_bf16
    )


def _imaginary(place: int) -> WorkerCapacity:
    """No worker's name has a space."""
    return WorkerCapacity(name=f"worker to come {place}", memory_bytes=ROOM_FOR_ANYTHING_BYTES)


def _by_name(record: WorkerRecord) -> list[tuple[bool, int, str]]:
    """Sorts "gpu-10" after "gpu-9"."""
    parts = re.split(r"(\d+)", record.identity.name)
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
