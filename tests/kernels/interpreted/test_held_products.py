"""Products with 4-bit and 8-bit weights equal the CPU's operators, and float64 with the same weights.

float32 to 1e-5, float16 to 2e-3, bfloat16 to one step of the last bit, relative to the largest result.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from checkpoint.held import HeldBytes, HeldNibbles
from stage_worker.model.held_matrices import ByteMatrix, NibbleMatrix, packed_nibbles
from stage_worker.model.projections import Int4Projection, Int8Projection
from stage_worker.model.triton_kernels.byte_products import byte_product
from stage_worker.model.triton_kernels.nibble_products import nibble_product
from tests.kernels.held import E2M1, unpacked
from tests.kernels.interpreted.paged import random

pytestmark = pytest.mark.kernels

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-8}
ROW_COUNTS = [0, 1, 3, 16, 17, 33, 64, 65, 257]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def integers(low: int, high: int, *size: int, seed: int = 5) -> Tensor:
    return torch.randint(low, high, size, generator=generator(seed))


def assert_product(found: Tensor, x: Tensor, weights: Tensor, *added: Tensor) -> None:
    """`weights` float64 [rows, columns]; `added` are a bias and a residual."""
    expected = x.double() @ weights.t() + sum(one.double() for one in added)
    assert found.dtype is x.dtype
    assert found.shape == expected.shape
    if expected.numel():
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert float(error) <= TOLERANCES[x.dtype]


def nibble_matrix(
    rows: int, columns: int, group: int, *, has_zeros: bool = False, has_order: bool = False
) -> tuple[NibbleMatrix, Tensor]:
    """A matrix of random codes, and its weights in float64."""
    plan = HeldNibbles(rows=rows, columns=columns, group=group, has_zeros=has_zeros, has_order=has_order)
    codes = integers(0, 16, rows, columns).to(torch.uint8)
    scales = random(plan.num_groups, rows, seed=3).abs() / 8 + 0.01
    zeros = integers(0, 17, plan.num_groups, rows, seed=6).to(torch.uint8) if has_zeros else None
    order = torch.randperm(columns, generator=generator(9)) if has_order else None
    matrix = NibbleMatrix(
        plan=plan,
        codes=packed_nibbles(codes, plan.half),
        scales=scales,
        zeros=zeros,
        order=None if order is None else order.int()[None],
    )
    groups = torch.arange(columns) // (group or columns)
    zero = 8 if zeros is None else zeros.double().t()[:, groups]
    weights = (codes.double() - zero) * scales.double().t()[:, groups]
    if order is not None:
        weights = torch.zeros_like(weights).index_copy_(1, order, weights)
    return matrix, weights


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_rows", ROW_COUNTS)
def test_4_bit_products_of_any_number_of_rows(num_rows: int, dtype: torch.dtype) -> None:
    matrix, weights = nibble_matrix(96, 256, 64, has_zeros=True)
    x = random(num_rows, 256, dtype=dtype)
    assert_product(nibble_product(x, matrix), x, weights)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("has_order", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "group"),
    [
        *((70, 160, 32), (70, 96, 16), (33, 192, 48), (40, 384, 128), (24, 100, 0), (24, 8, 0), (65, 320, 0)),
        *((40, 200, 128), (40, 200, 32), (40, 66, 64), (1, 40, 16)),
    ],
)
def test_4_bit_products_of_groups_that_end_unevenly(
    rows: int, columns: int, group: int, has_order: bool, has_zeros: bool, dtype: torch.dtype
) -> None:
    matrix, weights = nibble_matrix(rows, columns, group, has_zeros=has_zeros, has_order=has_order)
    x = random(5, columns, dtype=dtype)
    assert_product(nibble_product(x, matrix), x, weights)


def float_matrix(rows: int, columns: int, *, is_nv: bool) -> tuple[NibbleMatrix, Tensor]:
    """A matrix of random codes of E2M1, and its weights in float64: NVFP4, or MXFP4 with every exponent that
    products of these sizes can have.
    """
    plan = HeldNibbles(
        rows=rows, columns=columns, group=16 if is_nv else 32, is_float=True, has_exponents=not is_nv
    )
    codes = integers(0, 16, rows, columns).to(torch.uint8)
    if is_nv:
        scales = random(plan.num_groups, rows, seed=3).abs() / 8 + 0.01
        factors = scales.double()
    else:
        scales = integers(120, 131, plan.num_groups, rows, seed=3).to(torch.uint8)
        factors = 2.0 ** (scales.double() - 127)
    matrix = NibbleMatrix(plan=plan, codes=packed_nibbles(codes, plan.half), scales=scales)
    weights = E2M1.double()[codes.int()] * factors.t()[:, torch.arange(columns) // plan.group]
    return matrix, weights


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_rows", ROW_COUNTS)
@pytest.mark.parametrize("is_nv", [True, False], ids=["nvfp4", "mxfp4"])
def test_4_bit_float_products_of_any_number_of_rows(is_nv: bool, num_rows: int, dtype: torch.dtype) -> None:
    matrix, weights = float_matrix(96, 256, is_nv=is_nv)
    x = random(num_rows, 256, dtype=dtype)
    assert_product(nibble_product(x, matrix), x, weights)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("is_nv", [True, False], ids=["nvfp4", "mxfp4"])
@pytest.mark.parametrize(("rows", "columns"), [(70, 160), (33, 96), (1, 32), (65, 352)])
def test_4_bit_float_products_of_matrices_that_end_unevenly(
    rows: int, columns: int, is_nv: bool, dtype: torch.dtype
) -> None:
    matrix, weights = float_matrix(rows, columns, is_nv=is_nv)
    x, bias, residual = (random(5, width, dtype=dtype) for width in (columns, rows, rows))
    assert_product(nibble_product(x, matrix, bias[0], residual), x, weights, bias[0], residual)


@pytest.mark.parametrize("exponent", [0, 1, 2, 126, 127, 128, 250, 252])
def test_every_float_and_the_ends_of_exponents_are_exact(exponent: int) -> None:
    """One weight of a row at a time: nothing is rounded, subnormal numbers and -0 included."""
    plan = HeldNibbles(rows=16, columns=32, group=32, is_float=True, has_exponents=True)
    codes = torch.zeros(16, 32, dtype=torch.uint8)
    codes[:, 5] = torch.arange(16)
    scales = torch.full((1, 16), exponent, dtype=torch.uint8)
    matrix = NibbleMatrix(plan=plan, codes=packed_nibbles(codes, plan.half), scales=scales)
    x = torch.zeros(1, 32)
    x[0, 5] = 1.0
    expected = E2M1.double() * 2.0 ** (exponent - 127)
    assert torch.equal(nibble_product(x, matrix)[0].double(), expected)
    assert torch.equal(unpacked(matrix)[:, 5].double(), expected)


def byte_matrix(
    rows: int, columns: int, height: int, width: int, *, is_fp8: bool
) -> tuple[ByteMatrix, Tensor]:
    """A matrix of random codes, every one that is a number, and its weights in float64."""
    plan = HeldBytes(rows=rows, columns=columns, height=height, width=width, is_fp8=is_fp8)
    codes = integers(0, 256, rows, columns).to(torch.uint8)
    if is_fp8:
        codes[(codes & 0x7F) == 0x7F] = 0x7E
    scales = random(plan.num_blocks, plan.num_row_blocks, seed=3).abs() / 64 + 0.001
    values = codes.view(torch.float8_e4m3fn).float() if is_fp8 else codes.view(torch.int8)
    of_blocks = scales.double()[torch.arange(columns) // (width or columns)]
    weights = values.double() * of_blocks[:, torch.arange(rows) // height].t()
    return ByteMatrix(plan=plan, codes=codes, scales=scales), weights


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_rows", ROW_COUNTS)
@pytest.mark.parametrize("is_fp8", [True, False], ids=["fp8", "int8"])
def test_8_bit_products_of_any_number_of_rows(is_fp8: bool, num_rows: int, dtype: torch.dtype) -> None:
    matrix, weights = byte_matrix(160, 256, 128, 128, is_fp8=is_fp8)
    x = random(num_rows, 256, dtype=dtype)
    assert_product(byte_product(x, matrix), x, weights)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("is_fp8", [True, False], ids=["fp8", "int8"])
@pytest.mark.parametrize(
    ("rows", "columns", "height", "width"),
    [
        *((200, 300, 128, 128), (70, 100, 1, 0), (33, 257, 33, 0), (48, 96, 48, 32), (20, 50, 1, 16)),
        *((64, 192, 1, 64), (1, 3, 1, 0), (130, 400, 64, 48)),
    ],
)
def test_8_bit_products_of_blocks_that_end_unevenly(
    rows: int, columns: int, height: int, width: int, is_fp8: bool, dtype: torch.dtype
) -> None:
    matrix, weights = byte_matrix(rows, columns, height, width, is_fp8=is_fp8)
    x = random(5, columns, dtype=dtype)
    assert_product(byte_product(x, matrix), x, weights)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_bias_and_residual_are_added_before_rounding(has_bias: bool, dtype: torch.dtype) -> None:
    x, residual = random(7, 2 * 96, dtype=dtype)[:, 96:], random(7, 2 * 40, dtype=dtype, seed=8)[:, :40]
    bias = random(40, dtype=dtype, seed=4) if has_bias else None
    added = [residual] if bias is None else [bias, residual]
    kept = residual.clone()
    for multiply, (matrix, weights) in (
        (nibble_product, nibble_matrix(40, 96, 32)),
        (byte_product, byte_matrix(40, 96, 1, 0, is_fp8=True)),
    ):
        assert_product(multiply(x, matrix, bias, residual), x, weights, *added)  # type: ignore[operator]
    assert torch.equal(residual, kept)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_rows", [1, 20])
def test_quantized_weights_give_the_products_of_the_cpu(num_rows: int, dtype: torch.dtype) -> None:
    weight, x = random(64, 160, dtype=dtype), random(num_rows, 160, dtype=dtype, seed=2)
    for found, expected in (
        (nibble_product(x, NibbleMatrix.quantized(weight)), Int4Projection(weight, None)(x)),
        (byte_product(x, ByteMatrix.quantized(weight)), Int8Projection(weight, None)(x)),
    ):
        tolerance = max(TOLERANCES[dtype], 1e-4) * float(expected.abs().max())
        assert float((found - expected).abs().max()) <= 2 * tolerance


def test_a_row_that_is_not_finite_stays_alone() -> None:
    x = random(3, 64)
    x[1, 7] = float("nan")
    for found in (
        nibble_product(x, nibble_matrix(40, 64, 32)[0]),
        byte_product(x, byte_matrix(40, 64, 1, 0, is_fp8=True)[0]),
    ):
        assert found.isfinite().all(dim=1).tolist() == [True, False, True]
        assert bool(found[1].isnan().all())
