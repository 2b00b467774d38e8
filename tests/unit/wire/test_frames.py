"""A frame arrives unchanged or is rejected."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from checkpoint import DType
from stageline_rpc.internal.v1 import deliver_pb2, forward_pb2, step_pb2
from tests.frame_messages import add_message, encode_frame
from tests.unit.wire.wire_strategies import example_step, hidden_states, steps
from wire import frames
from wire.errors import StepFault, StepFaultKind
from wire.frames import (
    CHUNK_BYTES,
    Frame,
    FrameAssembler,
    StepFrame,
    decode_result_frame,
    encode_result_frame,
    encode_step_frame,
    hidden_checksum,
    read_message,
    write_chunk,
)
from wire.ids import SequenceKey, new_request_id
from wire.step_codec import encode_step
from wire.steps import SliceResult, StageTime, Step, StepResult
from wire.tensors import HiddenStates, TensorView

SMALL_CHUNK = 64


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "CHUNK_BYTES", SMALL_CHUNK)


def messages_of(step: Step, hidden: HiddenStates) -> list[forward_pb2.ForwardRequest]:
    """The step, then its hidden states."""
    messages = list(encode_frame(encode_step(step), step.step_id, hidden))
    assert [field.name for field, _ in messages[0].ListFields()] == ["steps"]
    assert all(message.HasField("hidden_states") and not message.steps for message in messages[1:])
    return [forward_pb2.ForwardRequest.FromString(message.SerializeToString()) for message in messages]


def chunks_of(step: Step, hidden: HiddenStates) -> list[forward_pb2.HiddenStatesChunk]:
    return [message.hidden_states for message in messages_of(step, hidden)[1:]]


def assemble(
    messages: Iterable[forward_pb2.ForwardRequest], *, max_payload_bytes: int = 1 << 30
) -> list[Frame]:
    assembler = FrameAssembler(max_payload_bytes=max_payload_bytes)
    received = [add_message(assembler, message) for message in messages]
    return [frame for frame in received if isinstance(frame, Frame)]


def refusal(messages: Iterable[forward_pb2.ForwardRequest], *, max_payload_bytes: int = 1 << 30) -> StepFault:
    with pytest.raises(StepFault) as caught:
        assemble(messages, max_payload_bytes=max_payload_bytes)
    return caught.value


def resealed(message: forward_pb2.ForwardRequest) -> forward_pb2.ForwardRequest:
    """The only chunk of hidden states, with its checksum recomputed."""
    chunk = message.hidden_states
    chunk.checksum = hidden_checksum(chunk, chunk.payload)
    return message


def change_header(change: Callable[[step_pb2.TensorHeader], object]) -> list[forward_pb2.ForwardRequest]:
    step, hidden = messages_of(example_step(), hidden_states(3, 4))
    headers = step_pb2.TensorHeaders.FromString(hidden.hidden_states.header)
    change(headers.tensors[0])
    hidden.hidden_states.header = headers.SerializeToString()
    return [step, resealed(hidden)]


@given(steps(), st.sampled_from(DType), st.integers(1, 4), st.integers(0, 40))
def test_a_frame_round_trips(step: Step, dtype: DType, num_tokens: int, width: int) -> None:
    hidden = hidden_states(num_tokens, width, dtype=dtype)
    for carried in ((), hidden):
        (frame,) = assemble(messages_of(step, carried))
        assert replace(frame, step_checksum=0) == Frame(step, carried)


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
    first_only = ("step_id", "step_checksum", "header", "stage_times", "checksum")
    assert not any(getattr(chunk, name) for chunk in chunks[1:] for name in first_only)
    (frame,) = assemble(messages_of(example_step(), hidden))
    assert frame.hidden == hidden


def test_a_large_payload_travels_in_messages_of_a_mebibyte() -> None:
    hidden = hidden_states(3, CHUNK_BYTES // 4)
    chunks = chunks_of(example_step(), hidden)
    assert [len(chunk.payload) for chunk in chunks] == [CHUNK_BYTES] * 3
    (frame,) = assemble(messages_of(example_step(), hidden))
    assert frame.hidden == hidden


def test_frames_of_one_stream_follow_each_other() -> None:
    sent = [(example_step(step_id=n), hidden_states(3, n) if n % 2 else ()) for n in range(4)]
    messages = [message for step, hidden in sent for message in messages_of(step, hidden)]
    received = assemble(messages, max_payload_bytes=3 * 3 * 4)
    assert [(frame.step, frame.hidden) for frame in received] == sent


def test_steps_travel_ahead_of_their_hidden_states() -> None:
    """Also between the chunks of earlier hidden states."""
    sent = [(example_step(step_id=n), hidden_states(3, 4 + n)) for n in range(3)]
    (one, *one_hidden), (two, *two_hidden), (three, *three_hidden) = [
        messages_of(step, hidden) for step, hidden in sent
    ]
    order = [one, two, *one_hidden, three, *two_hidden, *three_hidden]
    assembler = FrameAssembler(max_payload_bytes=1 << 20)
    received = [add_message(assembler, message) for message in order]
    kinds = [type(item) for item in received]
    assert kinds == [StepFrame, StepFrame, Frame, StepFrame, Frame, Frame]
    assert [(item.step, item.hidden) for item in received if isinstance(item, Frame)] == sent


@pytest.mark.usefixtures("small_chunks")
def test_a_step_may_arrive_between_the_chunks_of_hidden_states() -> None:
    step, *chunks = messages_of(example_step(step_id=1), hidden_states(3, 9))
    later, *later_chunks = messages_of(example_step(step_id=2), hidden_states(3, 8))
    assert len(chunks) == 2
    frames = assemble([step, chunks[0], later, chunks[1], *later_chunks])
    assert [frame.step.step_id for frame in frames] == [1, 2]
    assert [frame.hidden for frame in frames] == [hidden_states(3, 9), hidden_states(3, 8)]


def test_too_many_steps_ahead_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_STEPS_AHEAD", 2)
    steps_ahead = [messages_of(example_step(step_id=n), ())[0] for n in range(3)]
    assert assemble(steps_ahead[:2]) == []
    fault = refusal(steps_ahead)
    assert fault.kind is StepFaultKind.UNDECODABLE
    assert "3 steps wait for their hidden states, the limit is 2" in fault.message


def test_first_takes_steps_alone() -> None:
    step, hidden = messages_of(example_step(), hidden_states(3, 4))
    assembler = FrameAssembler(max_payload_bytes=0, takes_hidden=False)
    for _ in range(3):
        received = add_message(assembler, step)
        assert isinstance(received, StepFrame)
        assert received.without_hidden == Frame(example_step(), (), step_checksum=step.steps[0].checksum)
    with pytest.raises(StepFault, match="the first stage takes tokens") as caught:
        add_message(assembler, hidden)
    assert caught.value.kind is StepFaultKind.HIDDEN_STATES_UNEXPECTED


def test_the_step_is_forwarded_byte_for_byte() -> None:
    """Includes fields unknown to this version."""
    step_bytes = encode_step(example_step()) + b"\x7a\x03new"
    (known,) = forward_pb2.ForwardRequest.FromString(encode_step_frame(step_bytes, ready_at_us=17)).steps
    frame = forward_pb2.StepFrame.FromString(known.SerializeToString() + b"\x7a\x03new")
    message = forward_pb2.ForwardRequest(steps=[frame]).SerializeToString()
    assert message.endswith(b"new")
    (received,) = FrameAssembler(max_payload_bytes=0).add(message)
    assert isinstance(received, StepFrame)
    assert (received.message, received.ready_at_us) == (message, 17)
    assert received.step == example_step()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_any_changed_byte_of_a_frame_is_detected(mask: int) -> None:
    original = messages_of(example_step(), hidden_states(3, 9))
    num_places = 0
    for index, message in enumerate(original):
        part = message.steps[0] if message.steps else message.hidden_states
        for field, data in part.ListFields():
            for place in range(len(data) if isinstance(data, bytes) else 0):
                damaged = bytearray(data)
                damaged[place] ^= mask
                assert _refusal_with(original, index, field.name, bytes(damaged)).kind in (
                    StepFaultKind.CHECKSUM,
                    StepFaultKind.UNDECODABLE,
                )
                num_places += 1
    assert num_places > 3 * 9 * 4 + 100
    for index, name in ((0, "checksum"), (0, "ready_at_us"), (1, "checksum"), (1, "step_checksum")):
        for place in range(8):
            part = original[index].steps[0] if index == 0 else original[index].hidden_states
            fault = _refusal_with(original, index, name, getattr(part, name) ^ mask << 8 * place)
            assert fault.kind is StepFaultKind.CHECKSUM


def _refusal_with(
    original: list[forward_pb2.ForwardRequest], index: int, name: str, value: object
) -> StepFault:
    messages = [forward_pb2.ForwardRequest.FromString(message.SerializeToString()) for message in original]
    setattr(messages[index].steps[0] if index == 0 else messages[index].hidden_states, name, value)
    return refusal(messages)


@pytest.mark.usefixtures("small_chunks")
def test_a_changed_byte_of_a_message_never_gives_another_frame() -> None:
    """Includes tags, lengths and `is_last`: the frame is lost, rejected or unchanged, never different."""
    messages = messages_of(example_step(), hidden_states(3, 9))
    (intact,) = assemble(messages)
    outcomes: set[type] = set()
    for index, message in enumerate(messages):
        data = message.SerializeToString()
        for place in range(len(data)):
            damaged = bytearray(data)
            damaged[place] ^= 0x02
            try:
                changed = forward_pb2.ForwardRequest.FromString(bytes(damaged))
                received = assemble([*messages[:index], changed, *messages[index + 1 :]])
            except (DecodeError, StepFault) as error:
                outcomes.add(type(error))
                continue
            assert received in ([], [intact])
            outcomes.add(list)
    assert outcomes == {DecodeError, StepFault, list}


@pytest.mark.usefixtures("small_chunks")
@given(data=st.data())
def test_lost_repeated_and_swapped_messages_never_give_a_wrong_frame(data: st.DataObject) -> None:
    sent = [(example_step(step_id=n), hidden_states(3, 6 + 5 * n)) for n in range(3)]
    messages = [message for step, hidden in sent for message in messages_of(step, hidden)]
    order = data.draw(st.lists(st.sampled_from(range(len(messages))), max_size=len(messages) + 2))
    assembler = FrameAssembler(max_payload_bytes=1 << 20)
    received = []
    refused_as: StepFaultKind | None = None
    for index in order:
        try:
            frame = add_message(assembler, messages[index])
        except StepFault as fault:
            refused_as = fault.kind
            break
        if isinstance(frame, Frame):
            received.append((frame.step, frame.hidden))
    assert all(frame in sent for frame in received)
    assert refused_as in (
        None,
        StepFaultKind.CHECKSUM,
        StepFaultKind.UNDECODABLE,
        StepFaultKind.SLICE_SET,
    )


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("hidden", [(), hidden_states(3, 9)], ids=["records only", "with hidden states"])
def test_hidden_states_that_start_inside_others_are_undecodable(hidden: HiddenStates) -> None:
    first = messages_of(example_step(step_id=1), hidden_states(3, 9))
    second = messages_of(example_step(step_id=2), hidden)
    fault = refusal([*first[:-1], *second])
    assert fault.kind is StepFaultKind.UNDECODABLE
    assert "inside an incomplete frame" in fault.message


@pytest.mark.usefixtures("small_chunks")
def test_hidden_states_without_their_first_chunk_are_rejected() -> None:
    step, *chunks = messages_of(example_step(), hidden_states(3, 9))
    assert len(chunks) == 2
    assert refusal([step, *chunks[1:]]).kind is StepFaultKind.CHECKSUM


@pytest.mark.usefixtures("small_chunks")
def test_an_oversized_frame_is_rejected_before_it_is_complete() -> None:
    hidden = hidden_states(10, SMALL_CHUNK)
    messages = messages_of(example_step(), hidden)
    fault = refusal(messages[:4], max_payload_bytes=2 * SMALL_CHUNK)
    assert fault.kind is StepFaultKind.SHAPE
    assert str(3 * SMALL_CHUNK) in fault.message
    assert str(2 * SMALL_CHUNK) in fault.message
    assert len(assemble(messages, max_payload_bytes=hidden[0].size_bytes)) == 1


def test_a_truncated_payload_is_rejected() -> None:
    step, hidden = messages_of(example_step(), hidden_states(3, 9))
    hidden.hidden_states.payload = hidden.hidden_states.payload[:-4]
    assert refusal([step, hidden]).kind is StepFaultKind.CHECKSUM
    fault = refusal([step, resealed(hidden)])
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
    ],
)
def test_an_inconsistent_header_is_rejected(
    change: Callable[[step_pb2.TensorHeader], object], kind: StepFaultKind, text: str
) -> None:
    fault = refusal(change_header(change))
    assert fault.kind is kind
    assert text in fault.message
    assert fault.step_id == 7
    assert fault.request_ids == example_step().request_ids


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("step_id", 6, "of step 6"), ("step_checksum", 1, "(0000000000000001), expected those of step 7")],
)
def test_hidden_states_of_another_step_are_rejected(name: str, value: int, text: str) -> None:
    """Same shape, another step, or other slices under the same id: a stale buffer."""
    step, hidden = messages_of(example_step(), hidden_states(3, 4))
    setattr(hidden.hidden_states, name, value)
    fault = refusal([step, resealed(hidden)])
    assert fault.kind is StepFaultKind.SLICE_SET
    assert text in fault.message
    assert fault.step_id == 7
    assert fault.request_ids == example_step().request_ids


def test_hidden_states_without_a_step_are_rejected() -> None:
    step, hidden = messages_of(example_step(), hidden_states(3, 4))
    for messages in ([hidden], [step, hidden, hidden]):
        fault = refusal(messages)
        assert fault.kind is StepFaultKind.SLICE_SET
        assert "hidden states of step 7" in fault.message
        assert "no step waits" in fault.message


def test_a_payload_without_a_header_is_rejected() -> None:
    step, hidden = messages_of(example_step(), ())
    hidden.hidden_states.payload = b"1234"
    fault = refusal([step, resealed(hidden)])
    assert fault.kind is StepFaultKind.HIDDEN_STATES_UNEXPECTED
    assert "4 bytes" in fault.message


def test_an_invalid_header_is_undecodable() -> None:
    step, hidden = messages_of(example_step(), hidden_states(3, 4))
    hidden.hidden_states.header = b"\xff\xff"
    fault = refusal([step, resealed(hidden)])
    assert fault.kind is StepFaultKind.UNDECODABLE
    assert fault.step_id == 7


def test_the_checksum_covers_part_boundaries() -> None:
    def checksum(header: bytes, stage_times: bytes, payload: bytes) -> int:
        chunk = forward_pb2.HiddenStatesChunk(header=header, stage_times=stage_times)
        return hidden_checksum(chunk, payload)

    parts = b"abcdef"
    checksums = [checksum(parts[:i], parts[i:j], parts[j:]) for i in range(7) for j in range(i, 7)]
    assert all(one != other for one, other in pairwise(sorted(checksums)))
    zero, eight = struct.pack("<Q", 0), struct.pack("<Q", 8)
    assert checksum(b"", zero, parts) != checksum(eight, b"", parts)


def test_a_tensor_counts_its_bytes() -> None:
    assert TensorView(DType.BF16, (2, 3), bytes(12)).size_bytes == 12
    with pytest.raises(ValueError, match=r"f32 tensor of shape \(2, 3\) has 24 bytes, got 12"):
        TensorView(DType.F32, (2, 3), bytes(12))


heads = st.builds(
    forward_pb2.HiddenStatesChunk,
    step_id=st.integers(0, 2**64 - 1),
    step_checksum=st.integers(0, 2**64 - 1),
    header=st.binary(max_size=200),
    checksum=st.integers(0, 2**64 - 1),
    is_last=st.booleans(),
    stage_times=st.binary(max_size=20),
)
payloads = st.sampled_from((0, 1, 2, 120, 121, 122, 126, 127, 128, 16_380, 16_384, 1 << 21)).map(bytes)


def by_protobuf(message: bytes) -> forward_pb2.ForwardRequest | None:
    """None if the bytes have neither steps nor hidden states, or a hello."""
    try:
        request = forward_pb2.ForwardRequest.FromString(message)
    except DecodeError:
        return None
    is_frame = request.steps or request.HasField("hidden_states")
    return request if is_frame and not request.HasField("hello") else None


def assert_read_as_by_protobuf(message: bytes) -> None:
    expected = by_protobuf(message)
    if expected is None:
        with pytest.raises(StepFault) as caught:
            read_message(message)
        assert caught.value.kind is StepFaultKind.UNDECODABLE
        return
    read = read_message(message)
    assert [step for step, _ in read.steps] == list(expected.steps)
    for step, passed_on in read.steps:
        assert list(forward_pb2.ForwardRequest.FromString(passed_on).steps) == [step]
    assert (read.chunk is not None) == expected.HasField("hidden_states")
    if read.chunk is not None:
        assert read.payload == expected.hidden_states.payload
        for field in read.chunk.DESCRIPTOR.fields:
            if field.name != "payload":
                assert getattr(read.chunk, field.name) == getattr(expected.hidden_states, field.name)


@given(heads, payloads)
def test_written_frames_are_valid_protobuf(head: forward_pb2.HiddenStatesChunk, payload: bytes) -> None:
    read = by_protobuf(write_chunk(head.SerializeToString(), memoryview(payload)))
    head.payload = payload
    assert read is not None
    assert read.hidden_states == head


@given(heads, payloads)
def test_a_payload_is_a_view_of_the_received_bytes(
    head: forward_pb2.HiddenStatesChunk, payload: bytes
) -> None:
    message = write_chunk(head.SerializeToString(), payload)
    assert_read_as_by_protobuf(message)
    read = read_message(message).payload
    if payload:
        assert isinstance(read, memoryview)
        assert read.readonly
        assert read.obj is message


@given(heads, st.binary(max_size=200))
def test_frames_of_another_implementation_are_read(
    head: forward_pb2.HiddenStatesChunk, payload: bytes
) -> None:
    """Fields in number order, in one piece."""
    head.payload = payload
    assert_read_as_by_protobuf(forward_pb2.ForwardRequest(hidden_states=head).SerializeToString())


step_frames = st.builds(
    forward_pb2.StepFrame,
    step=st.binary(max_size=40),
    ready_at_us=st.integers(0, 2**64 - 1),
    checksum=st.integers(0, 2**64 - 1),
)


@given(st.lists(step_frames, max_size=3), heads, payloads)
def test_steps_and_hidden_states_share_a_message(
    ahead: list[forward_pb2.StepFrame], head: forward_pb2.HiddenStatesChunk, payload: bytes
) -> None:
    steps = [forward_pb2.ForwardRequest(steps=[step]).SerializeToString() for step in ahead]
    message = b"".join((*steps, write_chunk(head.SerializeToString(), payload)))
    assert_read_as_by_protobuf(message)
    read = read_message(message)
    assert [passed_on for _, passed_on in read.steps] == steps
    assert not payload or isinstance(read.payload, memoryview)
    if steps:
        assert [passed_on for _, passed_on in read_message(b"".join(steps)).steps] == steps


@given(heads, st.binary(max_size=150), st.data())
def test_a_changed_cut_or_doubled_message_is_read_as_by_protobuf(
    head: forward_pb2.HiddenStatesChunk, payload: bytes, data: st.DataObject
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
@example(b"\x1a\x00\x1a\x02\x32\x00")
@example(b"\x1a\x80\x00")
@example(b"\x1a\x00\x1a\x03\x32\x05a")
@example(b"\x1a\x04\x32\x02ab\x1a\x03\x32\x01c")
@example(b"\x1a\x00\x1a\x05\x32\x01a\x38\x01")
@example(b"\x1a\x00\x1a\x02\x32\x01a")
@example(b"\x1a\x00\x1a\x03\x32\x01a\x1a\x00")
@example(b"\x1a\x05a")
@example(b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
@example(b"\x12\x00")
def test_any_bytes_are_read_as_by_protobuf(message: bytes) -> None:
    assert_read_as_by_protobuf(message)


def test_a_hello_in_place_of_a_frame_is_named() -> None:
    message = forward_pb2.ForwardRequest(hello=forward_pb2.HopHello(epoch=3)).SerializeToString()
    with pytest.raises(StepFault, match="message of kind 'hello', expected steps or hidden states"):
        read_message(message)


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


def test_the_size_of_steps_ahead_is_limited() -> None:
    """Steps whose hidden states arrived do not count."""
    pairs = [messages_of(example_step(step_id=n), hidden_states(3, 4)) for n in range(1, 5)]
    size_bytes = pairs[0][0].ByteSize()
    assembler = FrameAssembler(max_payload_bytes=1 << 20, max_ahead_bytes=3 * size_bytes)
    for step, hidden in pairs:
        assert isinstance(add_message(assembler, step), StepFrame)
        assert isinstance(add_message(assembler, hidden), Frame)
    for step, _ in pairs[:3]:
        add_message(assembler, step)
    with pytest.raises(StepFault) as raised:
        add_message(assembler, pairs[3][0])
    assert raised.value.kind is StepFaultKind.UNDECODABLE
    assert f"the limit is {3 * size_bytes} (max_ahead_bytes)" in raised.value.message
