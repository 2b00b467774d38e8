"""Dtypes of hidden states between stages and their sizes in bytes."""

import pytest

from checkpoint import DType
from checkpoint.dtypes import ScaledDType
from stageline_rpc.internal.v1 import step_pb2
from stageline_rpc.v1 import cluster_pb2
from tests.frame_messages import add_message, encode_frame
from tests.unit.wire.wire_strategies import hidden_states
from wire.errors import StepFault, StepFaultKind
from wire.frames import Frame, FrameAssembler
from wire.step_codec import encode_step
from wire.steps import Step
from wire.tensors import (
    MAX_TENSORS,
    HiddenStates,
    TensorView,
    WireDType,
    can_carry,
    check_can_carry,
    decode_tensors,
    encode_headers,
    parse_wire_dtype,
    payload_bytes,
    payload_of,
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
    headers = encode_headers((TensorView(dtype, (3, 5), bytes(27)),))
    assert decode_tensors(headers, bytes(27))[0].shape == (3, 5)
    for said in (27, size):
        headers.tensors[0].size_bytes = said
        with pytest.raises(StepFault) as fault:
            decode_tensors(headers, bytes(size))
        assert fault.value.kind is StepFaultKind.SHAPE
        assert f"({dtype.value}" in fault.value.message or f"in {dtype.value} need 27" in fault.value.message


@pytest.mark.parametrize("dtype", [DType.F32, *ScaledDType])
def test_headers_carry_the_dtype(dtype: WireDType) -> None:
    view = TensorView(dtype, (2, 4), bytes(payload_bytes(dtype, (2, 4))))
    headers = encode_headers((view,))
    assert cluster_pb2.Dtype.Name(headers.tensors[0].dtype) in {"DTYPE_F32", "DTYPE_F8_E4M3", "DTYPE_I8"}
    assert decode_tensors(headers, view.data) == (view,)


@pytest.mark.parametrize("declared", [DType.F32, DType.BF16, FP8, INT8])
@pytest.mark.parametrize("sent", [DType.F32, DType.BF16, FP8, INT8])
def test_only_the_declared_dtype_is_accepted(declared: WireDType, sent: WireDType) -> None:
    step = Step(epoch=1, step_id=7, digest=0)
    view = TensorView(sent, (2, 4), bytes(payload_bytes(sent, (2, 4))))
    ahead, message = encode_frame(encode_step(step), 7, (view,))
    assembler = FrameAssembler(max_payload_bytes=1000, wire_dtype=declared)
    add_message(assembler, ahead)
    if sent is declared:
        frame = add_message(assembler, message)
        assert isinstance(frame, Frame)
        assert frame.hidden == (view,)
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


def two_tensors(num_tokens: int = 3) -> HiddenStates:
    """One of an odd number of bytes, which a smaller wire dtype carries, and one exact."""
    scaled = (num_tokens, 5)
    return (
        TensorView(FP8, scaled, bytes(range(payload_bytes(FP8, scaled)))),
        TensorView(DType.F32, (num_tokens, 2), bytes(range(8 * num_tokens)), "chosen"),
    )


def test_a_frame_carries_a_list_of_named_tensors() -> None:
    step = encode_step(Step(epoch=1, step_id=7, digest=0))
    assembler = FrameAssembler(max_payload_bytes=1000, wire_dtype=FP8, exact_tensors={"chosen"})
    _, frame = [add_message(assembler, message) for message in encode_frame(step, 7, two_tensors())]
    assert isinstance(frame, Frame)
    assert frame.hidden == two_tensors()
    assert [tensor.name for tensor in frame.hidden] == ["hidden_states", "chosen"]
    strict = FrameAssembler(max_payload_bytes=1000, wire_dtype=FP8)
    with pytest.raises(StepFault, match="tensor 'chosen' in f32, expected fp8 as in the hello"):
        [add_message(strict, message) for message in encode_frame(step, 7, two_tensors())]


def test_the_bytes_of_named_tensors_must_be_those_of_their_headers() -> None:
    payload = bytes(payload_of(two_tensors()))
    assert decode_tensors(encode_headers(two_tensors()), payload) == two_tensors()
    for changed, text in (
        (payload[:-1], "tensor 'chosen' (3, 2) in f32 need 24 bytes; the header says 24, the payload has 23"),
        (payload + b"x", "the payload has 25"),
        (payload[:20], "hidden states (3, 5) in fp8 need 27 bytes; the header says 27, the payload has 20"),
    ):
        with pytest.raises(StepFault) as fault:
            decode_tensors(encode_headers(two_tensors()), changed)
        assert fault.value.kind is StepFaultKind.SHAPE
        assert text in fault.value.message
    swapped = encode_headers(two_tensors()[::-1])
    swapped.tensors[0].size_bytes, swapped.tensors[1].size_bytes = 27, 24
    with pytest.raises(StepFault, match="need 24 bytes; the header says 27"):
        decode_tensors(swapped, payload)


@pytest.mark.parametrize("num_tensors", [0, MAX_TENSORS + 1, 100_000])
def test_a_frame_has_few_tensors(num_tensors: int) -> None:
    headers = step_pb2.TensorHeaders(tensors=[step_pb2.TensorHeader()] * num_tensors)
    with pytest.raises(StepFault, match=f"{num_tensors} tensors in one frame, expected 1 to 16") as fault:
        decode_tensors(headers, b"")
    assert fault.value.kind is StepFaultKind.SHAPE
