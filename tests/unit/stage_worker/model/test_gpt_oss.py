"""Experts of gpt-oss: 4-bit floats compute what the same weights in plain form do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoint import Checkpoint, DType, layer_sizes
from stage_worker.loading.reference import StreamedModel
from stage_worker.model.held_matrices import NibbleMatrix
from stage_worker.model.layer_weights import ExpertsWeights, allocate_layer
from stage_worker.model.row_orders import arrange_stacks
from stage_worker.model.weights import load_tensors
from tests.checkpoints import load_reference
from tests.families import make_family
from tests.gpt_oss import make_gpt_oss
from tests.kernels.held import unpacked
from tests.unit.stage_worker.model.pipeline import Pipeline
from tests.unit.stage_worker.model.test_families import spread_of
from tests.unit.stage_worker.model.test_parity import (
    compute_in_chunks,
    random_sequences,
    reference_logits,
)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_gpt_oss(tmp_path_factory.mktemp("gpt_oss"))


def test_packed_experts_compute_like_plain_ones_and_like_transformers(both: tuple[Path, Path]) -> None:
    plain, packed = map(Checkpoint.open, both)
    assert len(packed.packed) == 4 and not plain.packed
    sequence = random_sequences([40])
    found = compute_in_chunks(Pipeline(packed, cuts=(1,)), sequence, [7, 5, 1, 11])[0]
    (of_plain,) = compute_in_chunks(Pipeline(plain), random_sequences([40]), [7, 5, 1, 11])
    assert torch.equal(found, of_plain)
    assert spread_of(found, reference_logits(load_reference(both[0]), sequence[0].tokens)) < 1e-4


def test_square_matrices_of_experts_are_transposed(tmp_path: Path) -> None:
    """As those of published models, whose widths are equal."""
    directory = make_family(tmp_path / "model", "gpt_oss", intermediate_size=64)
    sequence = random_sequences([40])
    found = compute_in_chunks(Pipeline(Checkpoint.open(directory)), sequence, [7, 5, 1, 11])[0]
    assert spread_of(found, reference_logits(load_reference(directory), sequence[0].tokens)) < 1e-4


def test_the_streamed_reference_reads_packed_experts(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of rows that are odd, and end within matrices."""
    monkeypatch.setattr("stage_worker.loading.reference_memory.BLOCK_ELEMENTS", 64 * 7)
    found = []
    for directory in both:
        model = StreamedModel(Checkpoint.open(directory), DType.F32)
        with torch.inference_mode():
            *_, hidden = model.hidden_states([random_sequences([40])[0].tokens])
            found.append(torch.cat([block for _, block in model.logits(hidden)], dim=-1)[0])
    expected = reference_logits(load_reference(both[0]), random_sequences([40])[0].tokens)
    assert max(spread_of(logits, expected) for logits in found) < 1e-4


def test_held_experts_are_those_that_are_unpacked(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of gates and ups take turns in the file, and windows end within matrices."""
    unheld = Checkpoint.open(both[1])
    found = []
    for checkpoint in (unheld, unheld.with_stored(holds_stored=True)):
        weights, destinations = allocate_layer(checkpoint.config, 1, torch.empty)
        load_tensors(checkpoint, destinations, window_bytes=2 * 64 * 7)
        arrange_stacks(checkpoint.config, 1, destinations)
        assert isinstance(weights.feed_forward, ExpertsWeights)
        found.append(weights.feed_forward)
    for name in ("up", "down"):
        expected, matrix = (getattr(one, name) for one in found)
        assert torch.equal(unpacked(matrix), expected.flatten(0, 1))
    assert torch.equal(found[0].up_bias, found[1].up_bias)  # type: ignore[arg-type]
    held = layer_sizes(unheld.with_stored(holds_stored=True).config, DType.F32)
    saved = sum(
        4 * one.plan.rows * one.plan.columns - one.codes.numel() - one.scales.numel()
        for one in (found[1].up, found[1].down)
        if isinstance(one, NibbleMatrix)
    )
    assert layer_sizes(unheld.config, DType.F32)[1] - held[1] == saved
