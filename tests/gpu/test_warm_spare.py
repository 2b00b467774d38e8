"""A spare keeps weights on the host as the GPU has them, and takes over by copies alone."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import Checkpoint, WeightFormat
from stage_worker.assignment import Assignment, Prefetch, PrefetchedLayers
from stage_worker.backends.backend import LoadProgress, StageLoadError
from stage_worker.loading.stage_loader import StageCache, WorkerResources, load_stage
from stage_worker.loading.warm_spare import keep_warm
from stage_worker.model.host_weights import HostWeights
from stage_worker.model.layer_weights import allocate_layer
from stage_worker.model.weight_reads import WeightReads
from stage_worker.model.weights import load_tensors
from tests.checkpoints import make_checkpoint
from tests.gpu.devices import queue_of
from tests.quantized import FORMATS, write_quantized
from tests.unit.stage_worker.model.test_weight_reads import tensors_of
from tests.unit.stage_worker.test_reload import LAYERS, assigned

pytestmark = pytest.mark.gpu

MUCH = 1 << 30


def wanted(assignment: Assignment) -> Prefetch:
    layers = PrefetchedLayers(layer_begin=0, layer_end=LAYERS, has_embeddings=True, has_head=True)
    return Prefetch(
        model=None,
        layers=(layers,),
        fingerprint=assignment.fingerprint,
        dtype=assignment.dtype,
        model_directory=assignment.model_directory,
        weights=assignment.weights,
    )


@pytest.mark.parametrize("weights", [None, *WeightFormat], ids=lambda weights: weights and weights.value)
@pytest.mark.parametrize("pinned_limit_bytes", [0, MUCH], ids=["pageable", "pinned"])
def test_a_takeover_copies_from_the_host_and_reads_no_weight(
    weights: WeightFormat | None,
    pinned_limit_bytes: int,
    prepared: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Skipped with the reason of a worker that does not serve the format on this device."""
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    directory = make_checkpoint(tmp_path / "model", "llama", num_layers=LAYERS, **sizes)
    assignment = replace(assigned(directory, 0, LAYERS), weights=weights)
    resources = WorkerResources(
        device=prepared,
        memory_bytes=2 << 30,
        model_directory=None,
        new_copies=queue_of,
        pinned_limit_bytes=pinned_limit_bytes,
    )
    cache = StageCache()
    try:
        keep_warm(wanted(assignment), resources, LoadProgress(), cache, limit_bytes=MUCH)
    except StageLoadError as error:
        pytest.skip(str(error))
    assert not cache.parts.layers and len(cache.parts.on_host) == LAYERS + 3
    assert bool(cache.parts.pinned_bytes) is bool(pinned_limit_bytes)
    reads = count_reads(monkeypatch)
    loaded = load_stage(assignment, resources, LoadProgress(), cache)
    assert loaded.read_bytes == sum(reads) == 0
    assert set(cache.parts.layers) == set(range(LAYERS)) and not cache.parts.on_host


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    preadv, found = os.preadv, list[int]()

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        found.append(preadv(descriptor, buffers, offset))
        return found[-1]

    monkeypatch.setattr(os, "preadv", counted)
    return found


@pytest.mark.parametrize("pinned_limit_bytes", [0, MUCH], ids=["pageable", "pinned"])
@pytest.mark.parametrize("form", ["awq", "gptq", "fp8-block-bf16"])
def test_stored_forms_come_back_to_the_device_bit_by_bit(
    form: str, pinned_limit_bytes: int, prepared: torch.device, tmp_path: Path
) -> None:
    write_quantized(tmp_path, FORMATS[form], seed=5)
    checkpoint = Checkpoint.open(tmp_path).with_stored(holds_stored=True)
    weights, destinations = allocate_layer(
        checkpoint.config, 0, lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device=prepared)
    )
    queue = queue_of(prepared)
    with WeightReads(queue) as reads:
        load_tensors(checkpoint, destinations, reads=reads)
        expected = [tensor.cpu() for tensor in tensors_of(weights)]
        host = HostWeights.copied(weights, queue, pinned_limit_bytes=pinned_limit_bytes)
        del weights, destinations
        found = host.restored(prepared, reads, lambda: None)
    for one, other in zip(tensors_of(found), expected, strict=True):
        assert one.device == prepared and torch.equal(one.cpu(), other)
