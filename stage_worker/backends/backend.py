"""Interfaces of a backend, which loads a stage and runs its steps; load progress and errors."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from stage_worker.assignment import Assignment, Prefetch, ReferenceRequest
from stage_worker.backends.contract import ReceivedFrame, StageOutput
from stage_worker.backends.hop_memory import HopMemory
from stage_worker.executor import StepExecutor
from stage_worker.loading.weights_check import LoadedFrom
from weights.progress import FetchProgress
from weights.source import WeightSource
from wire.device_rates import DeviceRates
from wire.gpu import DeviceMemory, Gpu
from wire.reference import Reference
from wire.steps import Step
from wire.tensors import TensorView


class StageLoadError(Exception):
    """This worker cannot run its assignment; the text has the reason and the numbers."""


class OtherCheckpoint(StageLoadError):
    """This worker's checkpoint is not the coordinator's: another try cannot succeed."""


class TemporaryLoadError(StageLoadError):
    """A later try may succeed: the source of weights did not respond for long, or the cache lacks room."""


class LoadCancelled(StageLoadError):
    """Another assignment replaced this load."""


class DeviceFailedInLoad(StageLoadError):
    """The device failed during load or warm-up; this process can no longer compute."""


class LoadProgress:
    """Progress (in bytes read) and cancellation of a load, shared between event loop and loader."""

    def __init__(self, *, failure: str = "") -> None:
        """`failure` is why the load before failed, until this one ends."""
        self.failure = failure
        self.read_bytes = 0
        self.fetch: FetchProgress | None = None
        """Set while weights are fetched over the network."""
        self.fetch_detail = ""
        """How they were fetched, and which sources failed."""
        self.sources: tuple[WeightSource, ...] = ()
        """Of weights that are fetched."""
        self._expected_bytes: int | None = None
        self._is_cancelled = False

    @property
    def fraction(self) -> float:
        """Fraction of the bytes to read: 0 before their number is known, 1 when complete."""
        if self._expected_bytes is None:
            return 0.0
        return self.read_bytes / self._expected_bytes if self._expected_bytes else 1.0

    @property
    def problem(self) -> str:
        """Why the load does not proceed, or else why the last one failed."""
        return next((source.problem for source in self.sources if source.problem), self.failure)

    def note_failure(self, error: Exception) -> None:
        """Remember why the load failed, unless another assignment replaced it."""
        if not isinstance(error, LoadCancelled):
            self.failure = str(error)

    def cancel(self) -> None:
        """Cancel the load at its next chunk."""
        self._is_cancelled = True

    def expect(self, num_bytes: int) -> None:
        """Add `num_bytes` to read. Raises LoadCancelled, see `advance`."""
        self._expected_bytes = num_bytes
        self.advance(0)

    def advance(self, num_bytes: int) -> None:
        """Count `num_bytes` as read. Raises LoadCancelled if the load was cancelled."""
        self.read_bytes += num_bytes
        if self._is_cancelled:
            raise LoadCancelled(f"load cancelled at {self.fraction:.0%}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedStage:
    """A warm stage with empty pages. `executor` belongs to the backend that loaded it.

    `read_bytes` counts bytes read from the checkpoint, which took `read_ms`; other weights were in memory
    already. `fetched_bytes` counts those that came over the network. `kernels` is "compiled" or "plain"
    (empty for a mock), `kernels_detail` names the functions with reasons. `source` is None for a mock.
    `pinned_bytes` is memory of the host for copies from and to a GPU, `largest_step_bytes` that of all of a
    GPU's tensors in the largest step, None on a CPU.
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
    fetched_bytes: int = 0
    pinned_bytes: int = 0
    largest_step_bytes: int | None = None
    read_ms: int = 0

    def placed(self, assignment: Assignment) -> "LoadedStage":
        """This stage under an equivalent assignment."""
        return replace(self, assignment=assignment)


@dataclass(slots=True)
class RanStep:
    """A step's output and the begin and end of its computation, on the clock of `time.monotonic`."""

    output: StageOutput
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDevice:
    """Facts about the device of a backend, as its worker reports them to the coordinator.

    `name` is shown to users: "cpu", "cuda:0", or "mock", whose steps take simulated time without computing.
    `memory_bytes` is the budget for weights, KV pages and activations, `host_memory_bytes` memory of a GPU's
    host for tables that the GPU reads there. `supports_bf16`: bfloat16 is at least as fast as float32;
    `supports_f16`: float16 is faster, and summed in float32. `reads_pages_in_place`: kernels of a GPU attend
    to pages in place. `gpu` is None on a CPU, `rates` without a measurement.
    """

    name: str
    memory_bytes: int
    is_mock: bool = False
    host_memory_bytes: int = 0
    supports_bf16: bool = True
    supports_f16: bool = False
    reads_pages_in_place: bool = False
    gpu: Gpu | None = None
    rates: DeviceRates | None = None


class GpuMemory(Protocol):
    """Memory of the GPU that computes."""

    @property
    def hop_memory(self) -> HopMemory:
        """Memory of hops that is page-locked for the GPU."""

    def read(self) -> DeviceMemory:
        """Current use."""


class WarmSpare(Protocol):
    """Layers in memory of a worker without a stage."""

    async def drop_warm(self) -> None:
        """Free the layers that `StageWeights.prefetch` read, after all earlier calls; no stage is loaded."""


class StageWeights(Protocol):
    """Files of weights, and the cache of those from a remote source."""

    @property
    def warm_spare(self) -> WarmSpare | None:
        """Set if `prefetch` also reads layers into memory, which ends the loaded stage."""

    def checkpoint_directory(self, coordinators: str) -> Path:
        """The local checkpoint; `coordinators` is the coordinator's path, as in ModelRef."""

    async def prefetch(self, order: Prefetch, progress: LoadProgress) -> None:
        """Fetch layers for later assignments. A load cancels it first.

        Raises StageLoadError, LoadCancelled, CheckpointError and OSError.
        """

    async def refetch(self, source: LoadedFrom, tensors: Sequence[str]) -> bool:
        """Drop tensors with wrong bytes from the cache, so that the next load fetches them from their origin.

        Returns False if they do not come from a cache, or were fetched again too often.
        """


class StageReferences(Protocol):
    """Results that a self-check compares with those of steps."""

    async def reference(self, request: ReferenceRequest, *, held_bytes: int) -> Reference:
        """Compute a reference during steps; the stage holds `held_bytes`. Raises ServingError."""

    async def project(self, handed_on: Sequence[TensorView]) -> bytes:
        """Projected hidden states of consecutive steps as in LayerReference.states."""


class StageBackend(ABC):
    """Loads a stage and runs its steps; calls must not overlap, but a load may be cancelled.

    Every backend has all methods; abilities that only some have are objects, which are None without them.
    The event loop calls `on_device_failure` when this process can no longer compute; set it before the
    first call.
    """

    on_device_failure: Callable[[str], None]
    device: StageDevice

    @property
    @abstractmethod
    def gpu_memory(self) -> GpuMemory | None:
        """None on a CPU and for a mock."""

    @property
    @abstractmethod
    def weights(self) -> StageWeights | None:
        """None for a mock."""

    @property
    @abstractmethod
    def references(self) -> StageReferences | None:
        """None for a mock."""

    @abstractmethod
    async def load(self, assignment: Assignment, progress: LoadProgress) -> LoadedStage:
        """Load the assigned stage, reading only the parts that are missing.

        Ends the previous stage, whose executor must no longer be used: drops its pages, then unshared
        weights.

        Raises:
            StageLoadError: No stage is loaded and memory is empty.
            LoadCancelled: The load was cancelled; complete layers stay in memory for the assignment that
                replaced it.
        """

    @abstractmethod
    async def holds(self, loaded: LoadedStage, assignment: Assignment) -> bool:
        """Whether `loaded`, the last loaded stage, serves `assignment` unchanged, from the same files."""

    @abstractmethod
    async def begin_epoch(self, executor: StepExecutor, number: int, *, stage: int) -> None:
        """Reset the stage, after all earlier calls."""

    @abstractmethod
    def prepare(self, executor: StepExecutor, step: Step) -> None:
        """Prepare a step after all earlier calls; `submit` of its frame follows."""

    @abstractmethod
    def submit(self, executor: StepExecutor, received: ReceivedFrame) -> "asyncio.Future[RanStep]":
        """Compute a prepared step, after all earlier calls. The future raises StepFault for a failed step."""

    @abstractmethod
    async def verify_accounting(self, executor: StepExecutor) -> None:
        """Check the KV accounting, after all earlier calls. Raises StepFault."""

    @abstractmethod
    def stop(self, *, timeout_s: float) -> bool:
        """Stop all work. Returns False if the backend is still busy after `timeout_s`."""
