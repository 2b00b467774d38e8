"""Dtypes of hidden states between stages and their sizes in bytes."""

import pytest

from checkpoint import DType
from checkpoint.dtypes import ScaledDType
from stageline_rpc.v1 import cluster_pb2
from tests.frame_messages import add_message, encode_frame
from tests.unit.wire.wire_strategies import hidden_states
from wire.errors import StepFault, StepFaultKind
from wire.frames import Frame, FrameAssembler
from wire.step_codec import encode_step
from wire.steps import Step
from wire.tensors import (
    TensorView,
    WireDType,
    can_carry,
    check_can_carry,
    decode_tensor,
    encode_header,
    parse_wire_dtype,
    payload_bytes,
)

FP8, INT8 = ScaledDType.F8_E4M3, ScaledDType.I8


def test_names_equal_the_flag_values() -> None:
    names = {name: parse_wire_dtype(name) for name in ("bf16", "fp8", "int8")}
    assert names == {"bf16": DType.BF16, "fp8": FP8, "int8": INT8}
    assert all(dtype.value == name for name, dtype in names.items())
    for name in ("f32", "FP8", "int4", ""):
        with pytest.raises(ValueError, match=f"wire dtype '{name}' is not one of bf16, fp8, int8"):
            parse_wire_dtype(name)


@pytest.mark.parametrize(
    ("computed", "possible"),
    [
        (DType.F32, {DType.F32, DType.BF16, FP8, INT8}),
        (DType.BF16, {DType.BF16, FP8, INT8}),
        (DType.F16, {DType.F16, FP8, INT8}),
    ],
)
def test_hidden_states_are_sent_as_computed_or_smaller(computed: DType, possible: set[WireDType]) -> None:
    every: list[WireDType] = [*DType, *ScaledDType]
    assert {dtype for dtype in every if can_carry(dtype, computed)} == possible
    for dtype in set(every) - possible:
        with pytest.raises(ValueError, match=f"{dtype.value} is not smaller than .* {computed.value}"):
            check_can_carry(dtype, computed)


def test_a_scaled_row_takes_a_byte_per_element_and_a_scale() -> None:
    assert payload_bytes(FP8, (3, 5)) == 3 * 5 + 3 * 4
    assert payload_bytes(INT8, (0, 5)) == 0
    assert payload_bytes(DType.BF16, (3, 5)) == 30
    assert TensorView(INT8, (3, 5), bytes(27)).size_bytes == 27


@pytest.mark.parametrize("dtype", ScaledDType)
@pytest.mark.parametrize("size", [0, 15, 26, 28, 30])
def test_scaled_hidden_states_of_another_size_are_rejected(dtype: ScaledDType, size: int) -> None:
    with pytest.raises(ValueError, match=f"has 27 bytes, got {size}"):
        TensorView(dtype, (3, 5), bytes(size))
    header = encode_header(TensorView(dtype, (3, 5), bytes(27)))
    assert decode_tensor(header, bytes(27)).shape == (3, 5)
    for said in (27, size):
        header.size_bytes = said
        with pytest.raises(StepFault) as fault:
            decode_tensor(header, bytes(size))
        assert fault.value.kind is StepFaultKind.SHAPE
        assert f"({dtype.value}" in fault.value.message or f"in {dtype.value} need 27" in fault.value.message


@pytest.mark.parametrize("dtype", [DType.F32, *ScaledDType])
def test_headers_carry_the_dtype(dtype: WireDType) -> None:
    view = TensorView(dtype, (2, 4), bytes(payload_bytes(dtype, (2, 4))))
    header = encode_header(view)
    assert cluster_pb2.Dtype.Name(header.dtype) in {"DTYPE_F32", "DTYPE_F8_E4M3", "DTYPE_I8"}
    assert decode_tensor(header, view.data) == view


@pytest.mark.parametrize("declared", [DType.F32, DType.BF16, FP8, INT8])
@pytest.mark.parametrize("sent", [DType.F32, DType.BF16, FP8, INT8])
def test_only_the_declared_dtype_is_accepted(declared: WireDType, sent: WireDType) -> None:
    step = Step(epoch=1, step_id=7, digest=0)
    view = TensorView(sent, (2, 4), bytes(payload_bytes(sent, (2, 4))))
    ahead, message = encode_frame(encode_step(step), 7, view)
    assembler = FrameAssembler(max_payload_bytes=1000, wire_dtype=declared)
    add_message(assembler, ahead)
    if sent is declared:
        frame = add_message(assembler, message)
        assert isinstance(frame, Frame)
        assert frame.hidden == view
        return
    with pytest.raises(StepFault, match=f"in {sent.value}, expected {declared.value}") as fault:
        add_message(assembler, message)
    assert (fault.value.kind, fault.value.step_id) == (StepFaultKind.DTYPE, 7)


def test_an_assembler_without_a_declaration_accepts_any_dtype() -> None:
    step = Step(epoch=1, step_id=0, digest=0)
    assembler = FrameAssembler(max_payload_bytes=1000)
    _, frame = [
        add_message(assembler, message) for message in encode_frame(encode_step(step), 0, hidden_states(2, 4))
    ]
    assert isinstance(frame, Frame)
