"""Which workers run which layers next. Pure."""

import re
from collections.abc import Callable, Sequence

from coordinator.cluster.membership import Members, WorkerRecord
from coordinator.cluster.self_check_refusals import PlanRefusals
from coordinator.planning.plan import Plan, PlanImpossible, WorkerCapacity

MakePlan = Callable[[Sequence[WorkerCapacity]], Plan]


class TooFewWorkers(Exception):
    """Fewer than the plan needs; the message says how many there are."""


class PlanChoice:
    """Remembers the last plan with all stages, whose places are kept, and the plans that are not good."""

    def __init__(self, num_stages: int, make_plan: MakePlan) -> None:
        """`make_plan` may raise PlanImpossible; it is given workers in the order in which to use them."""
        self.refusals = PlanRefusals()
        self._num_stages = num_stages
        self._make_plan = self.refusals.guard(make_plan)
        self._template: Plan | None = None

    def keep_places(self, plan: Plan) -> None:
        """Later plans look like this one, if it has all stages."""
        if len(plan.stages) == self._num_stages:
            self._template = plan

    def best(self, members: Members, *, may_shrink: bool) -> Plan:
        """A plan for the workers that are usable now.

        Those with a stage in the last plan with all stages keep their place; others take the places of those
        who are gone, by name, so that the order of arrival does not matter. Where no plan fits those, the
        workers with the most memory are taken. With `may_shrink` the plan may have fewer stages than were
        asked for. Raises TooFewWorkers or PlanImpossible.
        """
        num_stages = self._num_stages
        usable = {each.identity.name: each for each in members if each.is_usable}
        if not usable or (len(usable) < num_stages and not may_shrink):
            raise TooFewWorkers(f"{len(usable)} of {num_stages} workers are here{members.quarantine}")
        chosen = _in_places(usable, self._template, num_stages)
        try:
            return self._make_plan(_capacities(chosen))
        except PlanImpossible as error:
            by_size = sorted(usable.values(), key=lambda each: (-each.identity.memory_bytes, _by_name(each)))
            largest = sorted(by_size[:num_stages], key=_by_name)
            if {each.identity.name for each in largest} == {each.identity.name for each in chosen}:
                raise PlanImpossible(f"{error}{members.quarantine}") from None
        return self._make_plan(_capacities(largest))


def _in_places(usable: dict[str, WorkerRecord], template: Plan | None, num_stages: int) -> list[WorkerRecord]:
    """As many as there are stages, in stage order. One that could not load its layers gives way to others."""
    stages = template.stages if template else ()
    places: list[WorkerRecord | None] = [
        record if (record := usable.get(stage.worker)) and not record.num_failed_loads else None
        for stage in stages
    ]
    others = [record for record in usable.values() if record not in places]
    newcomers = iter(sorted(others, key=lambda each: (each.num_failed_loads, _by_name(each))))
    places += [None] * (num_stages - len(places))
    filled = [place or next(newcomers, None) for place in places]
    return [record for record in filled if record is not None]


def _capacities(records: list[WorkerRecord]) -> list[WorkerCapacity]:
    identities = [each.identity for each in records]
    return [
        WorkerCapacity(name=each.name, memory_bytes=each.memory_bytes, lacks_bf16=each.lacks_bf16)
        for each in identities
    ]


def _by_name(record: WorkerRecord) -> list[tuple[bool, int, str]]:
    """Sorts "gpu-10" after "gpu-9"."""
    parts = re.split(r"(\d+)", record.identity.name)
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
