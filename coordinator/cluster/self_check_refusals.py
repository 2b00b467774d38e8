"""Plans that have failed their self-check, which are not made again, and who may be why. Pure."""

from dataclasses import dataclass

from coordinator.planning.plan import Plan, PlanImpossible, StagePlan


class PlanRefused(PlanImpossible):
    """This very plan has failed its self-check; the text says how."""


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
    """How a plan has failed, and whose results were wrong, where that is known."""

    problem: str
    cause: str | None


class PlanRefusals:
    """What was wrong with plans, by who runs which layers in them.

    A worker is above doubt for those layers with which it was part of a plan that has passed. Of every plan
    that has failed, one of the others must be the cause, unless the check has found who was.
    """

    def __init__(self) -> None:
        self._failures: dict[_Placement, _Failure] = {}
        self._proven: dict[str, set[int]] = {}

    def add(self, plan: Plan, problem: str, *, cause: str | None = None) -> None:
        """This plan, and any other that gives the same layers to the same workers, is refused."""
        names = ", ".join(stage.worker for stage in plan.stages)
        self._failures[_placement(plan)] = _Failure(f"the self-check of {names} {problem}", cause)

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

    def check(self, plan: Plan) -> None:
        """Raises PlanRefused."""
        failure = self._failures.get(_placement(plan))
        if failure is not None:
            raise PlanRefused(failure.problem)

    def doubts(self, worker: str) -> list[str]:
        """How the plans failed that this worker may have spoilt, the last one last."""
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
