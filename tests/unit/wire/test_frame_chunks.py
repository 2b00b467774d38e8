"""Whatever the bytes are, they mean what protobuf says that they mean."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from stageline_rpc.v1 import stage_pb2
from wire.errors import StepFault, StepFaultKind
from wire.frame_chunks import read_chunk, write_chunk

heads = st.builds(
    stage_pb2.FrameChunk,
    step=st.binary(max_size=200),
    hidden=st.binary(max_size=20),
    checksum=st.integers(0, 2**64 - 1),
    is_last=st.booleans(),
    stage_times=st.binary(max_size=20),
)
payloads = st.sampled_from((0, 1, 2, 120, 121, 122, 126, 127, 128, 16_380, 16_384, 1 << 21)).map(bytes)


def by_protobuf(message: bytes) -> stage_pb2.FrameChunk | None:
    """None for what is no chunk."""
    try:
        request = stage_pb2.ForwardRequest.FromString(message)
    except DecodeError:
        return None
    return request.chunk if request.HasField("chunk") else None


def assert_read_as_by_protobuf(message: bytes) -> None:
    expected = by_protobuf(message)
    if expected is None:
        with pytest.raises(StepFault) as caught:
            read_chunk(message)
        assert caught.value.kind is StepFaultKind.UNDECODABLE
        return
    chunk, payload = read_chunk(message)
    assert payload == expected.payload
    for field in ("step", "hidden", "checksum", "is_last", "stage_times"):
        assert getattr(chunk, field) == getattr(expected, field)


@given(heads, payloads)
def test_what_is_written_is_one_message_for_protobuf(head: stage_pb2.FrameChunk, payload: bytes) -> None:
    read = by_protobuf(write_chunk(head.SerializeToString(), memoryview(payload)))
    head.payload = payload
    assert read == head


@given(heads, payloads)
def test_a_payload_is_a_view_of_what_came(head: stage_pb2.FrameChunk, payload: bytes) -> None:
    message = write_chunk(head.SerializeToString(), payload)
    assert_read_as_by_protobuf(message)
    _, read = read_chunk(message)
    if payload:
        assert isinstance(read, memoryview)
        assert read.readonly
        assert read.obj is message


@given(heads, st.binary(max_size=200))
def test_what_another_implementation_writes_is_read(head: stage_pb2.FrameChunk, payload: bytes) -> None:
    """Fields in the order of their numbers, in one piece."""
    head.payload = payload
    assert_read_as_by_protobuf(stage_pb2.ForwardRequest(chunk=head).SerializeToString())


@given(heads, st.binary(max_size=150), st.data())
def test_a_changed_cut_or_doubled_message_is_read_as_by_protobuf(
    head: stage_pb2.FrameChunk, payload: bytes, data: st.DataObject
) -> None:
    message = bytearray(write_chunk(head.SerializeToString(), payload))
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.integers(0, len(message) - 1))
        message[place] = data.draw(st.integers(0, 255))
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(message))] * 2)))
    assert_read_as_by_protobuf(bytes(message))
    assert_read_as_by_protobuf(bytes(message[:end]))
    assert_read_as_by_protobuf(bytes(message + message[begin:]))


@given(st.binary(max_size=40))
@example(b"\x12\x00\x12\x02\x22\x00")
@example(b"\x12\x80\x00")
@example(b"\x12\x00\x12\x03\x22\x05a")
@example(b"\x12\x04\x22\x02ab\x12\x03\x22\x01c")
@example(b"\x12\x00\x12\x05\x22\x01a\x28\x01")
@example(b"\x12\x00\x12\x02\x22\x01a")
@example(b"\x12\x00\x12\x03\x22\x01a\x12\x00")
@example(b"\x12\x05a")
@example(b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
def test_any_bytes_are_read_as_by_protobuf(message: bytes) -> None:
    assert_read_as_by_protobuf(message)


def test_a_hello_in_the_place_of_a_chunk_is_named() -> None:
    message = stage_pb2.ForwardRequest(hello=stage_pb2.HopHello(epoch=3)).SerializeToString()
    with pytest.raises(StepFault, match="message 'hello' where a chunk was due"):
        read_chunk(message)
