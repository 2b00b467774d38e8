"""Norms, sums, gates and heads equal torch's operators, in the interpreter.

float32 to 1e-5, float16 to 2e-3, bfloat16 to one step of the last bit.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from checkpoint import Attention, Norm
from checkpoint.blueprint import Activation, ClampedSwiGlu, NormKind, QkNorm
from checkpoint.names import TensorRole
from kvcache.pages import KvPages
from kvcache.scaled_pages import ScaledPages
from stage_worker.model.decoder_layer import SeparateHeads
from stage_worker.model.feed_forward import gated
from stage_worker.model.kernels import BY_TRITON, PLAIN, ProductMethod
from stage_worker.model.norms import NormWeights
from stage_worker.model.operations import operations
from stage_worker.model.projections import project
from stage_worker.model.rope import RotaryTable
from tests.kernels.interpreted.paged import random

pytestmark = pytest.mark.kernels

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-7}
TRITON, TORCH = operations(BY_TRITON), operations(PLAIN)


def assert_equal(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[found.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def norm_weights(width: int, dtype: torch.dtype, *, has_bias: bool, seed: int) -> NormWeights:
    bias = random(width, dtype=dtype, seed=seed + 1) if has_bias else None
    return NormWeights(random(width, dtype=dtype, seed=seed), bias)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", NormKind)
@pytest.mark.parametrize("width", [48, 768, 1000])
def test_norms_of_rows(width: int, kind: NormKind, dtype: torch.dtype) -> None:
    has_bias = kind in (NormKind.LAYER, NormKind.LAYER_OFFSET)
    norm = Norm(kind=kind, eps=0.05, has_bias=has_bias)
    weights = norm_weights(width, dtype, has_bias=has_bias, seed=3)
    x = random(5, 2 * width, dtype=dtype)[:, :width] * 4 + 1
    assert_equal(TRITON.norm(norm, weights)(x), TORCH.norm(norm, weights)(x))


def test_norms_of_no_rows() -> None:
    weights = norm_weights(48, torch.float32, has_bias=False, seed=3)
    assert TRITON.norm(Norm(eps=1e-5), weights)(random(0, 48)).shape == (0, 48)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", NormKind)
@pytest.mark.parametrize("rows", [None, [4, 0, 0], []], ids=str)
def test_final_norm_of_picked_rows(rows: list[int] | None, kind: NormKind, dtype: torch.dtype) -> None:
    has_bias = kind in (NormKind.LAYER, NormKind.LAYER_OFFSET)
    norm = Norm(kind=kind, eps=0.05, has_bias=has_bias)
    weights = norm_weights(1000, dtype, has_bias=has_bias, seed=3)
    hidden = random(5, 2000, dtype=dtype)[:, :1000] * 4 + 1
    picked = None if rows is None else torch.tensor(rows, dtype=torch.int64)
    found, flags = TRITON.final_norm(hidden, picked, TRITON.norm(norm, weights))
    expected, nothing = TORCH.final_norm(hidden, picked, TORCH.norm(norm, weights))
    assert nothing is None
    assert flags is not None
    assert flags.tolist() == [0] * len(found)
    assert_equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(24, 2048), (23, 2048), (24, 1000), (5, 40)], ids=str)
def test_product_of_a_single_row(shape: tuple[int, int], has_bias: bool, dtype: torch.dtype) -> None:
    matrix = random(*shape, dtype=dtype, seed=3)
    bias = random(shape[0], dtype=dtype, seed=4) if has_bias else None
    projection = project(matrix, bias, ProductMethod.TRITON_ROWS)
    x = random(1, shape[1], dtype=dtype)
    exact = matrix.double() @ x[0].double() + (0 if bias is None else bias.double())
    torch.testing.assert_close(projection(x)[0], exact.to(dtype), rtol=TOLERANCES[dtype], atol=1e-3)
    residual = random(1, shape[0], dtype=dtype, seed=5)
    exact += residual[0].double()
    total = projection.added_to(residual, x)
    assert total is residual
    torch.testing.assert_close(total[0], exact.to(dtype), rtol=TOLERANCES[dtype], atol=1e-3)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_final_norm_flags_rows_that_are_not_finite(value: float, dtype: torch.dtype) -> None:
    hidden = random(5, 100, dtype=dtype)
    hidden[3, 99] = value
    hidden[1] = torch.finfo(dtype).max  # finite, but not its square
    norm = TRITON.norm(Norm(eps=1e-5), norm_weights(100, dtype, has_bias=False, seed=3))
    for rows, expected in ((None, [0, 0, 0, 1, 0]), ([3, 1, 3], [1, 0, 1])):
        picked = None if rows is None else torch.tensor(rows)
        _, flags = TRITON.final_norm(hidden, picked, norm)
        assert flags is not None
        assert flags.tolist() == expected


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("has_out_norm", "scale", "has_norm"), list(itertools.product([False, True], [1.0, 0.25], [False, True]))
)
def test_sums_and_norms(has_out_norm: bool, scale: float, has_norm: bool, dtype: torch.dtype) -> None:
    residual, added = random(3, 96, dtype=dtype), random(3, 96, dtype=dtype, seed=1)
    first = Norm(kind=NormKind.RMS_OFFSET, eps=1e-5), norm_weights(96, dtype, has_bias=False, seed=5)
    second = Norm(eps=1e-3), norm_weights(96, dtype, has_bias=False, seed=7)
    found, expected = (
        chosen.add_and_norm(
            residual.clone(),
            added.clone(),
            chosen.norm(*first) if has_out_norm else None,
            scale,
            chosen.norm(*second) if has_norm else None,
        )
        for chosen in (TRITON, TORCH)
    )
    assert_equal(found[0], expected[0])
    assert_equal(found[1], expected[1])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    "activation",
    [
        *(Activation.SILU, Activation.GELU, Activation.GELU_TANH),
        *(ClampedSwiGlu(alpha=1.7, limit=2.0), ClampedSwiGlu(alpha=1.0, limit=2.0, offset=0.0)),
    ],
    ids=str,
)
def test_gates(activation: Activation | ClampedSwiGlu, dtype: torch.dtype) -> None:
    both = random(4, 2 * 1100, dtype=dtype) * 4
    both[0, :6] = torch.tensor([0.0, -0.0, 100.0, -100.0, 1e-6, -30.0])
    assert_equal(gated(activation, TRITON)(both.clone()), gated(activation, TORCH)(both.clone()))


def test_gates_keep_what_is_not_finite() -> None:
    both = random(2, 64)
    both[1, 3] = float("nan")
    assert TRITON.gate(both).isnan().nonzero().tolist() == [[1, 3]]


HEADS, KV_HEADS, BLOCK = 5, 2, 16
SLOTS = torch.tensor([3, 160, -1, 16, 47, 33])


class Heads:
    """One step of heads [6, 9, head_dim] with rotation, and pages that are not cleared."""

    def __init__(self, head_dim: int, dtype: torch.dtype, element: torch.dtype | None = None) -> None:
        self.heads = random(len(SLOTS), HEADS + 2 * KV_HEADS, head_dim, dtype=dtype)
        angles = random(len(SLOTS), 1, head_dim // 2, seed=2)
        cos, sin = angles.cos(), angles.sin()
        self.rotary = RotaryTable(
            cos=torch.cat((cos, cos), -1).to(dtype), sin=torch.cat((-sin, sin), -1).to(dtype)
        )
        sizes = {
            "num_layers": 2,
            "num_blocks": 12,
            "block_size": BLOCK,
            "num_kv_heads": KV_HEADS,
            "head_dim": head_dim,
        }
        self.pages = (
            KvPages(**sizes, dtype=dtype, device="cpu")
            if element is None
            else ScaledPages(**sizes, dtype=dtype, device="cpu", element=element)
        )

    def kv(self) -> SimpleNamespace:
        """As `LayerKv` of layer 1."""
        is_written = SLOTS >= 0
        rows = is_written.nonzero()[:, 0]
        return SimpleNamespace(
            writes=SimpleNamespace(by_row=SLOTS),
            store=self.pages.store(1),
            scales=self.pages.scales(1),
            write=lambda fresh: self.pages.write(1, fresh, SLOTS[is_written], rows),
        )

    def gathered(self) -> tuple[Tensor, ...]:
        return tuple(part.clone() for part in self.pages.gather(1, torch.arange(12)[None]))


def mixer_of(head_dim: int, qk_norm: QkNorm | None, value_norm_eps: float | None = None) -> Attention:
    return Attention(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        rope=None,
        scale=1.0,
        qk_norm=qk_norm,
        value_norm_eps=value_norm_eps,
    )


def check_heads(mixer: Attention, dtype: torch.dtype, element: torch.dtype | None = None) -> None:
    norms = {
        role: norm_weights(mixer.head_dim, dtype, has_bias=False, seed=seed)
        for role, seed in ((TensorRole.Q_NORM, 1), (TensorRole.K_NORM, 2))
    }
    mine, expected = (Heads(mixer.head_dim, dtype, element) for _ in range(2))
    function = TRITON.head_function(mixer, norms)
    assert function is not None
    function(mine.heads, mine.rotary, mine.kv())  # type: ignore[arg-type]
    SeparateHeads(mixer, norms, TORCH)(expected.heads, expected.rotary, expected.kv())  # type: ignore[arg-type]
    assert_equal(mine.heads[:, :HEADS], expected.heads[:, :HEADS])
    for found, needed in zip(mine.gathered(), expected.gathered(), strict=True):
        assert_equal(found, needed)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("qk_norm", [None, *NormKind.__members__.values()][:4], ids=str)
@pytest.mark.parametrize("is_late", [False, True])
def test_rotation_and_writes(
    head_dim: int, qk_norm: NormKind | None, is_late: bool, dtype: torch.dtype
) -> None:
    norm = None
    if qk_norm is not None:
        norm = QkNorm(norm=Norm(kind=qk_norm, eps=1e-3), is_after_rotation=is_late)
    check_heads(mixer_of(head_dim, norm), dtype)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_unit_norms_of_values(dtype: torch.dtype) -> None:
    check_heads(mixer_of(64, QkNorm(norm=Norm(eps=1e-3)), value_norm_eps=1e-3), dtype)


@pytest.mark.parametrize("element", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_writes_of_8_bits_are_bit_by_bit_those_of_torch(head_dim: int, element: torch.dtype) -> None:
    mixer, found = mixer_of(head_dim, None), []
    for chosen in (TRITON, TORCH):
        mine = Heads(head_dim, torch.float32, element)
        mine.heads[1, HEADS] = 0.0  # a key of zeros
        mine.heads[3, HEADS + 1] *= torch.logspace(-12, 0, head_dim)  # subnormal elements
        write = chosen.head_function(mixer, {}) or SeparateHeads(mixer, {}, chosen)
        write(mine.heads, mine.rotary, mine.kv())  # type: ignore[arg-type]
        found.append((mine.pages.store(1).view(torch.uint8).clone(), mine.pages.scales(1)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(*(scales.clone() for _, scales in found))  # type: ignore[misc]
    assert int((found[0][0] != 0).sum()) > 4 * 5 * head_dim * 0.9


@pytest.mark.parametrize("element", [torch.float8_e4m3fn, torch.int8])
def test_a_row_of_8_bits_that_is_not_finite_has_no_finite_element(element: torch.dtype) -> None:
    mine = Heads(64, torch.float32, element)
    mine.heads[0, HEADS + 1, 5] = float("nan")
    mine.heads[1, HEADS + 2, 9] = float("inf")
    write = TRITON.head_function(mixer_of(64, None), {})
    assert write is not None
    write(mine.heads, mine.rotary, mine.kv())  # type: ignore[arg-type]
    keys, values = mine.gathered()
    assert not bool(keys[1, 0, SLOTS[0]].isfinite().any())
    assert not bool(values[0, 0, SLOTS[1]].isfinite().any())
    assert bool(keys[0].isfinite().all())
    assert bool(values[1].isfinite().all())
