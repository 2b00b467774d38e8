"""What loading a stage is, whoever does it: its progress, its result, its failure."""

from dataclasses import dataclass, replace

from stage_worker.assignment import Assignment
from stage_worker.executor import StepExecutor


class StageLoadError(Exception):
    """This worker cannot run what it was assigned; the text has the reason and the numbers."""


class LoadProgress:
    """How far a load is, and the wish that it end; shared between the event loop and whoever loads."""

    def __init__(self) -> None:
        self.fraction = 0.0
        self._is_cancelled = False

    def cancel(self) -> None:
        """Ends the load at the next tensor."""
        self._is_cancelled = True

    def advance(self, fraction: float) -> None:
        """Raises StageLoadError when the load is not wanted any more."""
        if self._is_cancelled:
            raise StageLoadError(f"the load was given up at {fraction:.0%}")
        self.fraction = fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedStage:
    """A warm stage with empty pages, and what it took. `executor` belongs to the backend that loaded it."""

    assignment: Assignment
    executor: StepExecutor
    weight_bytes: int
    kv_bytes: int
    load_ms: int
    warmup_ms: int

    def placed(self, assignment: Assignment) -> "LoadedStage":
        """The same loaded stage under another assignment that it serves as it is."""
        return replace(self, assignment=assignment)
