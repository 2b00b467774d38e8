"""Who loads a stage and runs its steps: progress, result, failure."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stage_worker.assignment import Assignment, ReferenceRequest
from stage_worker.backends.contract import ReceivedFrame, StageOutput
from stage_worker.executor import StepExecutor
from stage_worker.loading.weights_check import LoadedFrom
from wire.errors import InvalidRequest
from wire.reference import Reference
from wire.tensors import TensorView


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


@dataclass(slots=True)
class RanStep:
    """A step's output, and from when to when it was computed, on the clock of `time.monotonic`."""

    output: StageOutput
    started_s: float
    ended_s: float


class StageBackend(ABC):
    """One per worker. Calls are made one after another, except that a load may be given up.

    `on_device_failure` is told on the event loop, with the reason, that nothing more can be computed in this
    process. Whoever owns the backend sets it before the first call.
    """

    on_device_failure: Callable[[str], None]

    device: str
    """What the coordinator and its users see: "cpu", "cuda:0", or "mock"."""
    memory_bytes: int
    """For weights, KV pages and activations together."""

    @property
    def is_mock(self) -> bool:
        """Nothing is computed, only time passes."""
        return False

    @property
    def lacks_bf16(self) -> bool:
        """bfloat16 takes longer than float32 here."""
        return False

    @abstractmethod
    async def load(self, assignment: Assignment, progress: LoadProgress) -> LoadedStage:
        """The stage that is assigned. Ends the one that was loaded before, whose executor must not be used
        any more: its pages are dropped first, then the weights that the new stage does not share, and only
        what is missing is read.

        Raises StageLoadError; then no stage is loaded. A failure leaves nothing in memory. LoadGivenUp leaves
        the parts that were complete (whole layers), which the assignment that it gave way to may share.
        """

    @abstractmethod
    async def holds(self, loaded: LoadedStage, assignment: Assignment) -> bool:
        """Whether `loaded`, the stage that was loaded last, serves `assignment` as it is: the same stage of
        the same files."""

    @abstractmethod
    async def begin_epoch(self, executor: StepExecutor, number: int, *, stage: int) -> None:
        """Resets the stage, after everything that was begun before."""

    @abstractmethod
    def submit(self, executor: StepExecutor, received: ReceivedFrame) -> "asyncio.Future[RanStep]":
        """Begins one step, after everything that was begun before. It ends with a StepFault, or so."""

    async def verify_accounting(self, executor: StepExecutor) -> None:
        """Checks the KV accounting, after everything that was begun before. Raises StepFault."""
        executor.verify_accounting()

    async def reference(self, request: ReferenceRequest, *, held_bytes: int) -> Reference:
        """What the checkpoint itself answers, while anything else goes on; the loaded stage holds
        `held_bytes`. Raises ServingError.
        """
        raise InvalidRequest("a mock stage has no weights to compute a reference with")

    async def project(self, handed_on: Sequence[TensorView]) -> bytes:
        """Hidden states of one step after another as in LayerReference.states; b"" where there are none."""
        return b""

    @abstractmethod
    def stop(self, *, timeout_s: float) -> bool:
        """Ends whatever runs; False if it is still busy after `timeout_s`."""
