"""Recurrent mixers by Triton kernels equal those by torch's operators, outputs and states, interpreted.

float32 to 1e-5, float16 to 2e-3, bfloat16 to one step of the last bit, of the spread of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint import DeltaLayout, GatedDelta, KimiDelta, Mamba2
from checkpoint.recurrent import GateNorm, Recurrent
from stage_worker.model.gated_delta import SeparateDelta
from stage_worker.model.kimi_delta import BatchedGates, SeparateChannelDelta
from stage_worker.model.layer_weights import DeltaWeights, KimiDeltaWeights, MambaWeights
from stage_worker.model.mamba2 import SeparateScan
from stage_worker.model.state_rows import HostStates
from stage_worker.model.step_layout import LayerStates
from stage_worker.model.triton_kernels.recurrent import FusedChannelDelta, FusedDelta, FusedScan
from tests.kernels.interpreted.paged import random

pytestmark = pytest.mark.kernels

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-7}
NUM_STATES = 260
DELTA = GatedDelta(num_heads=3, num_key_heads=3, key_dim=24, value_dim=20, kernel_size=4, norm_eps=1e-5)
KIMI = KimiDelta(num_heads=3, head_dim=20, rank=6, kernel_size=4, norm_eps=1e-5)
MAMBA = Mamba2(num_heads=6, head_dim=12, num_head_groups=2, state_size=20, kernel_size=4, norm_eps=1e-5)
EACH: dict[str, Recurrent] = {"delta": DELTA, "kimi": KIMI, "mamba": MAMBA}
MIXERS: dict[str, Recurrent] = {
    "delta-shared-keys": replace(DELTA, num_heads=6, num_key_heads=2),
    "delta-tiled": replace(DELTA, num_heads=6, num_key_heads=2, layout=DeltaLayout(is_tiled=True)),
    "delta-rates": replace(DELTA, num_heads=1, num_key_heads=1, layout=DeltaLayout(has_rates=True)),
    "delta-sigmoid-gate": replace(DELTA, has_sigmoid_gate=True),
    "kimi-wide-heads": replace(KIMI, num_heads=2, head_dim=40),
    "kimi-rates": replace(KIMI, num_heads=1, has_rates=True),
    "mamba-one-group": replace(MAMBA, num_heads=5, num_head_groups=1, has_conv_bias=False),
    "mamba-short-convolution": replace(MAMBA, kernel_size=2),
    "mamba-norm-before-gate": replace(MAMBA, gate_norm=GateNorm.BEFORE),
    "mamba-rates": replace(MAMBA, has_rates=True),
    "mamba-no-norm": replace(MAMBA, gate_norm=GateNorm.NONE),
}
STEPS = {
    "one": (1,),
    "decodes": (1, 1, 1, 1, 1),
    "prompt": (64,),
    "longer than a chunk": (65, 3, 130),
    "chunks beside decodes": (1, 1, 63, 2, 16, 17, 1, 3, 15),
}


def of_mixer(mixer: Recurrent, dtype: torch.dtype) -> tuple[Any, Any, int]:
    """The functions by torch and by Triton, and the width of a projection."""
    if isinstance(mixer, KimiDelta):
        return of_kimi(mixer, dtype)
    heads = {"dtype": torch.float32, "seed": 5}
    conv = random(mixer.conv_size, 1, mixer.kernel_size, dtype=dtype, seed=1)
    rates, dt_bias = random(mixer.num_heads, **heads), random(mixer.num_heads, **heads) - 1.0
    unused: Any = None
    has_rates = mixer.layout.has_rates if isinstance(mixer, GatedDelta) else mixer.has_rates
    decay = -rates.exp() if has_rates else rates
    if isinstance(mixer, GatedDelta):
        norm = 1 + 0.2 * random(mixer.value_dim, dtype=dtype, seed=2)
        weights = DeltaWeights(input=unused, conv=conv, decay=decay, dt_bias=dt_bias, norm=norm)
        width = mixer.conv_size + mixer.o_size + 2 * mixer.num_heads
        return SeparateDelta(mixer, weights), FusedDelta(mixer, weights), width
    given = MambaWeights(
        input=unused,
        input_bias=None,
        conv=conv,
        conv_bias=random(mixer.conv_size, dtype=dtype, seed=3) if mixer.has_conv_bias else None,
        decay=decay,
        dt_bias=dt_bias,
        skip=random(mixer.num_heads, **heads),
        norm=None
        if mixer.gate_norm is GateNorm.NONE
        else 1 + 0.2 * random(mixer.o_size, dtype=dtype, seed=2),
    )
    return SeparateScan(mixer, given), FusedScan(mixer, given), mixer.in_size


def of_kimi(mixer: KimiDelta, dtype: torch.dtype) -> tuple[Any, Any, int]:
    """Decays differ by channel: their biases do."""
    rates = random(1, 1, mixer.num_heads, 1, dtype=torch.float32, seed=5)
    ups = [random(mixer.q_size, mixer.rank, dtype=dtype, seed=seed) for seed in (8, 9)]
    weights = KimiDeltaWeights(
        input=ups[0],
        decay_up=ups[0],
        gate_up=ups[1],
        conv=random(mixer.conv_size, 1, mixer.kernel_size, dtype=dtype, seed=1),
        decay=-rates.exp() if mixer.has_rates else rates,
        dt_bias=random(mixer.q_size, dtype=torch.float32, seed=6) - 1.0,
        norm=1 + 0.2 * random(mixer.head_dim, dtype=dtype, seed=2),
    )
    expand = BatchedGates(*ups)
    separate = SeparateChannelDelta(mixer, weights, expand)
    width = mixer.conv_size + mixer.num_heads + 2 * mixer.rank
    return separate, FusedChannelDelta(mixer, weights, expand), width


def memories(mixer: Recurrent, dtype: torch.dtype, slots: Sequence[int]) -> list[Tensor]:
    """Random states in `slots`, NaN elsewhere."""
    dtypes = [torch.float32 if part.is_wide else dtype for part in mixer.state_parts]
    parts = []
    for part, own in zip(mixer.state_parts, dtypes, strict=True):
        states = torch.full((NUM_STATES, *part.shape), float("nan"), dtype=own)
        states[list(slots)] = random(len(slots), *part.shape, dtype=own, seed=7)
        parts.append(states)
    return parts


def memory(states: HostStates, parts: list[Tensor], num_rows: int) -> LayerStates:
    step: Any = SimpleNamespace(states=states.rows.make(torch.from_numpy), num_tokens=num_rows)
    return LayerStates(step, parts)


def token_by_token(
    separate: Any, projected: Tensor, parts: list[Tensor], lengths: Sequence[int], slots: Sequence[int]
) -> Tensor:
    """By torch's operators in the order of the kernels: those of chunks subtract sums of decays."""
    begins = [sum(lengths[:index]) for index in range(len(lengths))]
    outputs: dict[int, Tensor] = {}
    for token in range(max(lengths)):
        some = [index for index, length in enumerate(lengths) if token < length]
        rows = [begins[index] + token for index in some]
        states = HostStates.of([1] * len(some), [slots[index] for index in some], by_triton=False)
        found = separate(projected[rows], memory(states, parts, len(some)))
        outputs |= dict(zip(rows, found, strict=True))
    return torch.stack([outputs[row] for row in range(len(projected))])


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    spread = float(expected[expected.isfinite()].float().std())
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * spread, equal_nan=True)


def check(mixer: Recurrent, dtype: torch.dtype, lengths: Sequence[int]) -> None:
    separate, fused, width = of_mixer(mixer, dtype)
    slots = torch.randperm(NUM_STATES, generator=torch.Generator().manual_seed(3))[: len(lengths)].tolist()
    projected = random(sum(lengths), width, dtype=dtype, seed=11)
    expected_parts, found_parts = (memories(mixer, dtype, slots) for _ in range(2))
    expected = token_by_token(separate, projected, expected_parts, lengths, slots)
    states = HostStates.of(lengths, slots, by_triton=True)
    found = fused(projected, memory(states, found_parts, len(projected)))
    assert_close(found, expected, TOLERANCES[dtype])
    for part, other in zip(found_parts, expected_parts, strict=True):
        assert_close(part, other, TOLERANCES[dtype])


@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("mixer", EACH.values(), ids=EACH.keys())
def test_steps_equal_those_of_torch(mixer: Recurrent, lengths: tuple[int, ...]) -> None:
    check(mixer, torch.float32, lengths)


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS.keys())
def test_shapes_equal_those_of_torch(mixer: Recurrent) -> None:
    check(mixer, torch.float32, (1, 3, 1, 18))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mixer", EACH.values(), ids=EACH.keys())
def test_mixers_in_the_run_dtype(mixer: Recurrent, dtype: torch.dtype) -> None:
    check(mixer, dtype, STEPS["chunks beside decodes"])


@pytest.mark.parametrize("num_sequences", [2, 33, 257])
@pytest.mark.parametrize("mixer", EACH.values(), ids=EACH.keys())
def test_decodes_of_many_sequences(mixer: Recurrent, num_sequences: int) -> None:
    check(mixer, torch.float32, (1,) * num_sequences)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 5), (9,)], ids=str)
@pytest.mark.parametrize("mixer", EACH.values(), ids=EACH.keys())
def test_padding_changes_no_state_and_is_zero(mixer: Recurrent, lengths: tuple[int, ...]) -> None:
    """Rows of padding are infinite: nothing reads them."""
    _, fused, width = of_mixer(mixer, torch.float32)
    slots, num_rows = list(range(1, len(lengths) + 1)), sum(lengths)
    projected = random(num_rows + 3, width, seed=11)
    projected[num_rows:] = float("inf")
    states = HostStates.of(lengths, slots, by_triton=True)
    padded = states.padded(7, has_longer=True)
    assert padded is not None
    as_is, with_padding = (memories(mixer, torch.float32, slots) for _ in range(2))
    expected = fused(projected[:num_rows], memory(states, as_is, num_rows))
    found = fused(projected, memory(padded, with_padding, num_rows + 3))
    assert_close(found[:num_rows], expected, 1e-5)
    assert not found[num_rows:].any()
    for part, other in zip(with_padding, as_is, strict=True):
        assert_close(part, other, 1e-5)


@pytest.mark.parametrize("mixer", EACH.values(), ids=EACH.keys())
@pytest.mark.parametrize("sizes", [(1,) * 9, (2, 7), (8, 1)], ids=str)
def test_slices_equal_the_whole(mixer: Recurrent, sizes: tuple[int, ...]) -> None:
    """Also where a slice is shorter than the convolution."""
    _, fused, width = of_mixer(mixer, torch.float32)
    projected = random(9, width, seed=11)
    whole, sliced = (memories(mixer, torch.float32, [4]) for _ in range(2))
    expected = fused(projected, memory(HostStates.of([9], [4], by_triton=True), whole, 9))
    found = [
        fused(part, memory(HostStates.of([len(part)], [4], by_triton=True), sliced, len(part)))
        for part in projected.split(list(sizes))
    ]
    assert_close(torch.cat(found), expected, 1e-5)
    for part, other in zip(sliced, whole, strict=True):
        assert_close(part, other, 1e-5)


@pytest.mark.parametrize("x", [-40.0, -12.0, -5.0, -0.1, 0.0, 3.0, 19.9, 20.1, 90.0])
def test_time_steps_are_exact(x: float) -> None:
    """A relative error of 1e-6, also of small ones: one token after zeros, whose update is one time step."""
    mixer = replace(MAMBA, num_heads=1, num_head_groups=1, head_dim=8, state_size=8)
    _, fused, width = of_mixer(mixer, torch.float32)
    fused._dt_bias.zero_()
    projected = random(1, width, seed=11)
    projected[0, -1] = x
    parts = [part.nan_to_num_(0.0).zero_() for part in memories(mixer, torch.float32, [0])]
    reference = [part.clone() for part in parts]
    fused(projected, memory(HostStates.of([1], [0], by_triton=True), parts, 1))
    projected[0, -1] = 1.0
    fused(projected, memory(HostStates.of([1], [0], by_triton=True), reference, 1))
    steps = [torch.nn.functional.softplus(torch.tensor(y, dtype=torch.float64)) for y in (x, 1.0)]
    expected = reference[1].double() * steps[0] / steps[1]
    torch.testing.assert_close(parts[1].double(), expected, rtol=1e-6, atol=0.0)
