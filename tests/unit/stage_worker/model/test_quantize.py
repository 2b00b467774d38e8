"""Matrices in fewer bits: how far they are rounded, and that products compute with exactly these weights."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint import Checkpoint, DType, UnsupportedModel, WeightFormat
from checkpoint.dtypes import INT4_GROUP
from stage_worker.backends.contract import KernelChoice, KernelsUnavailable
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.kernels import Kernels, ProductMethod, missing_because
from stage_worker.model.layer_weights import TORCH_DTYPES
from stage_worker.model.projections import CompiledProjection, Projection, project
from stage_worker.model.quantize import int4_groups, int8_rows, rounded_to
from tests.checkpoints import make_checkpoint
from tests.quantized import FORMATS, write_quantized
from tests.unit.stage_worker.model.pipeline import Pipeline, Running

METHODS = {
    ProductMethod.INT8: WeightFormat.INT8,
    ProductMethod.INT4: WeightFormat.INT4,
    ProductMethod.COMPILED_INT4: WeightFormat.INT4,
}
CASES = [
    (method, dtype)
    for method in METHODS
    for dtype in ([DType.BF16] if method is ProductMethod.COMPILED_INT4 else DType)
]
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


def _projection(method: ProductMethod, weight: Tensor, bias: Tensor | None) -> Projection:
    if method is ProductMethod.COMPILED_INT4:
        _skip_without_kernels()
    return project(weight, bias, method)


def _skip_without_kernels() -> None:
    if reason := missing_because():
        pytest.skip(reason)


@pytest.mark.parametrize(("method", "dtype"), [case for case in CASES if case[1] is not DType.F16])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_rounded_weights(
    method: ProductMethod, shape: tuple[int, int], dtype: DType
) -> None:
    weight = _weight(*shape, TORCH_DTYPES[dtype])
    bias = torch.linspace(-1, 1, shape[0]).to(weight.dtype)
    exact_weight, exact_bias = rounded_to(METHODS[method], weight).double(), bias.double()
    projection = _projection(method, weight, bias)
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


@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_int4_products_round_once(shape: tuple[int, int]) -> None:
    """Weights are not rounded to bfloat16, and offsets far from zero lose nothing."""
    weight = _weight(*shape, torch.bfloat16) + 3
    projection = _projection(ProductMethod.COMPILED_INT4, weight, None)
    x = torch.randn(7, shape[1]).bfloat16()
    exact = x.double() @ rounded_to(WeightFormat.INT4, weight).double().t()
    found = projection(x)
    assert bool(((found.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-4).all())
    for row in range(7):  # alone, and behind another number of rows
        assert torch.equal(projection(x[row : row + 1]), found[row : row + 1])
        assert torch.equal(projection(x[: row + 1])[-1], found[row])


def test_compiled_int4_products_take_some_columns_of_rows_and_no_part_of_a_group() -> None:
    _skip_without_kernels()
    weight, wide = torch.randn(80, 64).bfloat16(), torch.randn(9, 96).bfloat16()
    projection = project(weight, None, ProductMethod.COMPILED_INT4)
    assert torch.equal(projection(wide[::2, 32:]), projection(wide[::2, 32:].contiguous()))
    assert projection(wide[:0, 32:]).shape == (0, 80)
    with pytest.raises(ValueError, match="80 x 48 elements for groups of 32"):
        project(weight[:, :48].contiguous(), None, ProductMethod.COMPILED_INT4)


@pytest.mark.parametrize("width", [16, 48, 1040])
def test_a_gated_int4_product_is_the_gate_of_the_plain_one(width: int) -> None:
    _skip_without_kernels()
    weight, bias = torch.randn(2 * width, 96).bfloat16(), torch.randn(2 * width).bfloat16()
    x = torch.randn(9, 96).bfloat16()
    method = ProductMethod.COMPILED_INT4
    gated = CompiledProjection(weight, bias, is_gated=True, products=method)(x)
    gate, up = project(weight, bias, method)(x).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(gated, expected, rtol=2**-7, atol=1e-5)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(CompiledProjection(weight, bias, is_gated=True, products=method)(x), gated)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_stage_computes_int4_alike_with_compiled_products_and_torch(family: str, tmp_path: Path) -> None:
    """One has its gate within the product, the other a gate that compiled products lack."""
    _skip_without_kernels()
    make_checkpoint(tmp_path, family, num_layers=2, intermediate_size=96, dtype="bfloat16")
    checkpoint = Checkpoint.open(tmp_path).with_weights(WeightFormat.INT4)
    chosen = Kernels.of(checkpoint.config, torch.device("cpu"), torch.bfloat16)
    assert chosen.layer_products is ProductMethod.COMPILED_INT4
    of_torch = replace(chosen, quantized=ProductMethod.INT4)
    tokens = torch.randint(0, 128, (20,), generator=torch.Generator().manual_seed(3)).tolist()
    found, expected = (
        torch.cat(_logits(Pipeline(checkpoint, kernels=kernels), tokens)) for kernels in (chosen, of_torch)
    )
    assert float((found - expected).norm() / expected.norm()) < 0.02


def _logits(pipeline: Pipeline, tokens: list[int]) -> list[Tensor]:
    """A prompt and two steps of one token."""
    running = Running(tokens)
    return [pipeline.step([(running, count)])[0] for count in (len(tokens) - 2, 1, 1)]


def test_other_dtypes_and_plain_kernels_compute_int4_by_torch(tmp_path: Path) -> None:
    config = Checkpoint.open(make_checkpoint(tmp_path, "llama", num_layers=1, intermediate_size=96)).config
    cpu, plain = torch.device("cpu"), KernelChoice.PLAIN
    for form, method in ((WeightFormat.INT8, ProductMethod.INT8), (WeightFormat.INT4, ProductMethod.INT4)):
        quantized = config.with_weights(form)
        assert Kernels.of(quantized, cpu, torch.float32).layer_products is method
        assert Kernels.of(quantized, cpu, torch.bfloat16, plain).layer_products is method


@pytest.mark.parametrize(("method", "dtype"), CASES)
def test_matrix_bytes_is_the_allocated_memory(method: ProductMethod, dtype: DType) -> None:
    for rows, columns in SHAPES:
        projection = _projection(method, _weight(rows, columns, TORCH_DTYPES[dtype]), None)
        held = [getattr(projection, name) for name in type(projection).__slots__]
        size = sum(given.untyped_storage().nbytes() for given in held if isinstance(given, Tensor))
        if method is ProductMethod.COMPILED_INT4:
            rows = -(-rows // 64) * 64  # whole panels
        assert size == METHODS[method].matrix_bytes(rows, columns, dtype)


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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """One that Triton kernels support."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    return torch.device("cuda:0")


@pytest.mark.parametrize(
    ("form", "products"),
    [(WeightFormat.INT8, ProductMethod.TRITON_INT8), (WeightFormat.INT4, ProductMethod.TRITON_INT4)],
)
def test_a_gpu_multiplies_by_rounded_weights_with_triton(
    form: WeightFormat, products: ProductMethod, gpu: torch.device, tmp_path: Path
) -> None:
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, "llama", num_layers=1, intermediate_size=96))
    found = Kernels.of(checkpoint.with_weights(form).config, gpu, torch.bfloat16)
    assert found.layer_products is products
    assert found.products is ProductMethod.TRITON_ROWS


@pytest.mark.usefixtures("gpu")
def test_a_gpu_without_triton_kernels_refuses_rounded_weights(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, "llama", num_layers=1))
    config = checkpoint.with_weights(WeightFormat.INT8).config
    reason = "--quantize int8 needs Triton kernels on cuda:0: chosen with --kernels plain"
    with pytest.raises(KernelsUnavailable, match=reason):
        Kernels.of(config, torch.device("cuda:0"), torch.bfloat16, KernelChoice.PLAIN)


def test_only_a_gpu_with_triton_kernels_holds_weights_as_they_are_stored(
    gpu: torch.device, tmp_path: Path
) -> None:
    write_quantized(tmp_path, FORMATS["gptq"])
    config = Checkpoint.open(tmp_path).config.with_stored(holds_stored=True)
    found = Kernels.of(config, gpu, torch.bfloat16)
    assert found.holds_stored
    assert found.layer_products is ProductMethod.TRITON_ROWS
    assert "quantised weights as stored" in str(found)
    assert found != Kernels.of(config.with_stored(holds_stored=False), gpu, torch.bfloat16)
    with pytest.raises(
        KernelsUnavailable, match="as they are stored needs Triton kernels on cpu: it is no GPU"
    ):
        Kernels.of(config, torch.device("cpu"), torch.bfloat16)
    with pytest.raises(KernelsUnavailable, match="on cuda:0: chosen with --kernels plain"):
        Kernels.of(config, gpu, torch.bfloat16, KernelChoice.PLAIN)
