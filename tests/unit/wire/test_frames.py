"""A frame arrives unchanged or is rejected."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from checkpoint import DType
from stageline_rpc.internal.v1 import deliver_pb2, forward_pb2, step_pb2
from tests.frame_messages import add_chunk, encode_frame
from tests.unit.wire.wire_strategies import example_step, hidden_states, steps
from wire import frames
from wire.errors import StepFault, StepFaultKind
from wire.frames import (
    CHUNK_BYTES,
    Frame,
    FrameAssembler,
    decode_result_frame,
    encode_result_frame,
    frame_checksum,
    read_chunk,
    write_chunk,
)
from wire.ids import SequenceKey, new_request_id
from wire.step_codec import encode_step
from wire.steps import SliceResult, StageTime, Step, StepResult
from wire.tensors import TensorView

SMALL_CHUNK = 64


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "CHUNK_BYTES", SMALL_CHUNK)


def chunks_of(step: Step, hidden: TensorView | None) -> list[forward_pb2.FrameChunk]:
    messages = list(encode_frame(encode_step(step), step.step_id, hidden))
    assert all(message.WhichOneof("message") == "chunk" for message in messages)
    return [forward_pb2.ForwardRequest.FromString(message.SerializeToString()).chunk for message in messages]


def assemble(chunks: Iterable[forward_pb2.FrameChunk], *, max_payload_bytes: int = 1 << 30) -> list[Frame]:
    assembler = FrameAssembler(max_payload_bytes=max_payload_bytes)
    return [frame for chunk in chunks if (frame := add_chunk(assembler, chunk)) is not None]


def refusal(chunks: Iterable[forward_pb2.FrameChunk], *, max_payload_bytes: int = 1 << 30) -> StepFault:
    with pytest.raises(StepFault) as caught:
        assemble(chunks, max_payload_bytes=max_payload_bytes)
    return caught.value


def resealed(chunk: forward_pb2.FrameChunk) -> forward_pb2.FrameChunk:
    """A single chunk with its checksum recomputed."""
    chunk.checksum = frame_checksum(chunk.step, chunk.hidden, chunk.stage_times, chunk.payload)
    return chunk


def change_header(change: Callable[[step_pb2.TensorHeader], object]) -> forward_pb2.FrameChunk:
    (chunk,) = chunks_of(example_step(), hidden_states(3, 4))
    header = step_pb2.TensorHeader.FromString(chunk.hidden)
    change(header)
    chunk.hidden = header.SerializeToString()
    return resealed(chunk)


@given(steps(), st.sampled_from(DType), st.integers(1, 4), st.integers(0, 40))
def test_a_frame_round_trips(step: Step, dtype: DType, num_tokens: int, width: int) -> None:
    hidden = hidden_states(num_tokens, width, dtype=dtype)
    for carried in (None, hidden):
        (frame,) = assemble(chunks_of(step, carried))
        assert frame == Frame(step, encode_step(step), carried)


@pytest.mark.parametrize(
    ("num_bytes", "num_chunks"),
    [
        (0, 1),
        (4, 1),
        (SMALL_CHUNK - 4, 1),
        (SMALL_CHUNK, 1),
        (SMALL_CHUNK + 4, 2),
        (3 * SMALL_CHUNK, 3),
        (3 * SMALL_CHUNK + 4, 4),
    ],
)
@pytest.mark.usefixtures("small_chunks")
def test_hidden_states_are_cut_into_chunks(num_bytes: int, num_chunks: int) -> None:
    hidden = hidden_states(1, num_bytes // 4)
    chunks = chunks_of(example_step(), hidden)
    assert len(chunks) == num_chunks
    assert [chunk.is_last for chunk in chunks] == [False] * (num_chunks - 1) + [True]
    assert all(len(chunk.payload) == SMALL_CHUNK for chunk in chunks[:-1])
    assert all(not (chunk.step or chunk.hidden or chunk.checksum) for chunk in chunks[1:])
    (frame,) = assemble(chunks)
    assert frame.hidden == hidden


def test_a_large_payload_travels_in_messages_of_a_mebibyte() -> None:
    hidden = hidden_states(3, CHUNK_BYTES // 4)
    chunks = chunks_of(example_step(), hidden)
    assert [len(chunk.payload) for chunk in chunks] == [CHUNK_BYTES] * 3
    (frame,) = assemble(chunks)
    assert frame.hidden == hidden


def test_frames_of_one_stream_follow_each_other() -> None:
    sent = [(example_step(step_id=n), hidden_states(3, n) if n % 2 else None) for n in range(4)]
    chunks = [chunk for step, hidden in sent for chunk in chunks_of(step, hidden)]
    received = assemble(chunks, max_payload_bytes=3 * 3 * 4)
    assert [(frame.step, frame.hidden) for frame in received] == sent


def test_the_step_is_forwarded_byte_for_byte() -> None:
    """Includes a field unknown to this version."""
    step_bytes = encode_step(example_step()) + b"\x7a\x03new"
    (message,) = encode_frame(step_bytes, 7, None)
    (frame,) = assemble([message.chunk])
    assert frame.step_bytes == step_bytes
    (again,) = encode_frame(frame.step_bytes, frame.step.step_id, None)
    assert again == message


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_any_changed_byte_of_a_frame_is_detected(mask: int) -> None:
    original = chunks_of(example_step(), hidden_states(3, 9))
    num_places = 0
    for index, chunk in enumerate(original):
        fields = {"payload": chunk.payload, "step": chunk.step, "hidden": chunk.hidden}
        for name, data in fields.items():
            for place in range(len(data)):
                damaged = bytearray(data)
                damaged[place] ^= mask
                chunks = [
                    forward_pb2.FrameChunk.FromString(message.SerializeToString()) for message in original
                ]
                setattr(chunks[index], name, bytes(damaged))
                assert refusal(chunks).kind in (StepFaultKind.CHECKSUM, StepFaultKind.UNDECODABLE)
                num_places += 1
    assert num_places > 3 * 9 * 4 + 100
    for place in range(8):
        chunks = [forward_pb2.FrameChunk.FromString(message.SerializeToString()) for message in original]
        chunks[0].checksum ^= mask << 8 * place
        assert refusal(chunks).kind is StepFaultKind.CHECKSUM


@pytest.mark.usefixtures("small_chunks")
def test_a_changed_byte_of_a_message_never_gives_another_frame() -> None:
    """Includes tags, lengths and `is_last`: the frame is lost, rejected or unchanged, never different."""
    messages = list(encode_frame(encode_step(example_step()), 7, hidden_states(3, 9)))
    (intact,) = assemble(message.chunk for message in messages)
    outcomes: set[type] = set()
    for index, message in enumerate(messages):
        data = message.SerializeToString()
        for place in range(len(data)):
            damaged = bytearray(data)
            damaged[place] ^= 0x02
            try:
                changed = forward_pb2.ForwardRequest.FromString(bytes(damaged))
                received = assemble(
                    (changed if position == index else messages[position]).chunk
                    for position in range(len(messages))
                )
            except (DecodeError, StepFault) as error:
                outcomes.add(type(error))
                continue
            assert received in ([], [intact])
            outcomes.add(list)
    assert outcomes == {DecodeError, StepFault, list}


@pytest.mark.usefixtures("small_chunks")
@given(data=st.data())
def test_lost_repeated_and_swapped_chunks_never_give_a_wrong_frame(data: st.DataObject) -> None:
    sent = [(example_step(step_id=n), hidden_states(3, 6 + 5 * n)) for n in range(3)]
    chunks = [chunk for step, hidden in sent for chunk in chunks_of(step, hidden)]
    order = data.draw(st.lists(st.sampled_from(range(len(chunks))), max_size=len(chunks) + 2))
    assembler = FrameAssembler(max_payload_bytes=1 << 20)
    received = []
    refused_as: StepFaultKind | None = None
    for index in order:
        try:
            frame = add_chunk(assembler, chunks[index])
        except StepFault as fault:
            refused_as = fault.kind
            break
        if frame is not None:
            received.append((frame.step, frame.hidden))
    assert all(frame in sent for frame in received)
    assert refused_as in (None, StepFaultKind.CHECKSUM, StepFaultKind.UNDECODABLE)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("hidden", [None, hidden_states(3, 9)], ids=["records only", "with hidden states"])
def test_a_frame_that_starts_inside_another_is_undecodable(hidden: TensorView | None) -> None:
    first = chunks_of(example_step(step_id=1), hidden_states(3, 9))
    second = chunks_of(example_step(step_id=2), hidden)
    fault = refusal([*first[:-1], *second])
    assert fault.kind is StepFaultKind.UNDECODABLE
    assert "inside an incomplete frame" in fault.message


@pytest.mark.usefixtures("small_chunks")
def test_a_frame_without_its_first_chunk_is_rejected() -> None:
    chunks = chunks_of(example_step(), hidden_states(3, 9))
    assert len(chunks) == 2
    assert refusal(chunks[1:]).kind is StepFaultKind.CHECKSUM


@pytest.mark.usefixtures("small_chunks")
def test_an_oversized_frame_is_rejected_before_it_is_complete() -> None:
    hidden = hidden_states(10, SMALL_CHUNK)
    chunks = chunks_of(example_step(), hidden)
    fault = refusal(chunks[:3], max_payload_bytes=2 * SMALL_CHUNK)
    assert fault.kind is StepFaultKind.SHAPE
    assert str(3 * SMALL_CHUNK) in fault.message
    assert str(2 * SMALL_CHUNK) in fault.message
    assert len(assemble(chunks, max_payload_bytes=hidden.size_bytes)) == 1


def test_a_truncated_payload_is_rejected() -> None:
    (chunk,) = chunks_of(example_step(), hidden_states(3, 9))
    chunk.payload = chunk.payload[:-4]
    assert refusal([chunk]).kind is StepFaultKind.CHECKSUM
    fault = refusal([resealed(chunk)])
    assert fault.kind is StepFaultKind.SHAPE
    assert "(3, 9) in f32 need 108 bytes; the header says 108, the payload has 104" in fault.message


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (lambda header: setattr(header, "dtype", 0), StepFaultKind.DTYPE, "dtype number 0"),
        (lambda header: setattr(header, "dtype", 99), StepFaultKind.DTYPE, "dtype number 99"),
        (lambda header: setattr(header, "dtype", 1), StepFaultKind.SHAPE, "need 24 bytes"),
        (lambda header: setattr(header, "byte_order", 0), StepFaultKind.DTYPE, "byte order number 0"),
        (lambda header: setattr(header, "byte_order", 2), StepFaultKind.DTYPE, "byte order number 2"),
        (lambda header: header.shape.append(2), StepFaultKind.SHAPE, "need 96 bytes"),
        (lambda header: header.ClearField("shape"), StepFaultKind.SHAPE, "need 4 bytes"),
        (lambda header: header.shape.append(0), StepFaultKind.SHAPE, "need 0 bytes"),
        (lambda header: setattr(header, "size_bytes", 44), StepFaultKind.SHAPE, "the header says 44"),
        (lambda header: setattr(header, "step_id", 6), StepFaultKind.SLICE_SET, "of step 6"),
        (lambda header: setattr(header, "step_checksum", 1), StepFaultKind.SLICE_SET, "0000000000000001"),
    ],
)
def test_an_inconsistent_header_is_rejected(
    change: Callable[[step_pb2.TensorHeader], object], kind: StepFaultKind, text: str
) -> None:
    fault = refusal([change_header(change)])
    assert fault.kind is kind
    assert text in fault.message
    assert fault.step_id == 7
    assert fault.request_ids == example_step().request_ids


def test_hidden_states_of_another_step_are_rejected() -> None:
    """Same step id and shape, other slices: a stale buffer."""
    (present,) = chunks_of(example_step(), hidden_states(3, 4))
    (other,) = chunks_of(example_step(num_tokens=3), hidden_states(3, 4))
    present.hidden = other.hidden
    fault = refusal([resealed(present)])
    assert fault.kind is StepFaultKind.SLICE_SET
    assert "hidden states of step 7" in fault.message


def test_a_payload_without_a_header_is_rejected() -> None:
    (chunk,) = chunks_of(example_step(), None)
    chunk.payload = b"1234"
    fault = refusal([resealed(chunk)])
    assert fault.kind is StepFaultKind.HIDDEN_STATES_UNEXPECTED
    assert "4 bytes" in fault.message


def test_an_invalid_header_is_undecodable() -> None:
    (chunk,) = chunks_of(example_step(), hidden_states(3, 4))
    chunk.hidden = b"\xff\xff"
    fault = refusal([resealed(chunk)])
    assert fault.kind is StepFaultKind.UNDECODABLE
    assert fault.step_id == 7


def test_the_checksum_covers_part_boundaries() -> None:
    parts = b"abcdef"
    checksums = [
        frame_checksum(parts[:i], parts[i:j], parts[j:k], parts[k:])
        for i in range(7)
        for j in range(i, 7)
        for k in range(j, 7)
    ]
    assert all(one != other for one, other in pairwise(sorted(checksums)))
    zero, eight = struct.pack("<Q", 0), struct.pack("<Q", 8)
    assert frame_checksum(b"", zero, b"", parts) != frame_checksum(eight, b"", b"", parts)
    assert frame_checksum(b"", b"", zero, parts) != frame_checksum(b"", eight, b"", parts)


def test_a_tensor_counts_its_bytes() -> None:
    assert TensorView(DType.BF16, (2, 3), bytes(12)).size_bytes == 12
    with pytest.raises(ValueError, match=r"f32 tensor of shape \(2, 3\) has 24 bytes, got 12"):
        TensorView(DType.F32, (2, 3), bytes(12))


heads = st.builds(
    forward_pb2.FrameChunk,
    step=st.binary(max_size=200),
    hidden=st.binary(max_size=20),
    checksum=st.integers(0, 2**64 - 1),
    is_last=st.booleans(),
    stage_times=st.binary(max_size=20),
)
payloads = st.sampled_from((0, 1, 2, 120, 121, 122, 126, 127, 128, 16_380, 16_384, 1 << 21)).map(bytes)


def by_protobuf(message: bytes) -> forward_pb2.FrameChunk | None:
    """None if the bytes are not a chunk."""
    try:
        request = forward_pb2.ForwardRequest.FromString(message)
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
def test_written_frames_are_valid_protobuf(head: forward_pb2.FrameChunk, payload: bytes) -> None:
    read = by_protobuf(write_chunk(head.SerializeToString(), memoryview(payload)))
    head.payload = payload
    assert read == head


@given(heads, payloads)
def test_a_payload_is_a_view_of_the_received_bytes(head: forward_pb2.FrameChunk, payload: bytes) -> None:
    message = write_chunk(head.SerializeToString(), payload)
    assert_read_as_by_protobuf(message)
    _, read = read_chunk(message)
    if payload:
        assert isinstance(read, memoryview)
        assert read.readonly
        assert read.obj is message


@given(heads, st.binary(max_size=200))
def test_frames_of_another_implementation_are_read(head: forward_pb2.FrameChunk, payload: bytes) -> None:
    """Fields in number order, in one piece."""
    head.payload = payload
    assert_read_as_by_protobuf(forward_pb2.ForwardRequest(chunk=head).SerializeToString())


@given(heads, st.binary(max_size=150), st.data())
def test_a_changed_cut_or_doubled_message_is_read_as_by_protobuf(
    head: forward_pb2.FrameChunk, payload: bytes, data: st.DataObject
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


def test_a_hello_in_place_of_a_chunk_is_named() -> None:
    message = forward_pb2.ForwardRequest(hello=forward_pb2.HopHello(epoch=3)).SerializeToString()
    with pytest.raises(StepFault, match="message of kind 'hello', expected a chunk"):
        read_chunk(message)


RESULT = StepResult.of(
    3, 7, (SliceResult(SequenceKey(new_request_id(), 0), 2, 41),), (StageTime(1, 2), StageTime(3, 4))
)


def test_a_result_round_trips() -> None:
    data = encode_result_frame(RESULT).SerializeToString()
    assert decode_result_frame(deliver_pb2.DeliverRequest.FromString(data)) == RESULT


def test_every_flipped_bit_is_detected() -> None:
    frame = encode_result_frame(RESULT).frame
    for index in range(len(frame.result)):
        broken = bytearray(frame.result)
        broken[index] ^= 1 << index % 8
        message = deliver_pb2.DeliverRequest(
            frame=deliver_pb2.ResultFrame(result=bytes(broken), checksum=frame.checksum)
        )
        with pytest.raises(StepFault) as raised:
            decode_result_frame(message)
        assert raised.value.kind is StepFaultKind.CHECKSUM


@pytest.mark.parametrize(
    "message",
    [
        deliver_pb2.DeliverRequest(),
        deliver_pb2.DeliverRequest(hello=forward_pb2.HopHello()),
        deliver_pb2.DeliverRequest(
            frame=deliver_pb2.ResultFrame(result=b"\xff", checksum=0xD6BCEC3C6B29D72E)
        ),
    ],
)
def test_an_invalid_result_is_rejected(message: deliver_pb2.DeliverRequest) -> None:
    with pytest.raises(StepFault):
        decode_result_frame(message)
