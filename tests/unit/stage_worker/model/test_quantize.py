"""Matrices in fewer bits: how far they are rounded, and that products compute with exactly these weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint import Checkpoint, DType, UnsupportedModel, WeightFormat
from checkpoint.dtypes import INT4_GROUP
from stage_worker.backends.contract import KernelsUnavailable
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.kernels import Kernels
from stage_worker.model.layer_weights import TORCH_DTYPES, Int4Projection, Int8Projection
from stage_worker.model.quantize import int4_groups, int8_rows, rounded_to
from tests.checkpoints import make_checkpoint

PROJECTIONS = {WeightFormat.INT8: Int8Projection, WeightFormat.INT4: Int4Projection}
SHAPES = [(16, 32), (48, 96), (1040, 64), (2064, 160)]


def _weight(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    weight = torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)
    weight[3] = 0.0
    weight[5, :32] = 0.25
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", list(DType))
def test_int8_is_within_half_a_step_of_each_row(dtype: DType) -> None:
    weight = _weight(48, 96, TORCH_DTYPES[dtype])
    codes, scales = int8_rows(weight)
    assert codes.abs().max() == 127 and scales.dtype is weight.dtype
    step = weight.float().abs().amax(dim=1, keepdim=True) / 127
    # A scale that is rounded down clips the largest weight by up to 2^-9 of it.
    allowed = 0.5 * step + step * 127 * 2**-8 + 1e-12
    assert bool(((rounded_to(WeightFormat.INT8, weight) - weight.float()).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", list(DType))
def test_int4_is_within_half_a_step_of_each_group(dtype: DType) -> None:
    weight = _weight(48, 96, TORCH_DTYPES[dtype])
    codes, scales, offsets = int4_groups(weight)
    assert (int(codes.min()), int(codes.max())) == (0, 15)
    assert scales.shape == offsets.shape == (48, 96 // INT4_GROUP)
    groups = weight.float().view(48, -1, INT4_GROUP)
    low, high = groups.aminmax(dim=2, keepdim=True)
    allowed = (high - low) / 30 + torch.maximum(low.abs(), high.abs()) * 2**-6 + 1e-6
    errors = (rounded_to(WeightFormat.INT4, weight).view(groups.shape) - groups).abs()
    assert bool((errors <= allowed).all())
    assert float(errors[3].max()) == 0.0


def test_int4_is_more_exact_with_offsets_than_int8_is_coarse() -> None:
    """The formats differ as they should: a step of int4 is some ten times one of int8."""
    weight = _weight(64, 128, torch.float32)
    error8, error4 = (
        float((rounded_to(form, weight) - weight).norm() / weight.norm()) for form in WeightFormat
    )
    assert 0.002 < error8 < 0.01 and 0.04 < error4 < 0.1


@pytest.mark.parametrize("form", WeightFormat)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32])
def test_products_are_those_of_the_rounded_weights(
    form: WeightFormat, shape: tuple[int, int], dtype: DType
) -> None:
    weight = _weight(*shape, TORCH_DTYPES[dtype])
    bias = torch.linspace(-1, 1, shape[0]).to(weight.dtype)
    exact_weight, exact_bias = rounded_to(form, weight).double(), bias.double()
    projection = PROJECTIONS[form](weight, bias)
    bound = 2**-7 if dtype is DType.BF16 else 2e-6
    for rows in (1, 2, 5, 33):
        x = torch.randn(rows, shape[1]).to(weight.dtype)
        residual = torch.randn(rows, shape[0]).to(weight.dtype)
        exact = x.double() @ exact_weight.t() + exact_bias
        for found, expected in (
            (projection(x), exact),
            (projection.added_to(residual, x), exact + residual.double()),
        ):
            errors = (found.double() - expected).norm(dim=1)
            assert bool((errors <= bound * expected.norm(dim=1)).all())


@pytest.mark.parametrize("form", WeightFormat)
@pytest.mark.parametrize("dtype", list(DType))
def test_matrix_bytes_is_the_allocated_memory(form: WeightFormat, dtype: DType) -> None:
    for rows, columns in SHAPES:
        projection = PROJECTIONS[form](_weight(rows, columns, TORCH_DTYPES[dtype]), None)
        held = [getattr(projection, name) for name in type(projection).__slots__]
        size = sum(tensor.untyped_storage().nbytes() for tensor in held if tensor is not None)
        assert size == form.matrix_bytes(rows, columns, dtype)


@pytest.mark.parametrize("form", WeightFormat)
def test_weight_bytes_of_a_stage_count_rounded_matrices(form: WeightFormat, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen2", num_layers=3, intermediate_size=96, dtype="bfloat16")
    plain = Checkpoint.open(tmp_path)
    sizes = []
    for checkpoint in (plain, plain.with_weights(form)):
        stage = DecoderStage(
            checkpoint.config,
            layer_begin=0,
            layer_end=2,
            has_embeddings=True,
            has_head=False,
            dtype=DType.BF16,
        )
        stage.load(checkpoint)
        sizes.append(stage.weight_bytes)
    matrices = [(128, 64), (64, 64), (192, 64), (64, 96)]
    saved = sum(
        2 * rows * columns - form.matrix_bytes(rows, columns, DType.BF16) for rows, columns in matrices
    )
    assert sizes[0] - sizes[1] == 2 * saved


def test_matrices_without_whole_groups_are_refused_for_int4_only(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, "llama", num_layers=1, intermediate_size=112))
    with pytest.raises(UnsupportedModel, match=r"mlp\.down_proj\.weight has 64 and 112: use int8, or no"):
        checkpoint.with_weights(WeightFormat.INT4)
    assert checkpoint.with_weights(WeightFormat.INT8).config.weight_format is WeightFormat.INT8


def test_a_gpu_refuses_rounded_weights(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, "llama", num_layers=1))
    config = checkpoint.with_weights(WeightFormat.INT8).config
    with pytest.raises(KernelsUnavailable, match="--quantize int8 is for workers on a CPU, not on cuda:0"):
        Kernels.of(config, torch.device("cuda:0"), torch.bfloat16)
