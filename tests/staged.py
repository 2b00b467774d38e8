"""Executors of stages whose steps go through a ring of staging memory, as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from checkpoint import Blueprint, Checkpoint
from stage_worker.assignment import Assignment
from stage_worker.backends.model_compute import ModelCompute
from stage_worker.backends.transfers import DeviceQueue, StagingRing
from stage_worker.executor import StepExecutor
from stage_worker.loading.stage_loader import new_pages
from stage_worker.model import DecoderStage
from stage_worker.model.kernels import Kernels


def staged_executor(
    assignment: Assignment,
    queue: DeviceQueue,
    device: torch.device,
    new_kernels: Callable[[Blueprint], Kernels] | None = None,
) -> StepExecutor:
    """The stage on `device`, where `queue` copies; it begins with epoch 0."""
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
    ring = StagingRing(queue, assignment.staging_sizes(checkpoint.config.boundary))
    pages = new_pages(assignment, checkpoint.config, device)
    return StepExecutor(assignment, ModelCompute(model, pages, transfers=ring))
