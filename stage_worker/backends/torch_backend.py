"""The torch backend: models and KV pages on one compute thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from stage_worker.assignment import Assignment, Prefetch, ReferenceRequest
from stage_worker.backends.backend import (
    DeviceFailedInLoad,
    LoadedStage,
    LoadProgress,
    RanStep,
    StageBackend,
    StageDevice,
)
from stage_worker.backends.compute_thread import ComputeThread, StepWatchdog
from stage_worker.backends.contract import DeviceError, KernelChoice, ReceivedFrame
from stage_worker.backends.cuda_runtime import CudaMappings
from stage_worker.backends.gpu_choice import GpuClaims, choose_gpu, list_gpus
from stage_worker.backends.hop_memory import HopMemory
from stage_worker.backends.step_pipeline import StepPipeline
from stage_worker.backends.tensor_views import as_array, from_wire, project
from stage_worker.backends.torch_device import (
    CudaMeter,
    check_memory,
    default_memory_bytes,
    describe_gpu,
    free_memory,
    has_fast_f16,
    has_native_bf16,
    measure_rates,
    move_near,
    parse_device,
    prepare_process,
    prepare_thread,
    table_memory_bytes,
)
from stage_worker.backends.transfers import CudaPageLocks
from stage_worker.config import AUTO, WorkerConfig
from stage_worker.executor import StepExecutor
from stage_worker.loading.reference import compute_reference
from stage_worker.loading.remote_weights import RemoteWeights, Sharing
from stage_worker.loading.stage_loader import StageCache, WorkerResources, load_stage
from stage_worker.loading.warm_spare import check_warm_spare, drop_warm, keep_warm
from stage_worker.loading.weights_check import LoadedFrom
from stage_worker.model.checksums import checksum_of
from stage_worker.model.kernels import check_choice, has_triton_kernels
from weights.serving import yield_to_others
from wire.device_rates import DeviceRates, RateSource
from wire.gpu import DeviceMemory
from wire.reference import Reference, encode_states
from wire.steps import Step
from wire.tensors import TensorView

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

CPU = torch.device("cpu")
CLAIMS_FOLDER = "gpus"
RATES_TIMEOUT_S = 60.0
"""Of a measurement that takes one second, beside libraries that are loaded from a slow disk."""


class CudaMemory:
    """Memory of a GPU: the allocator's, that of hops, and what the host pins for a stage."""

    def __init__(self, device: torch.device, choice: KernelChoice) -> None:
        checksum = checksum_of(has_triton=has_triton_kernels(choice, device))
        self.meter = CudaMeter(device)
        self.hop_memory = HopMemory(CudaPageLocks(device), CudaMappings(device, checksum))
        self.pinned_bytes = 0
        """Of the loaded stage, or of layers that are kept without one."""

    def restart_peak(self) -> None:
        """Count the allocator's peak from now on."""
        self.meter.restart_peak()

    def stop(self, *, timeout_s: float) -> bool:
        """Unlock the memory of hops. Returns False if it is still in use after `timeout_s`."""
        return self.hop_memory.stop(timeout_s=timeout_s)

    def read(self) -> DeviceMemory:
        allocator, hop_bytes = self.meter.read(), self.hop_memory.device_bytes
        return replace(
            allocator,
            allocated_bytes=allocator.allocated_bytes + hop_bytes,
            reserved_bytes=allocator.reserved_bytes + hop_bytes,
            peak_bytes=allocator.peak_bytes + hop_bytes,
            pinned_bytes=self.pinned_bytes + self.hop_memory.locked_bytes,
        )


class TorchBackend(StageBackend):
    """Owner of the compute thread and a second thread for references, which steps and loads never wait
    for.
    """

    def __init__(self, config: WorkerConfig, sharing: Sharing | None = None) -> None:
        """Raises ValueError for a device that this host lacks, MemoryTooLarge and KernelsUnavailable.

        `sharing` is how weights are exchanged with other processes.
        """
        self._claims = _claims(config)
        device = _prepared_device(config, self._claims)
        self.device = _described(device, config)
        self._warm_bytes = config.warm_spare_bytes
        if self._warm_bytes is not None:
            check_warm_spare(self._warm_bytes, self.device.memory_bytes, device)
        self._remote = RemoteWeights(
            config.weights_cache(self.device.name), limit_bytes=config.weights_limit_bytes, sharing=sharing
        )
        self._gpu_memory = CudaMemory(device, config.kernels) if device.type == "cuda" else None
        self._resources = WorkerResources(
            device=device,
            meter=None if self._gpu_memory is None else self._gpu_memory.meter,
            hop_memory=None if self._gpu_memory is None else self._gpu_memory.hop_memory,
            memory_bytes=self.device.memory_bytes,
            model_directory=config.model_directory,
            kernels=config.kernels,
            cuda_graphs=config.cuda_graphs,
            step_timeout_s=config.step_timeout_s,
            remote=self._remote,
            pinned_limit_bytes=0 if self._warm_bytes is None else default_memory_bytes(CPU),
            host_memory_bytes=self.device.host_memory_bytes,
        )
        self._cache = StageCache()
        self._watchdog = StepWatchdog(config.step_timeout_s, self._fail)
        self._thread = ComputeThread(on_start=lambda: _begin_thread(device, config.compute_threads))
        self._steps = StepPipeline(
            self._thread,
            self._fail,
            on_start=lambda: prepare_thread(device),
            step_timeout_s=config.step_timeout_s,
        )
        self._references = ComputeThread(on_start=lambda: _begin_thread(device, config.compute_threads))
        self._prefetches = ComputeThread(on_start=yield_to_others)

    @property
    def gpu_memory(self) -> CudaMemory | None:
        return self._gpu_memory

    @property
    def weights(self) -> TorchBackend:
        return self

    @property
    def references(self) -> TorchBackend:
        return self

    @property
    def warm_spare(self) -> TorchBackend | None:
        return None if self._warm_bytes is None else self

    async def load(self, assignment: Assignment, progress: LoadProgress) -> LoadedStage:
        self._watch_steps()
        self._set_pinned(0)
        try:
            loaded = await self._load_after_steps(
                load_stage, assignment, self._resources, progress, self._cache
            )
        except DeviceFailedInLoad as error:
            self._fail(str(error))
            raise
        self._set_pinned(loaded.pinned_bytes)
        if self._gpu_memory is not None:
            self._gpu_memory.restart_peak()
        return loaded

    async def holds(self, loaded: LoadedStage, assignment: Assignment) -> bool:
        if not assignment.loads_like(loaded.assignment):
            return False
        self._watch_steps()
        directory = self._resources.directory(assignment.model_directory)
        fetched = self._resources.fetched_model(assignment)
        return await self._thread.run(self._cache.is_of, directory, None if fetched is None else fetched.pins)

    async def begin_epoch(self, executor: StepExecutor, number: int, *, stage: int) -> None:
        self._watch_steps()
        await self._after_steps(executor.begin_epoch, number, stage=stage)

    def prepare(self, executor: StepExecutor, step: Step) -> None:
        self._thread.post(executor.prepare, step)

    def submit(self, executor: StepExecutor, received: ReceivedFrame) -> asyncio.Future[RanStep]:
        return self._steps.submit(executor, received.frame)

    async def verify_accounting(self, executor: StepExecutor) -> None:
        await self._thread.run(executor.verify_accounting)

    async def prefetch(self, order: Prefetch, progress: LoadProgress) -> None:
        if order.model is not None and self._resources.fetches(order.model):
            await self._prefetches.run(self._remote.prefetch, order, order.model, progress)
        if self._warm_bytes is None:
            return
        try:
            pinned_bytes = await self._load_after_steps(
                keep_warm, order, self._resources, progress, self._cache, limit_bytes=self._warm_bytes
            )
        except DeviceFailedInLoad as error:
            self._fail(str(error))
            raise
        self._set_pinned(pinned_bytes)

    async def refetch(self, source: LoadedFrom, tensors: Sequence[str]) -> bool:
        pins = source.checkpoint.pins
        return pins is not None and await asyncio.to_thread(self._remote.refetch, pins, tensors)

    async def drop_warm(self) -> None:
        self._set_pinned(0)
        await self._load_after_steps(drop_warm, self._resources, self._cache)

    def checkpoint_directory(self, coordinators: str) -> Path:
        return self._resources.directory(coordinators)

    async def reference(self, request: ReferenceRequest, *, held_bytes: int) -> Reference:
        progress = LoadProgress()
        try:
            return await self._references.run(
                compute_reference,
                request,
                self._resources.directory(request.directory),
                free_bytes=self._free_bytes(held_bytes),
                progress=progress,
            )
        finally:
            progress.cancel()

    async def project(self, handed_on: Sequence[TensorView]) -> bytes:
        return await self._thread.run(handed_on_states, list(handed_on))

    def stop(self, *, timeout_s: float) -> bool:
        self._watchdog.close()
        self._references.stop(timeout_s=0)
        self._prefetches.stop(timeout_s=timeout_s)
        if self._claims is not None:
            self._claims.close()
        is_stopped = self._thread.stop(timeout_s=timeout_s) and self._steps.stop(timeout_s=timeout_s)
        if self._gpu_memory is not None:
            is_stopped = self._gpu_memory.stop(timeout_s=timeout_s) and is_stopped
        if is_stopped:
            self._remote.close()
        return is_stopped

    async def _load_after_steps(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Like `_after_steps`, for loads. Raises DeviceFailedInLoad."""
        try:
            return await self._after_steps(function, *args, **kwargs)
        except DeviceError as error:
            raise DeviceFailedInLoad(str(error)) from error

    async def _after_steps(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` on the compute thread behind all steps. Reports and raises DeviceError."""

        def drained() -> T:
            self._steps.drain()
            return function(*args, **kwargs)

        try:
            return await self._thread.run(drained)
        except DeviceError as error:
            self._fail(str(error))
            raise

    def _set_pinned(self, size_bytes: int) -> None:
        if self._gpu_memory is not None:
            self._gpu_memory.pinned_bytes = size_bytes

    def _watch_steps(self) -> None:
        """Watch the steps that the coordinator gave up until they end."""
        self._watchdog.expect(self._thread.submit(self._steps.drain))

    def _fail(self, reason: str) -> None:
        self.on_device_failure(reason)

    def _free_bytes(self, held_bytes: int) -> int:
        """References use host memory, which a GPU's budget does not cover."""
        device = self._resources.device
        held_bytes = max(held_bytes, self._warm_bytes or 0)
        return self.device.memory_bytes - held_bytes if device.type == "cpu" else default_memory_bytes(CPU)


def _described(device: torch.device, config: WorkerConfig) -> StageDevice:
    # First, since it loads libraries, which take free memory.
    rates = _measured_rates(config, device)
    return StageDevice(
        name=str(device),
        memory_bytes=config.memory_bytes or default_memory_bytes(device),
        host_memory_bytes=table_memory_bytes(device),
        supports_bf16=has_native_bf16(device),
        supports_f16=has_fast_f16(device),
        reads_pages_in_place=has_triton_kernels(config.kernels, device),
        gpu=describe_gpu(device) if device.type == "cuda" else None,
        rates=rates,
    )


def handed_on_states(handed_on: list[TensorView]) -> bytes:
    """Projected hidden states of consecutive steps, as in LayerReference.states."""
    states = (project(from_wire(view, device=CPU, dtype=torch.float32)) for view in handed_on)
    return b"".join(encode_states(as_array(state)) for state in states)


def _measured_rates(config: WorkerConfig, device: torch.device) -> DeviceRates | None:
    """Measured on a thread like those of steps; None for a CPU, unless it is asked for.

    A CPU is shared with other processes, whose load would change the split. Memory is free again afterwards.
    """
    is_auto = config.device_rate is RateSource.AUTO and device.type == "cuda"
    if not is_auto and config.device_rate is not RateSource.MEASURE:
        return None
    found: list[DeviceRates | Exception] = []
    thread = ComputeThread(
        on_start=lambda: _begin_thread(device, config.compute_threads), name="device-rates"
    )
    thread.post(lambda: found.append(_rates_or_error(device)))
    thread.stop(timeout_s=RATES_TIMEOUT_S)
    free_memory(device)
    rates = found[0] if found else TimeoutError(f"no result within {RATES_TIMEOUT_S:g} s")
    if isinstance(rates, Exception):
        raise ValueError(
            f"the speed of {device} was not measured ({rates}): use another device, or --device-rate none"
        ) from rates
    log.info("device rates of %s: %s", device, rates)
    return rates


def _rates_or_error(device: torch.device) -> DeviceRates | Exception:
    try:
        return measure_rates(device)
    except Exception as error:  # of the driver, of any type: the worker says it and does not start
        return error


def _begin_thread(device: torch.device, num_threads: int | None) -> None:
    prepare_thread(device)
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def _claims(config: WorkerConfig) -> GpuClaims | None:
    return None if config.state_directory is None else GpuClaims(config.state_directory / CLAIMS_FOLDER)


def _prepared_device(config: WorkerConfig, claims: GpuClaims | None) -> torch.device:
    """The device of this process, checked against the options, with the process and this thread set to it."""
    device = _device(config, claims)
    if config.memory_bytes is not None:
        check_memory(config.memory_bytes, device)
    check_choice(config.kernels, device)
    if config.cpu_set is None:
        move_near(device)
    prepare_process(device)
    prepare_thread(device)
    return device


def _device(config: WorkerConfig, claims: GpuClaims | None) -> torch.device:
    """The configured device, or a free GPU. Claims it, so that no other worker takes it as free.

    Raises ValueError.
    """
    if config.device == AUTO:
        return parse_device(choose_gpu(list_gpus(), claims).device)
    device = parse_device(config.device)
    if device.type == "cuda" and claims is not None:
        claims.claim(describe_gpu(device).uuid)
    return device
