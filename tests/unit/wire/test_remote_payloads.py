"""Frames whose hidden states travel on the payload connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from stageline_rpc.internal.v1 import forward_pb2
from tests.unit.wire.wire_strategies import example_step, hidden_states
from wire.errors import StepFault, StepFaultKind
from wire.frames import Frame, FrameAssembler, encode_hidden_states, encode_step_frame, hidden_checksum
from wire.payloads import PayloadNotice
from wire.step_codec import encode_step

STEP = example_step()
HIDDEN = hidden_states(3, 4)
(TENSOR,) = HIDDEN
NOTICE = PayloadNotice(5, TENSOR.size_bytes, 0xABC)
Change = Callable[[forward_pb2.HiddenStatesChunk], object]


def messages(notice: PayloadNotice | None = NOTICE) -> tuple[bytes, bytes]:
    """The step and its hidden states."""
    step = encode_step_frame(encode_step(STEP))
    checksum = forward_pb2.ForwardRequest.FromString(step).steps[0].checksum
    (hidden,) = encode_hidden_states(STEP.step_id, checksum, HIDDEN, notice=notice)
    return step, hidden


def assembler(max_payload_bytes: int = TENSOR.size_bytes) -> FrameAssembler:
    """Waits for the hidden states of the step."""
    made = FrameAssembler(max_payload_bytes=max_payload_bytes)
    made.add(messages()[0])
    return made


def fault_of(change: Change, *, is_resealed: bool = True) -> StepFault:
    request = forward_pb2.ForwardRequest.FromString(messages()[1])
    chunk = request.hidden_states
    change(chunk)
    if is_resealed:
        chunk.checksum = hidden_checksum(chunk, chunk.payload)
    with pytest.raises(StepFault) as raised:
        assembler().add(request.SerializeToString())
    return raised.value


def test_a_frame_is_complete_with_the_payload_that_it_names() -> None:
    receiving = assembler()
    message = messages()[1]
    assert TENSOR.data not in message
    assert receiving.add(message) == [NOTICE]
    frame = receiving.add_payload(TENSOR.data)
    assert isinstance(frame, Frame)
    assert (frame.step, frame.hidden) == (STEP, HIDDEN)


def test_frames_with_and_without_notices_alternate() -> None:
    receiving = assembler()
    for number in range(3):
        notice = replace(NOTICE, number=number)
        assert receiving.add(messages(notice)[1]) == [notice]
        assert receiving.add_payload(TENSOR.data).hidden == HIDDEN
        receiving.add(messages()[0])
        (inline,) = receiving.add(messages(None)[1])
        assert isinstance(inline, Frame) and inline.hidden == HIDDEN
        receiving.add(messages()[0])


def test_the_checksum_covers_the_notice() -> None:
    other = forward_pb2.RemotePayload(number=6, size_bytes=48, checksum=0xABC).SerializeToString()
    fault = fault_of(lambda chunk: setattr(chunk, "remote_payload", other), is_resealed=False)
    assert fault.kind is StepFaultKind.CHECKSUM


def test_a_notice_beside_a_payload_is_undecodable() -> None:
    fault = fault_of(lambda chunk: setattr(chunk, "payload", b"1234"))
    assert fault.kind is StepFaultKind.UNDECODABLE
    assert fault.message == "4 bytes of payload beside a remote payload"


def test_an_invalid_notice_is_undecodable() -> None:
    fault = fault_of(lambda chunk: setattr(chunk, "remote_payload", b"\xff\xff"))
    assert fault.kind is StepFaultKind.UNDECODABLE


def test_a_too_large_payload_is_rejected_before_it_is_awaited() -> None:
    with pytest.raises(StepFault, match=r"frame payload has 48 bytes or more, the limit is 47") as raised:
        assembler(max_payload_bytes=47).add(messages()[1])
    assert raised.value.kind is StepFaultKind.SHAPE


def test_a_payload_of_another_size_than_the_tensor_is_rejected() -> None:
    receiving = assembler()
    receiving.add(messages(replace(NOTICE, size_bytes=44))[1])
    with pytest.raises(StepFault, match=r"the payload has 44") as raised:
        receiving.add_payload(bytes(44))
    assert (raised.value.kind, raised.value.step_id) == (StepFaultKind.SHAPE, STEP.step_id)


def test_hidden_states_that_start_before_the_payload_came_are_undecodable() -> None:
    receiving = assembler()
    receiving.add(messages()[1])
    with pytest.raises(StepFault, match="inside an incomplete frame"):
        receiving.add(messages()[1])
