"""Layers in memory of a worker without a stage, for the stages that it would get if a worker were lost.

On a CPU they are what a stage computes with. For a GPU they are in memory of the host, beside `--memory`, in
the form that the GPU computes with, so that a takeover only copies them. At most half of the host's available
memory is pinned for them, since the system cannot page it out or use it otherwise. What exceeds that is
copied by the readers, through the pinned windows of a load. A table of n-grams, which the GPU will read
there, is always page-locked, and leaves less for the others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import psutil
import torch

from checkpoint import Blueprint, DType, layer_sizes
from checkpoint.held import collapse_bytes
from checkpoint.implementation import Implementation
from checkpoint.tensors import final_norm_tensors, head_tensor
from stage_worker.assignment import Prefetch, PrefetchedLayers
from stage_worker.backends.backend import LoadCancelled, LoadProgress, OtherCheckpoint, StageLoadError
from stage_worker.backends.torch_device import free_memory
from stage_worker.loading.stage_loader import (
    StageCache,
    WorkerResources,
    explained,
    fingerprint_mismatch,
)
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.parts import NeededParts
from wire.sizes import format_size

log = logging.getLogger(__name__)


def check_warm_spare(limit_bytes: int, memory_bytes: int, device: torch.device) -> None:
    """Raise ValueError unless a worker on `device` with this budget can keep so much."""
    if device.type != "cpu":
        host_bytes = int(psutil.virtual_memory().total)
        if limit_bytes > host_bytes:
            raise ValueError(
                f"--warm-spare is {limit_bytes} bytes of memory of the host, which has {host_bytes}: lower it"
            )
    elif limit_bytes > memory_bytes:
        raise ValueError(
            f"--warm-spare is {limit_bytes} bytes, of a budget of {memory_bytes}: lower it or raise --memory"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmParts:
    """Parts of stages within a limit: their bytes, and of how many of the stages they are all parts."""

    needed: NeededParts
    num_bytes: int
    num_complete: int


def choose_parts(
    config: Blueprint, dtype: DType, stages: Sequence[PrefetchedLayers], *, limit_bytes: int
) -> WarmParts | None:
    """The parts of the first stages, until one does not fit into `limit_bytes`; None if none fits."""
    chosen = NeededParts(layers=(), has_embeddings=False, has_head=False, is_tied=config.tie_word_embeddings)
    num_complete = 0
    for stage in stages:
        for grown in _grown(chosen, stage):
            if _num_bytes(config, dtype, grown) > limit_bytes:
                return _found(config, dtype, chosen, num_complete)
            chosen = grown
        num_complete += 1
    return _found(config, dtype, chosen, num_complete)


def _found(config: Blueprint, dtype: DType, chosen: NeededParts, num_complete: int) -> WarmParts | None:
    num_bytes = _num_bytes(config, dtype, chosen)
    if not num_bytes:
        return None
    return WarmParts(needed=chosen, num_bytes=num_bytes, num_complete=num_complete)


def _grown(chosen: NeededParts, stage: PrefetchedLayers) -> Iterator[NeededParts]:
    """`chosen` with one more part of the stage each time."""
    for layer in range(stage.layer_begin, stage.layer_end):
        if layer not in chosen.layers:
            chosen = replace(chosen, layers=tuple(sorted((*chosen.layers, layer))))
            yield chosen
    if stage.has_embeddings and not chosen.has_embeddings:
        chosen = replace(chosen, has_embeddings=True)
        yield chosen
    if stage.has_head and not chosen.has_head:
        yield replace(chosen, has_head=True)


def _num_bytes(config: Blueprint, dtype: DType, parts: NeededParts) -> int:
    """Size in memory; a tied head beside the embeddings counts once."""
    matrices = {config.names.embeddings} if parts.has_embeddings else set()
    rows = num_bytes = 0
    if parts.has_head:
        num_bytes = collapse_bytes(config, dtype)
        matrices.add(head_tensor(config))
        rows = len(final_norm_tensors(config))
    num_bytes += (len(matrices) * config.vocab_size + rows) * config.hidden_size * dtype.size_bytes
    sizes = layer_sizes(config, dtype)
    return num_bytes + sum(sizes[layer] for layer in parts.layers)


def keep_warm(
    order: Prefetch,
    resources: WorkerResources,
    progress: LoadProgress,
    cache: StageCache,
    *,
    limit_bytes: int,
) -> int:
    """Read the parts that `order` wants and `cache` lacks, on the compute thread; drop all others.

    Ends the loaded stage, unless it was cancelled before it began. A later load takes its parts from `cache`,
    if they are of the same files, dtype and weight format. Returns the bytes of pinned memory.

    Raises:
        LoadCancelled: `cache` has the complete parts.
        StageLoadError: `cache` is empty.
    """
    progress.advance(0)  # a load that cancelled it may have ended already
    cache.end_stage()
    fetched = progress.fetch_detail
    try:
        with explained(resources.device):
            text = _read(order, resources, progress, cache, limit_bytes=limit_bytes)
    except LoadCancelled:
        raise
    except StageLoadError:
        drop_warm(resources, cache)
        raise
    progress.fetch_detail = "; ".join(filter(None, (fetched, text)))
    log.info("spare layers are warm: %s", text)
    return cache.parts.pinned_bytes


def drop_warm(resources: WorkerResources, cache: StageCache) -> None:
    """Free all parts of a worker without a stage, on the compute thread."""
    cache.clear()
    free_memory(resources.device)


def _read(
    order: Prefetch,
    resources: WorkerResources,
    progress: LoadProgress,
    cache: StageCache,
    *,
    limit_bytes: int,
) -> str:
    """Return what is in memory, for people."""
    if order.implementation is Implementation.TRANSFORMERS:
        raise StageLoadError("layers of transformers are not kept in memory")
    files = resources.open_model(order.model, order.model_directory, progress, has_head=order.has_head)
    stored = files.checkpoint
    if stored.fingerprint != order.fingerprint:
        raise OtherCheckpoint(str(fingerprint_mismatch(stored, expected=order.fingerprint)))
    held = stored.with_weights(order.weights).with_stored(holds_stored=order.holds_stored)
    checkpoint = held.with_long_rope(is_long=order.has_long_rope)
    warm = choose_parts(checkpoint.config, order.dtype, order.layers, limit_bytes=limit_bytes)
    if warm is None:
        cache.clear()
        return f"no layer is kept in memory: --warm-spare is {format_size(limit_bytes)}"
    stage = _first_stage(order, resources, checkpoint.config)
    if (copies := resources.new_copies(resources.device)) is None:
        stage.load_parts(checkpoint, cache.parts, warm.needed, progress=progress, prepare=files.prepare)
    else:
        stage.keep_on_host(
            *(checkpoint, cache.parts, warm.needed, copies),
            pinned_limit_bytes=resources.pinned_limit_bytes,
            progress=progress,
            prepare=files.prepare,
        )
    free_memory(resources.device)
    pinned = "" if copies is None else f" of the host ({format_size(cache.parts.pinned_bytes)} pinned)"
    return (
        f"keeps {format_size(warm.num_bytes)} in memory{pinned}, all layers of {warm.num_complete} of "
        f"{len(order.layers)} possible re-plans"
    )


def _first_stage(order: Prefetch, resources: WorkerResources, config: Blueprint) -> DecoderStage:
    """The most needed stage, in whose form all parts are kept."""
    first = order.layers[0]
    return DecoderStage(
        config,
        layer_begin=first.layer_begin,
        layer_end=first.layer_end,
        has_embeddings=first.has_embeddings,
        has_head=first.has_head,
        dtype=order.dtype,
        device=resources.device,
        choice=resources.kernels,
    )
