"""Executors of stages whose steps go through a ring of staging memory, as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from checkpoint import Blueprint, Checkpoint
from stage_worker.assignment import Assignment
from stage_worker.backends.hop_memory import HopMemory
from stage_worker.backends.model_compute import ModelCompute
from stage_worker.backends.step_graphs import GraphRecorder, StepGraphs
from stage_worker.backends.transfers import DeviceQueue, StagingRing
from stage_worker.executor import StepExecutor
from stage_worker.loading.stage_pages import new_pages
from stage_worker.model import DecoderStage
from stage_worker.model.kernels import Kernels
from stage_worker.model.step_buckets import StepBuckets


def staged_executor(
    assignment: Assignment,
    queue: DeviceQueue,
    device: torch.device,
    new_kernels: Callable[[Blueprint], Kernels] | None = None,
    *,
    recorder: GraphRecorder | None = None,
    budget_bytes: int = 1 << 30,
    timeout_s: float = 60.0,
    hops: HopMemory | None = None,
) -> StepExecutor:
    """The stage on `device`, where `queue` copies; it begins with epoch 0. With `recorder`, it has graphs.

    A step waits up to `timeout_s` for memory. Hidden states may be in memory of `hops`.
    """
    checkpoint = Checkpoint.open(Path(assignment.model_directory)).with_weights(assignment.weights)
    checkpoint = checkpoint.with_stored(holds_stored=assignment.holds_stored)
    model = DecoderStage(
        checkpoint.config,
        layer_begin=assignment.layer_begin,
        layer_end=assignment.layer_end,
        has_embeddings=assignment.role.has_embeddings,
        has_head=assignment.role.has_head,
        dtype=assignment.dtype,
        device=device,
        kernels=None if new_kernels is None else new_kernels(checkpoint.config),
    )
    model.load(checkpoint, copies=queue)
    pages = new_pages(assignment, checkpoint.config, device, num_spare=1)
    graphs, sizes = None, assignment.staging_sizes(checkpoint.config.boundary)
    if recorder is not None:
        buckets = StepBuckets.of(model, assignment)
        graphs = StepGraphs(
            *(model, pages, buckets, recorder), wire_dtype=assignment.sent_dtype, budget_bytes=budget_bytes
        )
        sizes = sizes.with_input(graphs.packed_bytes)
    ring = StagingRing(queue, sizes, timeout_s=timeout_s, hops=hops)
    compute = ModelCompute(model, pages, wire_dtype=assignment.sent_dtype, transfers=ring, graphs=graphs)
    return StepExecutor(assignment, compute)
