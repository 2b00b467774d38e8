"""Products of all experts, with weights of 4 to 32 bits: any numbers of rows of each expert.

Those of 16 and 32 bits equal the CPU's operators; others float64 with the same weights, and int4 and int8 the
CPU's products of each expert, too. float32 to 1e-5, float16 to 2e-3, bfloat16 to one step of the last bit,
relative to the largest result.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from checkpoint.held import HeldBytes, HeldNibbles
from stage_worker.model.experts import separate_products
from stage_worker.model.held_matrices import ByteMatrix, HeldMatrix, NibbleMatrix, packed_nibbles
from stage_worker.model.kernels import BY_TRITON
from stage_worker.model.operations import operations
from stage_worker.model.projections import Int4Projection, Int8Projection
from tests.kernels.held import unpacked
from tests.kernels.interpreted.paged import random
from tests.kernels.interpreted.test_held_products import TOLERANCES, generator, integers

pytestmark = pytest.mark.kernels

TRITON = operations(BY_TRITON)
EXPERTS = 5
COUNTS = {
    "none": [0, 0, 0, 0, 0],
    "one row": [0, 0, 1, 0, 0],
    "one each": [1, 1, 1, 1, 1],
    "empty experts": [0, 5, 0, 33, 0],
    "first and last": [17, 0, 0, 0, 2],
    "all on one": [0, 0, 0, 257, 0],
    "all on the last": [0, 0, 0, 0, 64],
    "odd": [7, 1, 19, 3, 227],
}


def nibbles(rows: int, columns: int, group: int, **options: bool) -> NibbleMatrix:
    """Random codes of all experts; `options` as of `HeldNibbles`."""
    plan = HeldNibbles(rows=EXPERTS * rows, columns=columns, group=group, experts=EXPERTS, **options)
    of_groups = (plan.num_groups, plan.rows)
    order = None
    if plan.has_order:
        order = torch.stack([torch.randperm(columns, generator=generator(seed)) for seed in range(EXPERTS)])
    return NibbleMatrix(
        plan=plan,
        codes=packed_nibbles(integers(0, 16, plan.rows, columns).to(torch.uint8), plan.half),
        scales=integers(120, 131, *of_groups, seed=3).to(torch.uint8)
        if plan.has_exponents
        else random(*of_groups, seed=3).abs() / 8 + 0.01,
        zeros=integers(0, 17, *of_groups, seed=6).to(torch.uint8) if plan.has_zeros else None,
        order=None if order is None else order.int(),
    )


def octets(rows: int, columns: int, height: int, width: int, *, is_fp8: bool) -> ByteMatrix:
    plan = HeldBytes(
        rows=EXPERTS * rows, columns=columns, height=height, width=width, is_fp8=is_fp8, experts=EXPERTS
    )
    codes = integers(0, 256, plan.rows, columns).to(torch.uint8)
    if is_fp8:
        codes[(codes & 0x7F) == 0x7F] = 0x7E
    scales = random(plan.num_blocks, plan.num_row_blocks, seed=3).abs() / 64 + 0.001
    return ByteMatrix(plan=plan, codes=codes, scales=scales)


MATRICES: dict[str, Callable[[], HeldMatrix]] = {
    "int4": lambda: nibbles(40, 96, 32),
    "int4-whole-rows": lambda: nibbles(33, 72, 0),
    "awq": lambda: nibbles(70, 160, 32, has_zeros=True),
    "gptq": lambda: nibbles(40, 200, 128, has_zeros=True, has_order=True),
    "mxfp4": lambda: nibbles(70, 160, 32, is_float=True, has_exponents=True),
    "nvfp4": lambda: nibbles(33, 96, 16, is_float=True),
    "fp8-blocks": lambda: octets(96, 300, 48, 128, is_fp8=True),
    "fp8-rows": lambda: octets(33, 257, 1, 0, is_fp8=True),
    "fp8-experts": lambda: octets(33, 100, 33, 0, is_fp8=True),
    "int8-rows": lambda: octets(70, 100, 1, 0, is_fp8=False),
}


def products(matrices: Tensor | HeldMatrix, biases: Tensor | None, x: Tensor, counts: list[int]) -> Tensor:
    multiply = TRITON.expert_products(matrices, biases)
    assert multiply is not None
    return multiply(x, torch.tensor(counts))


def assert_products(
    found: Tensor, x: Tensor, weights: Tensor, counts: list[int], biases: Tensor | None
) -> None:
    """`weights` float64 [experts, out, in]."""
    owners = torch.arange(EXPERTS).repeat_interleave(torch.tensor(counts))
    expected = torch.cat(
        [rows @ matrix.t() for rows, matrix in zip(x.double().split(counts), weights, strict=True)]
    )
    if biases is not None:
        expected += biases.double()[owners]
    assert (found.dtype, found.shape) == (x.dtype, expected.shape)
    if expected.numel():
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert float(error) <= TOLERANCES[x.dtype]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
def test_plain_experts_multiply_as_separate_products(
    counts: list[int], has_bias: bool, dtype: torch.dtype
) -> None:
    x, matrices = random(sum(counts), 72, dtype=dtype), random(EXPERTS, 100, 72, dtype=dtype, seed=1) / 8
    biases = random(EXPERTS, 100, dtype=dtype, seed=2) if has_bias else None
    found = products(matrices, biases, x, counts)
    assert_products(found, x, matrices.double(), counts, biases)
    expected = separate_products(x, torch.tensor(counts), matrices, biases)
    tolerance = 2 * TOLERANCES[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


CASES = [
    (form, name, dtype)
    for index, form in enumerate(MATRICES)
    for place, name in enumerate(COUNTS)
    for turn, dtype in enumerate(TOLERANCES)
    if (index + place) % len(TOLERANCES) == turn
]
"""All counts of each form, with dtypes in turns."""


@pytest.mark.parametrize(("form", "counts", "dtype"), CASES, ids=[f"{a}-{b}-{c}" for a, b, c in CASES])
def test_held_experts_multiply_by_their_weights(form: str, counts: str, dtype: torch.dtype) -> None:
    check_held(form, COUNTS[counts], dtype)


def check_held(form: str, counts: list[int], dtype: torch.dtype) -> None:
    matrix = MATRICES[form]()
    weights = unpacked(matrix).double().unflatten(0, (EXPERTS, -1))
    x = random(sum(counts), matrix.plan.columns, dtype=dtype)
    biases = random(*weights.shape[:2], dtype=dtype, seed=4) if sum(counts) % 2 else None
    assert_products(products(matrix, biases, x, counts), x, weights, counts, biases)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("counts", [[1, 0, 2, 0, 40]])
def test_rounded_experts_give_the_products_of_the_cpu(counts: list[int], dtype: torch.dtype) -> None:
    weights, x = random(EXPERTS, 64, 160, dtype=dtype), random(sum(counts), 160, dtype=dtype, seed=2)
    for rounded, project in (
        (NibbleMatrix.quantized, Int4Projection),
        (ByteMatrix.quantized, Int8Projection),
    ):
        found = products(rounded(weights), None, x, counts)
        expected = torch.cat(
            [
                project(one, None)(rows) if len(rows) else rows.new_empty(0, 64)
                for one, rows in zip(weights, x.split(counts), strict=True)
            ]
        )
        tolerance = max(TOLERANCES[dtype], 1e-4) * float(expected.abs().max())
        assert float((found - expected).abs().max()) <= 2 * tolerance


@pytest.mark.parametrize("form", ["mxfp4", "gptq", "fp8-blocks"])
def test_a_row_depends_neither_on_its_expert_s_other_rows_nor_on_other_experts(form: str) -> None:
    """As long as tiles have the same size."""
    matrix = MATRICES[form]()
    x = random(9, matrix.plan.columns)
    x[0] = float("nan")
    found = products(matrix, None, x, [0, 4, 3, 2, 0])
    assert found.isfinite().all(dim=1).tolist() == [False, *[True] * 8]
    alone = products(matrix, None, x[5:6], [0, 0, 1, 0, 0])
    assert torch.equal(alone[0], found[5])
