"""Chooses the next plan and avoids plans that failed their self-check. Pure."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

from coordinator.cluster.membership import Members, WorkerRecord
from coordinator.planner.plan import DeviceKind, Plan, PlanImpossible, StagePlan, WorkerCapacity
from coordinator.recovery.policy import RecoveryPolicy
from wire.sizes import format_size


class PlanRefused(PlanImpossible):
    """The plan failed a self-check before; the message is the problem."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Layers of one worker in a plan, with -1 for the embedding and one more for the head."""

    worker: str
    layers: range

    @classmethod
    def of(cls, stage: StagePlan) -> "_Part":
        begin = stage.layer_begin - stage.role.has_embeddings
        return cls(stage.worker, range(begin, stage.layer_end + stage.role.has_head))


_Placement = tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class _Failure:
    """Problem of a failed plan, the worker that caused it, if known, and the source of the reference."""

    problem: str
    cause: str | None
    source: str


class PlanRefusals:
    """Failed plans, by the layers of each worker.

    A worker is proven for the layers that it ran in a plan that passed. The cause of a failed plan is one of
    its workers that are not proven, unless the self-check named the cause.
    """

    def __init__(self) -> None:
        self._failures: dict[_Placement, _Failure] = {}
        self._proven: dict[str, set[int]] = {}

    def add(self, plan: Plan, problem: str, *, cause: str | None = None, source: str = "") -> None:
        """Refuse this plan and all others with the same layers on the same workers."""
        names = ", ".join(stage.worker for stage in plan.stages)
        self._failures[_placement(plan)] = _Failure(f"the self-check of {names} {problem}", cause, source)

    def add_passed(self, plan: Plan) -> None:
        """Record the workers of a plan that passed as proven for their layers."""
        for part in _placement(plan):
            self._proven.setdefault(part.worker, set()).update(part.layers)

    def forget(self, worker: str) -> None:
        """Forget the results of a worker that was replaced by a new process."""
        self._proven.pop(worker, None)
        self._failures = {
            placement: failure
            for placement, failure in self._failures.items()
            if worker not in (part.worker for part in placement)
        }

    def forget_source(self, worker: str) -> None:
        """Forget the results of comparisons with the reference of `worker`, which may be wrong."""
        self._proven.clear()
        self._failures = {
            placement: failure for placement, failure in self._failures.items() if failure.source != worker
        }

    def check(self, plan: Plan) -> None:
        """Raise PlanRefused if the plan failed before."""
        failure = self._failures.get(_placement(plan))
        if failure is not None:
            raise PlanRefused(failure.problem)

    def doubts(self, worker: str) -> list[str]:
        """Problems of failed plans that this worker may have caused, the latest last."""
        return [
            failure.problem
            for placement, failure in self._failures.items()
            if worker in self._suspects(placement, failure)
        ]

    def culprits(self) -> dict[str, str]:
        """Workers that are the only possible cause of a failed plan, with its problem."""
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


UNLIMITED_BYTES = 1 << 60

MakePlan = Callable[[Sequence[WorkerCapacity]], Plan]


class TooFewWorkers(Exception):
    """Fewer workers than the plan needs; the message has the numbers."""


class PlanChoice:
    """Chooses plans; workers keep their places from the last plan with all stages."""

    def __init__(
        self,
        num_stages: int,
        make_plan: MakePlan,
        policy: RecoveryPolicy,
        order: Callable[[Sequence[str]], list[str]] = list,
    ) -> None:
        """`make_plan` receives workers in stage order and may raise PlanImpossible.

        `order` puts the workers of a plan without kept places into stage order. Plans have more than
        `num_stages` stages if there are more workers, up to the policy's `max_stages`.
        """
        self._least_stages = num_stages
        self.num_stages = num_stages
        """Stages of a complete plan: as configured, or of the largest one that served."""
        self.max_stages = max(num_stages, policy.max_stages)
        self._policy = policy
        self._make_plan, self._order = make_plan, order
        self._refusals = PlanRefusals()
        self._template: Plan | None = None
        self._good_template: Plan | None = None

    def keep_places(self, plan: Plan) -> None:
        """Keep the places of this plan for later plans, if it has all stages."""
        if len(plan.stages) >= self.num_stages:
            self._template = plan

    def record_served(self, plan: Plan) -> None:
        """A complete plan has from now on as many stages as this one, if it has more."""
        self.num_stages = max(self.num_stages, len(plan.stages))

    def record_drained(self) -> None:
        """A stage was taken away on purpose: a plan is complete without it, if it has the configured ones."""
        self.num_stages = max(self._least_stages, self.num_stages - 1)

    def forget_places(self) -> None:
        """Let the next plan put the workers into a new order."""
        self._template = self._good_template = None

    def best(
        self, members: Members, *, may_shrink: bool, uses_held: bool = False, awaits_all: bool = False
    ) -> Plan:
        """The best plan for the usable workers, and with `uses_held` also for held ones.

        Workers with a stage in the last plan with all stages keep their place; others fill free places by
        name, so that the order of joining does not matter. If no plan fits these workers, those with the most
        memory are tried, and if a plan failed its self-check, other sets of workers. With `may_shrink` the
        plan may have fewer stages if necessary; one that `awaits_all` has the most. Raises TooFewWorkers or
        PlanImpossible.
        """
        usable = [record for record in members if record.is_usable or (uses_held and record.is_held)]
        min_stages = self.max_stages if awaits_all else 1 if may_shrink else self.num_stages
        if len(usable) < min_stages:
            joined = f"{len(usable)} of {self.num_stages} workers joined"
            raise TooFewWorkers(f"{joined}{self._missing_layers(usable)}{members.quarantine_text}")
        max_stages = min(len(usable), self.max_stages)
        problem: PlanImpossible | None = None
        for num_stages in range(max_stages, min_stages - 1, -1):
            for chosen in self._choices(usable, num_stages):
                try:
                    plan = self._make_plan(list(map(_capacity, chosen)))
                    self._refusals.check(plan)
                    return plan
                except PlanImpossible as error:
                    problem = _more_specific(problem, error, is_first_size=num_stages == max_stages)
        raise PlanImpossible(f"{problem}{members.quarantine_text}")

    def _missing_layers(self, usable: list[WorkerRecord]) -> str:
        """Describe the layers of missing workers, assuming that these have unlimited memory."""
        places = self._places(usable)
        places += [None] * (self.num_stages - len(places))
        kind = usable[0].identity.device_kind if usable else DeviceKind.HOST
        capacities = [
            _placeholder(place, kind) if record is None else _capacity(record)
            for place, record in enumerate(places)
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

    def record_failed(
        self, plan: Plan, problem: str, members: Members, *, cause: str | None = None, source: str = ""
    ) -> None:
        """Refuse a plan that failed its self-check.

        `cause` is the worker at fault, if known; `source` is the worker whose reference was used.
        """
        self._refusals.add(plan, problem, cause=cause, source=source)
        self._template = self._good_template
        self._update_doubts(members)

    def record_passed(self, plan: Plan, members: Members) -> None:
        """Record a plan that passed, and quarantine workers that are thereby the cause of a failed one."""
        self._refusals.add_passed(plan)
        self._good_template = self._template
        self._update_doubts(members)
        for name, problem in self._refusals.culprits().items():
            record = members.find_live(name)
            if record is not None and record.stage is None:
                record.quarantine(problem)
                record.is_culprit = True

    def forget(self, worker: str, members: Members) -> None:
        """Forget the results of a worker that was replaced by a new process."""
        self._refusals.forget(worker)
        self._update_doubts(members)

    def forget_source(self, worker: str, members: Members) -> None:
        """Forget results with the reference of `worker`, which may be wrong, and readmit their culprits."""
        self._refusals.forget_source(worker)
        self._update_doubts(members)
        for record in members:
            if record.is_culprit and not record.doubts:
                record.readmit()

    def _update_doubts(self, members: Members) -> None:
        for record in members:
            record.doubts = tuple(self._refusals.doubts(record.identity.name))

    def _choices(self, usable: list[WorkerRecord], num_stages: int) -> Iterator[list[WorkerRecord]]:
        """Yield sets of `num_stages` workers in stage order, the best first."""
        by_rank = sorted(usable, key=self._rank)
        by_size = sorted(usable, key=lambda record: (-record.identity.memory_bytes, _by_name(record)))
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
        """Sort key: doubts, failed loads and silence, then place and name."""
        place = (not self._has_place(record), _by_name(record))
        return (len(record.doubts), record.num_failed_loads, record.is_silent, *place)

    def _has_place(self, record: WorkerRecord) -> bool:
        stages = self._template.stages if self._template else ()
        return any(stage.worker == record.identity.name for stage in stages)

    def _in_places(self, chosen: list[WorkerRecord]) -> list[WorkerRecord]:
        """Workers in stage order, without free places."""
        return [record for record in self._places(chosen) if record is not None]

    def _places(self, chosen: list[WorkerRecord]) -> list[WorkerRecord | None]:
        """Workers in stage order; None for a free place."""
        stages = self._template.stages if self._template else ()
        by_name = {record.identity.name: record for record in chosen}
        places = [by_name.pop(stage.worker, None) for stage in stages]
        new = [record.identity.name for record in sorted(by_name.values(), key=_by_name)]
        newcomers = map(by_name.__getitem__, new if any(places) else self._order(new))
        filled = [place or next(newcomers, None) for place in places]
        return [*filled, *newcomers]


def _more_specific(
    before: PlanImpossible | None, error: PlanImpossible, *, is_first_size: bool
) -> PlanImpossible:
    """The more specific problem: a failed self-check, else the one of the largest workers, tried last."""
    if before is None or isinstance(error, PlanRefused):
        return error if not isinstance(before, PlanRefused) else before
    return error if is_first_size and not isinstance(before, PlanRefused) else before


def _capacity(record: WorkerRecord) -> WorkerCapacity:
    worker = record.identity
    return WorkerCapacity(
        name=worker.name,
        memory_bytes=worker.memory_bytes,
        supports_bf16=worker.supports_bf16,
        supports_f16=worker.supports_f16,
        device=worker.device_kind,
        rates=record.rates,
        memory_domain=worker.memory_domain,
        host_memory_bytes=worker.host_memory_bytes,
    )


def _placeholder(place: int, device: DeviceKind) -> WorkerCapacity:
    """A worker with unlimited memory; names of workers have no space."""
    return WorkerCapacity(name=f"worker to come {place}", memory_bytes=UNLIMITED_BYTES, device=device)


def _by_name(record: WorkerRecord) -> list[tuple[bool, int, str]]:
    return name_key(record.identity.name)


def name_key(name: str) -> list[tuple[bool, int, str]]:
    """Sort key that puts "gpu-10" after "gpu-9"."""
    parts = re.split(r"(\d+)", name)
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
