"""Weights reach memory of a GPU after the computation that still uses it, however late that is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint import Checkpoint
from stage_worker.model import held_matrices
from stage_worker.model.layer_weights import allocate_layer
from stage_worker.model.weight_reads import WeightPiece, WeightReads
from stage_worker.model.weights import load_tensors
from tests.gpu.devices import queue_of
from tests.quantized import FORMATS, write_quantized
from tests.unit.stage_worker.model.test_held_loading import loaded
from tests.unit.stage_worker.model.test_weight_reads import tensors_of

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 50_000_000
"""About 30 ms, hundreds of times as long as a copy of these weights."""


def delay(device: torch.device) -> None:
    """Later computation of the device begins late; a CPU has computed when a call returns."""
    if device.type == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]


def test_memory_of_earlier_computation_is_overwritten_after_it(prepared: torch.device) -> None:
    def fill(memory: Tensor) -> None:
        memory.fill_(7)

    size = 1 << 20
    with WeightReads(queue_of(prepared)) as reads:
        memory = torch.zeros(size, dtype=torch.uint8, device=prepared)
        delay(prepared)
        seen, place = memory.clone(), memory.data_ptr()
        del memory
        target = torch.empty(size, dtype=torch.uint8, device=prepared)
        assert prepared.type == "cpu" or target.data_ptr() == place, "memory is not used again"
        assert list(reads.copy([WeightPiece(target, fill, 1)])) == [1]
    assert not seen.any()
    assert bool((target == 7).all())


@pytest.mark.parametrize("form", ["nvfp4", "modelopt-nvfp4", "mxfp4", "awq", "gptq"])
def test_codes_that_are_packed_late_are_those_of_the_files(
    form: str, prepared: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed_nibbles = held_matrices.packed_nibbles

    def packed_late(codes: Tensor, half: int) -> Tensor:
        delay(prepared)
        return packed_nibbles(codes, half)

    _, expected, _ = loaded(tmp_path / "on the host", FORMATS[form], 0)
    write_quantized(tmp_path / "on the device", FORMATS[form], seed=5)
    checkpoint = Checkpoint.open(tmp_path / "on the device").with_stored(holds_stored=True)
    weights, destinations = allocate_layer(
        checkpoint.config, 0, lambda *shape: torch.empty(shape, dtype=torch.float32, device=prepared)
    )
    monkeypatch.setattr(held_matrices, "packed_nibbles", packed_late)
    with WeightReads(queue_of(prepared)) as reads:
        load_tensors(checkpoint, destinations, reads=reads)
    for one, other in zip(tensors_of(weights), tensors_of(expected), strict=True):
        assert torch.equal(one.cpu(), other)
