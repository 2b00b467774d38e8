"""Plans that have failed their self-check, which are not made again. Pure."""

from collections.abc import Callable, Sequence

from coordinator.planning.plan import Plan, PlanImpossible, WorkerCapacity

_Placement = tuple[tuple[str, int, int], ...]


class PlanRefusals:
    """What was wrong with plans, by who runs which layers in them."""

    def __init__(self) -> None:
        self._problems: dict[_Placement, str] = {}

    def add(self, plan: Plan, problem: str) -> None:
        """This plan, and any other that gives the same layers to the same workers, is refused."""
        self._problems[_placement(plan)] = problem

    def forget(self, worker: str) -> None:
        """A new process has this name: what was wrong with plans that it was part of says nothing of it."""
        self._problems = {
            placement: problem
            for placement, problem in self._problems.items()
            if worker not in (name for name, _, _ in placement)
        }

    def guard(
        self, make_plan: Callable[[Sequence[WorkerCapacity]], Plan]
    ) -> Callable[[Sequence[WorkerCapacity]], Plan]:
        """`make_plan`, which raises PlanImpossible for a plan that is refused."""

        def make_other_plan(workers: Sequence[WorkerCapacity]) -> Plan:
            plan = make_plan(workers)
            problem = self._problems.get(_placement(plan))
            if problem is not None:
                names = ", ".join(stage.worker for stage in plan.stages)
                raise PlanImpossible(f"the self-check of {names} {problem}")
            return plan

        return make_other_plan


def _placement(plan: Plan) -> _Placement:
    return tuple((stage.worker, stage.layer_begin, stage.layer_end) for stage in plan.stages)
