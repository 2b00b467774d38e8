"""What loading a stage is, whoever does it: its progress, its result, its failure."""

from dataclasses import dataclass, replace

from stage_worker.assignment import Assignment
from stage_worker.executor import StepExecutor
from stage_worker.weights_check import LoadedFrom


class StageLoadError(Exception):
    """This worker cannot run what it was assigned; the text has the reason and the numbers."""


class LoadGivenUp(StageLoadError):
    """Another assignment has taken its place."""


class DeviceFailedInLoad(StageLoadError):
    """The device has failed while it loaded or warmed up; nothing more can be computed in this process."""


class LoadProgress:
    """How far a load is, and the wish that it end; shared between the event loop and whoever loads.

    What is in memory already is no part of it.
    """

    def __init__(self) -> None:
        self.read_bytes = 0
        self._expected_bytes: int | None = None
        self._is_cancelled = False

    @property
    def fraction(self) -> float:
        """Of the bytes that this load reads; 0 before it is known how many, 1 when none are missing."""
        if self._expected_bytes is None:
            return 0.0
        return self.read_bytes / self._expected_bytes if self._expected_bytes else 1.0

    def cancel(self) -> None:
        """Ends the load at the next piece."""
        self._is_cancelled = True

    def expect(self, num_bytes: int) -> None:
        """The load is going to read `num_bytes` of the checkpoint. Raises LoadGivenUp, see `advance`."""
        self._expected_bytes = num_bytes
        self.advance(0)

    def advance(self, num_bytes: int) -> None:
        """It has read `num_bytes` more. Raises LoadGivenUp when it is not wanted any more."""
        self.read_bytes += num_bytes
        if self._is_cancelled:
            raise LoadGivenUp(f"the load was given up at {self.fraction:.0%}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedStage:
    """A warm stage with empty pages, and what it took. `executor` belongs to the backend that loaded it.

    `read_bytes` were read of the checkpoint; the weights beyond them were in memory already. `kernels` is
    "compiled" or "plain", empty for a mock; `kernels_detail` says which functions compute what, and why.
    `source` is None for a mock.
    """

    assignment: Assignment
    executor: StepExecutor
    weight_bytes: int
    kv_bytes: int
    read_bytes: int
    load_ms: int
    warmup_ms: int
    device: str
    kernels: str = ""
    kernels_detail: str = ""
    source: LoadedFrom | None = None

    def placed(self, assignment: Assignment) -> "LoadedStage":
        """The same loaded stage under another assignment that it serves as it is."""
        return replace(self, assignment=assignment)
