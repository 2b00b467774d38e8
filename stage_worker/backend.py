"""Who loads stages and runs their steps: torch on a thread of its own, or a mock on the event loop."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stage_worker.assignment import Assignment
from stage_worker.executor import StepExecutor
from stage_worker.outputs import ReceivedFrame, StageOutput
from stage_worker.reference_request import ReferenceRequest
from stage_worker.stage_load import LoadedStage, LoadProgress
from wire.errors import InvalidRequest
from wire.reference import Reference
from wire.tensors import TensorView


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
