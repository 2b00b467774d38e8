"""Round trips of hidden states over the wire: rounding, exactness, copies."""

import struct
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from checkpoint import DType
from checkpoint.dtypes import ScaledDType
from stage_worker.backends.tensor_views import from_wire, to_wire
from stage_worker.model.layer_weights import TORCH_DTYPES
from wire.tensors import CHOICES, TensorView, WireDType, can_carry, payload_bytes

CPU = torch.device("cpu")
FP8, INT8 = ScaledDType.F8_E4M3, ScaledDType.I8
RUN_DTYPES = (DType.F32, DType.BF16, DType.F16)
UNIT = {DType.F32: 2.0**-24, DType.BF16: 2.0**-8, DType.F16: 2.0**-11}
"""Largest relative error of rounding."""
SUBNORMAL = {DType.F32: 2.0**-149, DType.BF16: 2.0**-133, DType.F16: 2.0**-24}
SCALED_CASES = [(wire, run) for wire in ScaledDType for run in RUN_DTYPES]


def there_and_back(hidden: Tensor, wire_dtype: WireDType) -> Tensor:
    view = to_wire(hidden, wire_dtype)
    assert view.dtype is wire_dtype
    assert view.size_bytes == payload_bytes(wire_dtype, tuple(hidden.shape)) == len(bytes(view.data))
    received = TensorView(view.dtype, view.shape, bytes(view.data))
    back = from_wire(received, device=CPU, dtype=hidden.dtype)
    assert (back.shape, back.dtype) == (hidden.shape, hidden.dtype)
    return back


@st.composite
def rows(draw: st.DrawFn, dtype: DType) -> Tensor:
    """Rows of very different sizes, with outliers, zeros and subnormal numbers."""
    width, num_rows = draw(st.integers(1, 40)), draw(st.integers(1, 5))
    largest = 60000.0 if dtype is DType.F16 else 2.0**126
    element = st.one_of(
        st.floats(-largest, largest, width=32),
        st.floats(-(2.0**-118), 2.0**-118, width=32),
        st.floats(-4, 4, width=32),
        st.just(0.0),
    )
    values = draw(st.lists(element, min_size=width * num_rows, max_size=width * num_rows))
    return torch.tensor(values).view(num_rows, width).to(TORCH_DTYPES[dtype])


def error_bound(hidden: Tensor, wire: ScaledDType, run: DType) -> Tensor:
    """Error bound of the format plus two roundings, in float64."""
    wide = hidden.double().abs()
    scales = (wide.amax(1, keepdim=True) / {FP8: 448, INT8: 127}[wire]).clamp(min=2.0**-126)
    of_format = torch.maximum(wide / 16, scales / 1024) if wire is FP8 else (scales / 2).expand_as(wide)
    return of_format * (1 + 1e-5) + (wide + of_format) * (UNIT[run] + 2.0**-20) + SUBNORMAL[run]


@pytest.mark.matrix(1)
@pytest.mark.parametrize(("wire", "run"), SCALED_CASES)
@given(data=st.data())
def test_scaled_rows_round_trip_within_their_bound(
    wire: ScaledDType, run: DType, data: st.DataObject
) -> None:
    hidden = data.draw(rows(run))
    back = there_and_back(hidden, wire)
    error = (back.double() - hidden.double()).abs()
    assert bool((error <= error_bound(hidden, wire, run)).all())


@given(data=st.data())
def test_float32_in_bf16_is_rounded_once(data: st.DataObject) -> None:
    hidden = data.draw(rows(DType.F32))
    assert torch.equal(there_and_back(hidden, DType.BF16), hidden.bfloat16().float())


@pytest.mark.parametrize("run", RUN_DTYPES)
def test_as_computed_nothing_is_lost(run: DType) -> None:
    hidden = torch.randn(5, 7).to(TORCH_DTYPES[run])
    assert torch.equal(there_and_back(hidden, run), hidden)


@pytest.mark.parametrize("wire", ScaledDType)
def test_rows_have_scales_of_their_own(wire: ScaledDType) -> None:
    hidden = torch.tensor([[1000.0, 1.0], [0.001, 0.0005]])
    back = there_and_back(hidden, wire)
    assert torch.allclose(back[1], hidden[1], rtol=0.07)
    assert back[0, 0] == pytest.approx(1000)


@pytest.mark.parametrize(("wire", "run"), SCALED_CASES)
def test_zeros_stay_zeros(wire: ScaledDType, run: DType) -> None:
    hidden = torch.zeros(3, 5, dtype=TORCH_DTYPES[run])
    hidden[1, 2] = 2.5
    assert torch.equal(there_and_back(hidden, wire), hidden)


@pytest.mark.parametrize("wire", ScaledDType)
def test_the_payload_is_elements_and_then_scales(wire: ScaledDType) -> None:
    largest, as_byte = {FP8: (448.0, 0x7E), INT8: (127.0, 127)}[wire]
    data = bytes(to_wire(torch.tensor([[1.0, 0.0, -1.0], [0.0, 0.0, 4.0]]), wire).data)
    minus = {FP8: as_byte | 0x80, INT8: 256 - as_byte}[wire]
    assert data[:6] == bytes((as_byte, 0, minus, 0, 0, as_byte))
    assert struct.unpack("<2f", data[6:]) == pytest.approx((1 / largest, 4 / largest))


def poisoned(run: DType, bad: float) -> Tensor:
    hidden = torch.ones(3, 6, dtype=TORCH_DTYPES[run])
    hidden[1, 4] = bad
    return hidden


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("run", RUN_DTYPES)
@pytest.mark.parametrize("wire", [*RUN_DTYPES, *ScaledDType])
def test_non_finite_values_are_never_hidden(wire: WireDType, run: DType, bad: float) -> None:
    if not can_carry(wire, run):
        return
    back = there_and_back(poisoned(run, bad), wire)
    assert not bool(back[1, 4].isfinite())
    assert torch.equal(back[::2], torch.ones(2, 6, dtype=back.dtype)), "other rows are not touched"
    if isinstance(wire, ScaledDType):
        assert not bool(back[1].isfinite().any())


def test_an_fp8_nan_under_a_finite_scale_stays_one() -> None:
    """Stageline never sends it; another implementation can."""
    data = bytes((0x7F, 0x38, 0xFF, 0x00)) + struct.pack("<f", 2.0)
    back = from_wire(TensorView(FP8, (1, 4), data), device=CPU, dtype=torch.float32)
    assert back.isnan().tolist() == [[True, False, True, False]]
    assert back[0, 1::2].tolist() == [2.0, 0.0]


@pytest.mark.parametrize("wire", [*RUN_DTYPES, *ScaledDType])
def test_no_rows_are_no_bytes(wire: WireDType) -> None:
    back = from_wire(TensorView(wire, (0, 8), b""), device=CPU, dtype=torch.float32)
    assert back.shape == (0, 8)


def at_offset(data: bytes, offset: int) -> memoryview:
    """A payload inside a message, `offset` bytes after an aligned address."""
    memory = torch.zeros(len(data) + 64, dtype=torch.uint8)
    begin = -memory.data_ptr() % 16 + offset
    view = memory.numpy().data.cast("B")[begin : begin + len(data)]
    view[:] = data
    return view.toreadonly()


@pytest.mark.parametrize("dtype", RUN_DTYPES)
@pytest.mark.parametrize("offset", range(8))
def test_only_misaligned_payloads_are_copied(dtype: DType, offset: int) -> None:
    hidden = torch.randn(3, 5).to(TORCH_DTYPES[dtype])
    data = at_offset(bytes(to_wire(hidden, dtype).data), offset)
    tensor = from_wire(TensorView(dtype, (3, 5), data), device=CPU, dtype=TORCH_DTYPES[dtype])
    assert torch.equal(tensor, hidden)
    lies_there = tensor.data_ptr() == np.frombuffer(data, np.uint8).ctypes.data
    assert lies_there == (offset % dtype.size_bytes == 0)


@pytest.mark.parametrize("wire", [*CHOICES.values(), DType.F32])
@pytest.mark.parametrize("offset", range(4))
def test_reading_changes_no_byte_and_warns_of_nothing(wire: WireDType, offset: int) -> None:
    hidden = torch.randn(3, 5)
    data = bytes(to_wire(hidden, wire).data)
    received = at_offset(data, offset)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = from_wire(TensorView(wire, (3, 5), received), device=CPU, dtype=torch.float32)
    assert torch.allclose(back, hidden, rtol=0.07, atol=0.05)
    assert bytes(received) == data
