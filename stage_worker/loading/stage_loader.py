"""Loads a stage: validates the assignment against local files and memory, reads, warms up."""

import gc
import importlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from builtin_model import MODEL_DIRECTORY
from checkpoint import (
    Blueprint,
    Checkpoint,
    differing_parts,
    stage_tensor_names,
)
from checkpoint.directory import files_directory
from checkpoint.errors import TRANSFORMERS_ADVICE
from checkpoint.files import stat_files
from checkpoint.grammar_tokenizer import tokenizer_source
from checkpoint.implementation import Implementation
from checkpoint.pins import Pins
from checkpoint.step_graphs import WORKSPACE_BYTES, graph_bytes
from kvcache import group_windows
from kvcache.pages import KvPages, PageGroups
from stage_worker.assignment import Assignment, WantedModel
from stage_worker.backends.backend import (
    DeviceFailedInLoad,
    LoadCancelled,
    LoadedStage,
    LoadProgress,
    OtherCheckpoint,
    StageLoadError,
    TemporaryLoadError,
)
from stage_worker.backends.contract import CudaGraphs, KernelChoice, KernelsUnavailable
from stage_worker.backends.hop_memory import HopMemory
from stage_worker.backends.model_compute import ModelCompute
from stage_worker.backends.step_graphs import CudaRecorder, StepGraphs
from stage_worker.backends.torch_device import DeviceMeter, fault_kind_of, free_memory
from stage_worker.backends.transfers import (
    CudaQueue,
    DeviceQueue,
    HostTransfers,
    StagingRing,
    StepTransfers,
)
from stage_worker.executor import StepExecutor
from stage_worker.loading.remote_weights import RemoteWeights, StageFiles
from stage_worker.loading.stage_pages import kv_bytes_of, new_pages
from stage_worker.loading.warmup import run_largest_step, warm_up
from stage_worker.loading.weights_check import LoadedFrom
from stage_worker.model.checksums import checksum_of
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.kernels import has_triton_kernels
from stage_worker.model.parts import LoadedParts
from stage_worker.model.pipeline_stage import PipelineStage
from stage_worker.model.step_buckets import StepBuckets
from stage_worker.sampling.grammar_masks import GrammarMasks
from weights.errors import CacheFull, CacheInUse, SourceUnavailable
from wire.errors import HandshakeMismatch, ServingError, StepFault, StepFaultKind
from wire.sizes import format_size
from wire.tensors import WireDType

log = logging.getLogger(__name__)


class StageCache:
    """Loaded parts, the stage made of them, and grammar tables. Used by the compute thread only."""

    def __init__(self) -> None:
        self.parts = LoadedParts()
        self.has_warmed_up = False
        """A stage was warmed up in this process, so kernels and threads are ready."""
        self._compute: ModelCompute | None = None
        self._grammars: GrammarMasks | None = None
        self._grammars_of: tuple[object, ...] | None = None

    def end_stage(self) -> None:
        """Drop the stage but not its parts; collects the reference cycles of a failed step's exception."""
        if self._compute is not None:
            self._compute.close()
        self._compute = None
        gc.collect()

    def begin_stage(
        self,
        model: PipelineStage,
        pages: KvPages | PageGroups,
        grammars: GrammarMasks | None,
        *,
        wire_dtype: WireDType | None = None,
        transfers: StepTransfers | None = None,
        graphs: StepGraphs | None = None,
    ) -> ModelCompute:
        """Set the loaded stage; `model` consists of `parts`."""
        self._compute = ModelCompute(
            model, pages, grammars, wire_dtype=wire_dtype, transfers=transfers, graphs=graphs
        )
        return self._compute

    def clear(self) -> None:
        self.end_stage()
        self.drop_grammars()
        self.parts.clear()

    def is_of(self, directory: Path, pins: Pins | None = None) -> bool:
        """Whether the parts match the files in `directory`, or remote ones; true if they are missing."""
        origin = self.parts.origin
        if origin is None:
            return False
        names = [file.name for file in origin.files]
        found = stat_files(files_directory(directory), names) if pins is None else pins.identities(names)
        return all(now == was for now, was in zip(found, origin.files, strict=True) if now.status is not None)

    def drop_grammars(self) -> None:
        """Drop the grammar tables, for a stage without the head."""
        self._grammars = self._grammars_of = None

    def grammars(self, checkpoint: Checkpoint, eos_token_ids: tuple[int, ...]) -> GrammarMasks:
        """Return the grammar tables, building them now, since that blocks the process, unless unchanged."""
        source = tokenizer_source(checkpoint.path)
        made_of = (
            stat_files(source.parent, [source.name]),
            checkpoint.config.vocab_size,
            eos_token_ids,
        )
        if self._grammars is None or self._grammars_of != made_of:
            self._grammars = GrammarMasks(
                checkpoint.path,
                vocab_size=checkpoint.config.vocab_size,
                eos_token_ids=eos_token_ids,
            )
            self._grammars_of = made_of
            if (problem := self._grammars.load()) is not None:
                log.info("no structured output: %s", problem)
        return self._grammars


def new_queue(device: torch.device) -> DeviceQueue | None:
    """The copies to a GPU; None for a CPU, which computes in memory of the host."""
    return None if device.type == "cpu" else CudaQueue(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResources:
    """Device, memory budget and kernel choice; `model_directory` overrides the coordinator's path.

    `remote` has the cache of remote models. `meter` reads the memory of a GPU; a host has none of its own.
    `hop_memory` has what a GPU copies from and to without a buffer.
    Weights are copied to the device by what `new_copies` returns. A spare on a GPU keeps up to
    `pinned_limit_bytes` of its weights in pinned memory. Tables that a GPU reads on its host may take
    `host_memory_bytes`, which a CPU has none of beside its budget.
    """

    device: torch.device
    memory_bytes: int
    model_directory: Path | None
    kernels: KernelChoice = KernelChoice.AUTO
    cuda_graphs: CudaGraphs = CudaGraphs.AUTO
    step_timeout_s: float = 30.0
    remote: RemoteWeights = field(default_factory=lambda: RemoteWeights(None))
    meter: DeviceMeter | None = None
    hop_memory: HopMemory | None = None
    new_copies: Callable[[torch.device], DeviceQueue | None] = new_queue
    pinned_limit_bytes: int = 0
    host_memory_bytes: int = 0

    def directory(self, coordinators: str) -> Path:
        """The local model directory; `coordinators` is the coordinator's path, "" for the built-in model."""
        if self.model_directory is not None:
            return self.model_directory
        return Path(coordinators) if coordinators else MODEL_DIRECTORY

    def open(self, assignment: Assignment, progress: LoadProgress) -> StageFiles:
        """Open the assigned model's checkpoint. Raises like `RemoteWeights.open`."""
        has_head = assignment.role.has_head
        return self.open_model(
            assignment.wanted_model, assignment.model_directory, progress, has_head=has_head
        )

    def open_model(
        self, model: WantedModel | None, directory: str, progress: LoadProgress, *, has_head: bool
    ) -> StageFiles:
        """Open the checkpoint of a model that is fetched, or else in the coordinator's `directory`."""
        if model is None or not self.fetches(model):
            checkpoint = Checkpoint.open(self.directory(directory))
            self.remote.share_directory(checkpoint)
            return StageFiles(checkpoint)
        if self.model_directory is not None:
            raise StageLoadError(
                f"the coordinator serves {model.pins.source}, whose weights each worker fetches: start "
                f"this worker without --model {self.model_directory}"
            )
        return self.remote.open(model, progress, has_head=has_head)

    def fetched_model(self, assignment: Assignment) -> WantedModel | None:
        """The assigned model if it is fetched."""
        model = assignment.wanted_model
        return model if model is not None and self.fetches(model) else None

    def fetches(self, model: WantedModel) -> bool:
        """Whether a model is a remote one, or at a path of the coordinator that this host lacks."""
        pins = model.pins
        is_here = self.model_directory is not None or Path(pins.source).exists()
        return not (pins.is_of_coordinator and is_here)


def load_stage(
    assignment: Assignment,
    resources: WorkerResources,
    progress: LoadProgress | None = None,
    cache: StageCache | None = None,
) -> LoadedStage:
    """Load a stage on the compute thread, reusing the shared parts of `cache`. Raises StageLoadError.

    After an error no stage is loaded; `cache` is empty, or keeps the complete parts of a cancelled load.
    """
    cache = cache or StageCache()
    if assignment.force_reload:
        cache.clear()
    try:
        with explained(resources.device):
            return _load(assignment, resources, progress or LoadProgress(), cache)
    except LoadCancelled:
        cache.end_stage()
        raise
    except DeviceFailedInLoad:
        raise
    except StageLoadError:
        cache.clear()
        free_memory(resources.device)
        raise


@contextmanager
def explained(device: torch.device) -> Iterator[None]:
    """Turn every error of a load on `device` into a StageLoadError with its reason."""
    try:
        yield
    except StageLoadError:
        raise
    except StepFault as fault:
        raise _load_error(fault.kind, f"{device}: {fault}") from fault
    except ServingError as error:
        raise StageLoadError(str(error)) from error
    except KernelsUnavailable as error:
        raise StageLoadError(str(error)) from error
    except (SourceUnavailable, CacheFull, CacheInUse) as error:
        raise TemporaryLoadError(str(error)) from error
    except (ValueError, OSError) as error:
        raise StageLoadError(f"{type(error).__name__}: {error}") from error
    except Exception as error:
        log.exception("loading failed")
        kind = fault_kind_of(error, device)
        raise _load_error(kind, f"{device}: {type(error).__name__}: {error}") from error


def _load_error(kind: StepFaultKind, reason: str) -> StageLoadError:
    """A failed device ends the process; other errors, such as too little memory, fail this load only."""
    return DeviceFailedInLoad(reason) if kind is StepFaultKind.DEVICE else StageLoadError(reason)


def _load(
    assignment: Assignment, resources: WorkerResources, progress: LoadProgress, cache: StageCache
) -> LoadedStage:
    started = time.perf_counter()
    cache.end_stage()
    files = resources.open(assignment, progress)
    checkpoint = _as_assigned(files.checkpoint, assignment)
    model = _new_model(assignment, checkpoint, resources)
    kv_bytes = kv_bytes_of(assignment, checkpoint.config)
    _check_memory(assignment, resources, model, kv_bytes=kv_bytes)
    if not assignment.role.has_head:
        cache.drop_grammars()
    read_ms = _read(model, checkpoint, files, progress, cache, resources)
    compute = _new_compute(assignment, checkpoint, model, cache, resources, kv_bytes=kv_bytes)
    executor = StepExecutor(assignment, compute)
    loaded = time.perf_counter()
    compute.record_graphs()
    _warm_up(executor, assignment, checkpoint.config, resources, cache)
    held_bytes = model.weight_bytes + kv_bytes
    largest_step_bytes = _check_peak(executor, assignment, checkpoint.config, resources, held_bytes)
    return LoadedStage(
        assignment=assignment,
        executor=executor,
        weight_bytes=model.weight_bytes,
        kv_bytes=kv_bytes,
        read_bytes=progress.read_bytes,
        load_ms=round((loaded - started) * 1e3),
        warmup_ms=round((time.perf_counter() - loaded) * 1e3),
        device=str(resources.device),
        kernels=model.kernels.choice.value,
        kernels_detail=str(model.kernels),
        source=_source(model, checkpoint, cache),
        fetched_bytes=files.fetched_bytes,
        pinned_bytes=_staging_bytes(assignment, checkpoint.config, resources.device) + model.table_bytes,
        largest_step_bytes=largest_step_bytes,
        read_ms=read_ms,
    )


def _as_assigned(stored: Checkpoint, assignment: Assignment) -> Checkpoint:
    """The checkpoint with the weights' formats and the positions of a plan. Raises like `_check_model`."""
    _check_model(assignment, stored)
    weighted = stored.with_weights(assignment.weights)
    holding = weighted.with_stored(holds_stored=assignment.holds_stored)
    return holding.with_long_rope(is_long=assignment.has_long_rope)


def _read(
    model: PipelineStage,
    checkpoint: Checkpoint,
    files: StageFiles,
    progress: LoadProgress,
    cache: StageCache,
    resources: WorkerResources,
) -> int:
    """Read what the stage needs and `cache` lacks; returns the milliseconds that it took."""
    started = time.perf_counter()
    copies = resources.new_copies(model.device)
    read = model.load(checkpoint, parts=cache.parts, progress=progress, prepare=files.prepare, copies=copies)
    took_ms = round((time.perf_counter() - started) * 1e3)
    free_memory(model.device)  # a garbage collection
    log.debug("%s; read_bytes=%d", read, read.num_bytes)
    return took_ms


def _warm_up(
    executor: StepExecutor,
    assignment: Assignment,
    config: Blueprint,
    resources: WorkerResources,
    cache: StageCache,
) -> None:
    budget_s = _warmup_budget_s(resources.device, has_warmed_up=cache.has_warmed_up)
    warm_up(executor, assignment, config, budget_s=budget_s)
    cache.has_warmed_up = True


def _new_model(assignment: Assignment, checkpoint: Checkpoint, resources: WorkerResources) -> PipelineStage:
    """The stage without its weights."""
    new_stage: Callable[..., PipelineStage] = DecoderStage
    if assignment.implementation is Implementation.TRANSFORMERS:
        new_stage = transformers_stage()
    elif not checkpoint.config.has_row:
        raise StageLoadError(f"{checkpoint.config.model_type!r} has no native layers")
    return new_stage(
        checkpoint.config,
        layer_begin=assignment.layer_begin,
        layer_end=assignment.layer_end,
        has_embeddings=assignment.role.has_embeddings,
        has_head=assignment.role.has_head,
        dtype=assignment.dtype,
        device=resources.device,
        choice=resources.kernels,
    )


def _new_compute(
    assignment: Assignment,
    checkpoint: Checkpoint,
    model: PipelineStage,
    cache: StageCache,
    resources: WorkerResources,
    *,
    kv_bytes: int,
) -> ModelCompute:
    """The computation of a loaded `model`, with all its buffers."""
    budget_bytes = _graph_bytes(assignment, resources, model, kv_bytes=kv_bytes)
    eos_token_ids = assignment.model_shape.eos_token_ids
    grammars = cache.grammars(checkpoint, eos_token_ids) if assignment.role.has_head else None
    pages = new_pages(assignment, checkpoint.config, model.device, num_spare=1 if budget_bytes else 0)
    graphs = None
    if budget_bytes:
        buckets, recorder = StepBuckets.of(model, assignment), CudaRecorder(model.device)
        graphs = StepGraphs(
            *(model, pages, buckets, recorder), wire_dtype=assignment.sent_dtype, budget_bytes=budget_bytes
        )
    transfers = _new_transfers(assignment, checkpoint.config, resources, graphs)
    return cache.begin_stage(
        model, pages, grammars, wire_dtype=assignment.sent_dtype, transfers=transfers, graphs=graphs
    )


def transformers_stage() -> Callable[..., PipelineStage]:
    """The class of stages that transformers computes. Raises StageLoadError without transformers.

    Imported by its name: it is built upon this package, and no other stage may load transformers.
    """
    try:
        module = importlib.import_module("transformers_stage.stage")
    except ImportError as error:
        raise StageLoadError(f"{TRANSFORMERS_ADVICE} ({error})") from error
    stage: Callable[..., PipelineStage] = module.TransformersStage
    return stage


def _source(model: PipelineStage, checkpoint: Checkpoint, cache: StageCache) -> LoadedFrom:
    assert cache.parts.origin is not None, "a loaded stage has parts"
    names = stage_tensor_names(
        model.config,
        model.layers.start,
        model.layers.stop,
        has_embeddings=model.has_embeddings,
        has_head=model.has_head,
    )
    return LoadedFrom(checkpoint=checkpoint, files=cache.parts.origin.files, tensors=tuple(names))


def _check_model(assignment: Assignment, checkpoint: Checkpoint) -> None:
    """Raises OtherCheckpoint or HandshakeMismatch with the coordinator's value and this worker's own."""
    if assignment.fingerprint != checkpoint.fingerprint:
        raise OtherCheckpoint(str(fingerprint_mismatch(checkpoint, expected=assignment.fingerprint)))
    num_layers = checkpoint.config.num_layers
    if assignment.layer_end > num_layers:
        raise HandshakeMismatch(
            "layer range",
            expected=f"[{assignment.layer_begin}, {assignment.layer_end})",
            got=f"a model of {num_layers} layers",
        )
    if assignment.role.has_embeddings != (assignment.layer_begin == 0) or assignment.role.has_head != (
        assignment.layer_end == num_layers
    ):
        raise HandshakeMismatch(
            f"role of layers [{assignment.layer_begin}, {assignment.layer_end}) of {num_layers}",
            expected=assignment.role.value,
            got="a range that begins or ends elsewhere",
        )
    num_groups = len(group_windows(checkpoint.config.cache_windows))
    if len(assignment.group_blocks) != num_groups:
        raise HandshakeMismatch(
            "number of block groups", expected=len(assignment.group_blocks), got=num_groups
        )
    if checkpoint.config.is_recurrent != (assignment.num_states > 0):
        raise HandshakeMismatch(
            "recurrent states",
            expected=f"{assignment.num_states} states",
            got=f"a model {'with' if checkpoint.config.is_recurrent else 'without'} recurrent layers",
        )


def fingerprint_mismatch(checkpoint: Checkpoint, *, expected: str) -> HandshakeMismatch:
    """The error for a local checkpoint whose fingerprint is not `expected`; names the parts that differ."""
    parts, got = differing_parts(expected, checkpoint.fingerprint), checkpoint.fingerprint
    where = f" in its {parts}" if parts else ""
    text = (
        f"checkpoint {checkpoint.path} differs from the coordinator's{where}: it has the "
        f"fingerprint {got}, expected {expected}: copy the coordinator's checkpoint to this host, or pass "
        "--model with the directory of a copy"
    )
    return HandshakeMismatch("fingerprint", expected=expected, got=got, text=text)


def _check_memory(
    assignment: Assignment, resources: WorkerResources, model: PipelineStage, *, kv_bytes: int
) -> None:
    weight_bytes = model.weight_bytes
    if model.table_bytes > resources.host_memory_bytes:
        raise StageLoadError(
            f"layers [{assignment.layer_begin}, {assignment.layer_end}) have {model.table_bytes} bytes"
            f" ({format_size(model.table_bytes)}) of tables of n-grams, which {resources.device} reads in"
            f" memory of the host; this worker may use {resources.host_memory_bytes} of it"
            f" ({format_size(resources.host_memory_bytes)}), 90 % of what was available at its start: use a"
            " host with more memory"
        )
    staging_bytes = _staging_bytes(assignment, model.config, resources.device)
    needed = weight_bytes + kv_bytes + staging_bytes
    if needed > resources.memory_bytes:
        staging = f", {staging_bytes} of buffers for copies" if staging_bytes else ""
        raise StageLoadError(
            f"layers [{assignment.layer_begin}, {assignment.layer_end}) need {weight_bytes} bytes of weights "
            f"and {kv_bytes} of KV ({assignment.num_blocks} blocks of {assignment.block_size} tokens)"
            f"{staging}, {needed} in all; this worker has {resources.memory_bytes}"
        )


def _check_peak(
    executor: StepExecutor,
    assignment: Assignment,
    config: Blueprint,
    resources: WorkerResources,
    held_bytes: int,
) -> int | None:
    """Run the largest step on a GPU and compare its memory with the plan's; `held_bytes` are weights and KV.

    Returns the bytes of all tensors in it, None on a CPU. Raises StageLoadError above the budget, with the
    numbers.
    """
    if (meter := resources.meter) is None:
        return None
    meter.restart_peak()
    run_largest_step(executor, assignment, config)
    found = meter.read()
    planned_bytes = held_bytes + _staging_bytes(assignment, config, resources.device)
    planned_bytes += assignment.activation_bytes + WORKSPACE_BYTES
    measured = (
        f"the largest step took {format_size(found.peak_bytes)} in tensors, the plan counts"
        f" {format_size(planned_bytes)}; {format_size(found.reserved_bytes)} are reserved,"
        f" {format_size(found.free_bytes)} free"
    )
    if found.peak_bytes > resources.memory_bytes:
        raise StageLoadError(
            f"{resources.device}: {measured}; this worker has {format_size(resources.memory_bytes)}: lower "
            "--max-step-tokens or --max-step-sequences of the coordinator, or raise --memory"
        )
    log.log(logging.WARNING if found.peak_bytes > planned_bytes else logging.INFO, "warm-up: %s", measured)
    return found.peak_bytes


def _staging_bytes(assignment: Assignment, config: Blueprint, device: torch.device) -> int:
    """Memory of a device for copies from and to the host, which has as much for them."""
    return 0 if device.type == "cpu" else assignment.staging_sizes(config.boundary).total_bytes


def _graph_bytes(
    assignment: Assignment, resources: WorkerResources, model: PipelineStage, *, kv_bytes: int
) -> int:
    """Memory that CUDA graphs may hold; 0 without them."""
    is_off = resources.cuda_graphs is CudaGraphs.OFF
    if is_off or model.device.type == "cpu" or not model.is_recordable:
        return 0
    needed = graph_bytes(
        model.config.kinds,
        model.config.hidden_size,
        model.dtype,
        max_step_tokens=assignment.max_step_tokens,
        max_step_sequences=assignment.max_step_sequences,
        sampled_tokens=model.config.vocab_size if model.has_head else 0,
    )
    staging_bytes = _staging_bytes(assignment, model.config, resources.device)
    left = resources.memory_bytes - model.weight_bytes - kv_bytes - staging_bytes
    if needed > left:
        log.warning(
            "no CUDA graphs: they need %d bytes, weights, KV and buffers for copies leave %d of %d: raise "
            "--memory, or lower --max-kv-tokens of the coordinator",
            *(needed, left, resources.memory_bytes),
        )
        return 0
    return needed


def _new_transfers(
    assignment: Assignment, config: Blueprint, resources: WorkerResources, graphs: StepGraphs | None
) -> StepTransfers:
    if resources.device.type == "cpu":
        return HostTransfers()
    sizes = assignment.staging_sizes(config.boundary)
    if graphs is not None:
        sizes = sizes.with_input(graphs.packed_bytes)
    queue, timeout_s = CudaQueue(resources.device), resources.step_timeout_s
    checksum = checksum_of(has_triton=has_triton_kernels(resources.kernels, resources.device))
    return StagingRing(queue, sizes, timeout_s=timeout_s, hops=resources.hop_memory, checksum=checksum)


def _warmup_budget_s(device: torch.device, *, has_warmed_up: bool) -> float:
    """GPUs compile kernels per shape, which must precede serving; CPUs only warm caches on a reload."""
    if device.type != "cpu":
        return 60.0
    return 0.1 if has_warmed_up else 1.0
