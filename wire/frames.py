"""Frames and step results on a stream, each part with a checksum.

A frame is one step on one hop, in two parts: the step, whose bytes every stage passes on when they arrive,
and later the hidden states of this hop. Steps and a chunk of hidden states may share a message: serialised
messages are concatenated, steps first. Each chunk is two of them, one without the payload, one with nothing
else:

    ForwardRequest { hidden_states { step_id, step_checksum, header, stage_times, checksum, is_last } }
    ForwardRequest { hidden_states { payload } }

Protobuf merges a concatenation into one message, so any implementation can read it. This module reads the
payload of such a message as a view of the received bytes; protobuf parses messages of any other form.
Source: "Last One Wins" in https://protobuf.dev/programming-guides/encoding/.

Protobuf itself copies the payload on both sides. Measured on one core of a 2-core host, writing with reading
costs 1.0 ms instead of 16 us for 384 KiB of payload and 4.4 ms instead of 40 us for 1 MiB: per hop more than
3 % of a step of 20 ms. Without payload both take 5 to 9 us.
"""

import struct
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import xxhash
from google.protobuf.message import DecodeError

from stageline_rpc.internal.v1 import deliver_pb2, forward_pb2, step_pb2
from wire.errors import StepFault, StepFaultKind
from wire.payloads import PayloadNotice
from wire.step_codec import decode_result, decode_stage_times, decode_step, encode_result, encode_stage_times
from wire.steps import StageTime, Step, StepResult
from wire.tensors import HiddenStates, WireDType, decode_tensors, encode_headers, payload_of

_STEP_TAG = forward_pb2.ForwardRequest.STEPS_FIELD_NUMBER << 3 | 2
_HIDDEN_TAG = forward_pb2.ForwardRequest.HIDDEN_STATES_FIELD_NUMBER << 3 | 2
_PAYLOAD_TAG = forward_pb2.HiddenStatesChunk.PAYLOAD_FIELD_NUMBER << 3 | 2
_MAX_VARINT_BYTES = 4

Payload = bytes | memoryview


def write_chunk(head: bytes, payload: Payload) -> bytes:
    """Return the message for a serialised HiddenStatesChunk without payload, followed by its payload."""
    chunk = bytes((_HIDDEN_TAG,)) + _varint(len(head)) + head
    if not payload:
        return chunk
    field = bytes((_PAYLOAD_TAG,)) + _varint(len(payload))
    rest = bytes((_HIDDEN_TAG,)) + _varint(len(field) + len(payload))
    return b"".join((chunk, rest, field, payload))


@dataclass(slots=True)
class ForwardMessage:
    """Steps, each with the bytes that pass it on, and after them a chunk of hidden states with its payload.

    The chunk's own payload field may be empty.
    """

    steps: list[tuple[forward_pb2.StepFrame, bytes]]
    chunk: forward_pb2.HiddenStatesChunk | None = None
    payload: Payload = b""


def read_message(message: bytes) -> ForwardMessage:
    """Raises StepFault UNDECODABLE."""
    try:
        split = _split(message)
        if split is not None:
            return split
        request = forward_pb2.ForwardRequest.FromString(message)
    except DecodeError as error:
        raise StepFault(StepFaultKind.UNDECODABLE, f"message of the stream: {error}") from error
    if request.HasField("hello") or not (request.steps or request.HasField("hidden_states")):
        kind = "hello" if request.HasField("hello") else None
        raise StepFault(
            StepFaultKind.UNDECODABLE, f"message of kind {kind!r}, expected steps or hidden states"
        )
    steps = [(step, _step_message(step)) for step in request.steps]
    if not request.HasField("hidden_states"):
        return ForwardMessage(steps)
    return ForwardMessage(steps, request.hidden_states, request.hidden_states.payload)


def _split(message: bytes) -> ForwardMessage | None:
    """Split a message of steps and a chunk of `write_chunk`; None for any other form."""
    position, steps = 0, []
    while (field := _field(message, position, _STEP_TAG)) is not None:
        begin, end = field
        if end > len(message):
            return None
        steps.append((forward_pb2.StepFrame.FromString(message[begin:end]), message[position:end]))
        position = end
    if steps and position == len(message):
        return ForwardMessage(steps)
    head = _field(message, position, _HIDDEN_TAG)
    if head is None:
        return None
    begin, end = head
    if end == len(message):
        chunk = forward_pb2.HiddenStatesChunk.FromString(message[begin:end])
        return ForwardMessage(steps, chunk, chunk.payload)
    rest = _field(message, end, _HIDDEN_TAG)
    if rest is None or rest[1] != len(message):
        return None
    payload = _field(message, rest[0], _PAYLOAD_TAG)
    if payload is None or payload[1] != len(message):
        return None
    chunk = forward_pb2.HiddenStatesChunk.FromString(message[begin:end])
    return ForwardMessage(steps, chunk, memoryview(message)[payload[0] :])


def _step_message(frame: forward_pb2.StepFrame) -> bytes:
    return forward_pb2.ForwardRequest(steps=[frame]).SerializeToString()


def _field(message: bytes, at: int, tag: int) -> tuple[int, int] | None:
    """Return start and end of the length-delimited field at `at`, or None if another tag is there.

    The end is not checked against the length of the message.
    """
    if at >= len(message) or message[at] != tag:
        return None
    size = shift = 0
    for begin in range(at + 1, min(at + 1 + _MAX_VARINT_BYTES, len(message))):
        byte = message[begin]
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            return begin + 1, begin + 1 + size
        shift += 7
    return None


def _varint(number: int) -> bytes:
    """Encode a varint. Source: "Base 128 Varints" in the encoding guide."""
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


CHUNK_BYTES = 1024 * 1024
"""Payload per message; gRPC moves 1 MiB messages 2-3 times faster than one large message."""
MAX_STEPS_AHEAD = 4096
"""Steps that may wait for their hidden states: as many as a coordinator can be told to have in flight."""

_U64 = struct.Struct("<Q")
_HIDDEN_HEAD = struct.Struct("<QQQQQ")


@dataclass(slots=True)
class StepFrame:
    """A received step, ahead of its hidden states. `message` are the bytes that pass it on.

    `ready_at_us` is when the coordinator had the step ready, in microseconds of its clock since 1970, or 0.
    """

    step: Step
    checksum: int
    ready_at_us: int
    message: bytes

    @property
    def without_hidden(self) -> "Frame":
        return Frame(self.step, (), (), self.ready_at_us, self.checksum)


@dataclass(slots=True, unsafe_hash=True)
class Frame:
    """A step with its hidden states and the times of earlier stages.

    `ready_at_us` is when the sender had the frame ready, in microseconds of the coordinator's clock since
    1970, or 0 if unknown. Never modified, like everything in `wire.steps`.
    """

    step: Step
    hidden: HiddenStates
    stage_times: tuple[StageTime, ...] = ()
    ready_at_us: int = 0
    step_checksum: int = 0


def step_frame_checksum(step: bytes, ready_at_us: int) -> int:
    return xxhash.xxh3_64_intdigest(_U64.pack(ready_at_us) + step)


def encode_step_frame(step: bytes, *, ready_at_us: int = 0) -> bytes:
    frame = forward_pb2.StepFrame(
        step=step, ready_at_us=ready_at_us, checksum=step_frame_checksum(step, ready_at_us)
    )
    return _step_message(frame)


def _decode_step_frame(frame: forward_pb2.StepFrame, message: bytes) -> StepFrame:
    step_bytes, ready_at_us, expected = frame.step, frame.ready_at_us, frame.checksum
    actual = step_frame_checksum(step_bytes, ready_at_us)
    if actual != expected:
        raise StepFault(
            StepFaultKind.CHECKSUM, f"checksum of a step: expected {expected:016x}, got {actual:016x}"
        )
    return StepFrame(decode_step(step_bytes), expected, ready_at_us, message)


def hidden_checksum(chunk: forward_pb2.HiddenStatesChunk, payload: Payload) -> int:
    """Checksum of the hidden states whose first chunk is `chunk`, and whose whole payload is given."""
    digest = _begin_checksum(
        chunk.step_id, chunk.step_checksum, chunk.header, chunk.stage_times, chunk.remote_payload
    )
    digest.update(payload)
    return digest.intdigest()


def _begin_checksum(
    step_id: int, step_checksum: int, header: bytes, stage_times: bytes, remote: bytes
) -> xxhash.xxh3_64:
    head = _HIDDEN_HEAD.pack(step_id, step_checksum, len(header), len(stage_times), len(remote))
    return xxhash.xxh3_64(head + header + stage_times + remote)


def encode_hidden_states(
    step_id: int,
    step_checksum: int,
    hidden: HiddenStates,
    stage_times: Sequence[StageTime] = (),
    *,
    ready_at_us: int = 0,
    notice: PayloadNotice | None = None,
) -> Iterator[bytes]:
    """Yield the serialised chunks, in order.

    `hidden` is empty for a step without slices; `stage_times` include the sender's. With a `notice` the
    payload is on the payload connection.
    """
    header, payload = b"", memoryview(b"")
    if hidden:
        header = encode_headers(hidden).SerializeToString()
    if hidden and notice is None:
        payload = payload_of(hidden)
    first = forward_pb2.HiddenStatesChunk(
        step_id=step_id,
        step_checksum=step_checksum,
        header=header,
        stage_times=encode_stage_times(stage_times, ready_at_us=ready_at_us),
        is_last=len(payload) <= CHUNK_BYTES,
        remote_payload=b"" if notice is None else _encode_notice(notice),
    )
    first.checksum = hidden_checksum(first, payload)
    yield write_chunk(first.SerializeToString(), payload[:CHUNK_BYTES])
    for position in range(CHUNK_BYTES, len(payload), CHUNK_BYTES):
        later = forward_pb2.HiddenStatesChunk(is_last=position + CHUNK_BYTES >= len(payload))
        yield write_chunk(later.SerializeToString(), payload[position : position + CHUNK_BYTES])


class _Parts:
    """Fields of the first chunk, and the payload received so far with its checksum."""

    __slots__ = (
        "_digest",
        "checksum",
        "header",
        "pieces",
        "remote",
        "size_bytes",
        "stage_times",
        "step_checksum",
        "step_id",
    )

    def __init__(self, chunk: forward_pb2.HiddenStatesChunk) -> None:
        """Read each field once: every read copies it out of the message."""
        self.step_id = chunk.step_id
        self.step_checksum = chunk.step_checksum
        self.header = chunk.header
        self.stage_times = chunk.stage_times
        self.checksum = chunk.checksum
        self.pieces: list[Payload] = []
        self.size_bytes = 0
        self.remote = chunk.remote_payload
        self._digest = _begin_checksum(
            self.step_id, self.step_checksum, self.header, self.stage_times, self.remote
        )

    def add(self, payload: Payload) -> None:
        self.pieces.append(payload)
        self.size_bytes += len(payload)
        self._digest.update(payload)

    def set_remote(self, payload: Payload) -> None:
        """The payload that `remote` names, whose checksum was compared."""
        self.pieces = [payload]
        self.size_bytes = len(payload)

    @property
    def actual_checksum(self) -> int:
        return self._digest.intdigest()

    @property
    def payload(self) -> Payload:
        return self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)


class FrameAssembler:
    """Reassembles the frames of one stream from steps and chunks; at most `max_payload_bytes` per frame.

    The payload of hidden states that arrived in one message is a view of that message.
    """

    def __init__(
        self,
        *,
        max_payload_bytes: int,
        takes_hidden: bool = True,
        num_stages_before: int | None = None,
        wire_dtype: WireDType | None = None,
        exact_tensors: Collection[str] = (),
        max_ahead_bytes: int | None = None,
    ) -> None:
        """`takes_hidden` is False on FIRST, where a step is a complete frame.

        `num_stages_before` and `wire_dtype` are checked against each frame; None accepts any. The tensors
        `exact_tensors` have other dtypes than `wire_dtype`.
        `max_ahead_bytes` bounds the steps that wait for their hidden states.
        """
        self._max_payload_bytes = max_payload_bytes
        self._max_ahead_bytes = max_ahead_bytes
        self._ahead_bytes = 0
        self._takes_hidden = takes_hidden
        self._wire_dtype = wire_dtype
        self._exact_tensors = exact_tensors
        self._num_stages_before = num_stages_before
        self._ahead: deque[StepFrame] = deque()
        self._parts: _Parts | None = None

    def add(self, message: bytes) -> list[StepFrame | Frame | PayloadNotice]:
        """Return the steps in this ForwardRequest, then the frame that it completes, if any.

        A notice in its place names the payload that `add_payload` is to add next; its checksum is the
        caller's to compare.
        Raises StepFault for a message of another kind, and for a corrupt, unmatched or too large part.
        """
        read = read_message(message)
        received: list[StepFrame | Frame | PayloadNotice] = [self._add_step(*step) for step in read.steps]
        if read.chunk is not None and (frame := self._add_chunk(read.chunk, read.payload)) is not None:
            received.append(frame)
        return received

    @property
    def is_inside_frame(self) -> bool:
        """Some of the chunks of a frame have arrived."""
        return self._parts is not None

    def add_payload(self, payload: Payload) -> Frame:
        """Return the frame that the payload completes, after `add` returned its notice. Raises StepFault."""
        parts, self._parts = self._parts, None
        assert parts is not None and parts.remote, "no frame waits for a payload"
        parts.set_remote(payload)
        return self._complete(parts)

    def finish(self) -> None:
        """Check that the stream did not end inside hidden states. Raises StepFault UNDECODABLE."""
        if self._parts is not None:
            raise StepFault(
                StepFaultKind.UNDECODABLE,
                f"the stream ended inside a frame, after {self._parts.size_bytes} bytes of payload",
            )

    def _add_step(self, frame: forward_pb2.StepFrame, message: bytes) -> StepFrame:
        step = _decode_step_frame(frame, message)
        if self._takes_hidden:
            self._ahead.append(step)
            self._ahead_bytes += len(message)
            self._check_ahead()
        return step

    def _check_ahead(self) -> None:
        if len(self._ahead) > MAX_STEPS_AHEAD:
            raise StepFault(
                StepFaultKind.UNDECODABLE,
                f"{len(self._ahead)} steps wait for their hidden states, the limit is {MAX_STEPS_AHEAD}",
            )
        if self._max_ahead_bytes is not None and self._ahead_bytes > self._max_ahead_bytes:
            raise StepFault(
                StepFaultKind.UNDECODABLE,
                f"steps of {self._ahead_bytes} bytes wait for their hidden states, "
                f"the limit is {self._max_ahead_bytes} (max_ahead_bytes)",
            )

    def _take_due(self) -> StepFrame | None:
        if not self._ahead:
            return None
        due = self._ahead.popleft()
        self._ahead_bytes -= len(due.message)
        return due

    def _add_chunk(
        self, chunk: forward_pb2.HiddenStatesChunk, payload: Payload
    ) -> Frame | PayloadNotice | None:
        if not self._takes_hidden:
            raise StepFault(
                StepFaultKind.HIDDEN_STATES_UNEXPECTED,
                "unexpected hidden states: the first stage takes tokens",
            )
        parts = self._parts
        if parts is None:
            parts = self._parts = _Parts(chunk)
        else:
            _check_later_chunk(chunk, payload)
        self._check_size(parts.size_bytes + len(payload))
        parts.add(payload)
        if not chunk.is_last:
            return None
        if parts.remote:
            return self._notice(parts)
        self._parts = None
        return self._complete(parts)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._max_payload_bytes:
            raise StepFault(
                StepFaultKind.SHAPE,
                f"frame payload has {size_bytes} bytes or more, the limit is {self._max_payload_bytes}",
            )

    def _check_declared(self, hidden: HiddenStates) -> None:
        declared = self._wire_dtype
        for tensor in hidden:
            if declared not in (None, tensor.dtype) and tensor.name not in self._exact_tensors:
                raise StepFault(
                    StepFaultKind.DTYPE,
                    f"{tensor.label} in {tensor.dtype.value}, expected {declared.value} as in the hello",
                )

    def _notice(self, parts: _Parts) -> PayloadNotice:
        _check_checksum(parts)
        if parts.size_bytes:
            raise StepFault(
                StepFaultKind.UNDECODABLE, f"{parts.size_bytes} bytes of payload beside a remote payload"
            )
        notice = _decode_notice(parts.remote)
        self._check_size(notice.size_bytes)
        return notice

    def _complete(self, parts: _Parts) -> Frame:
        _check_checksum(parts)
        due = self._take_due()
        try:
            _check_match(parts, due)
            assert due is not None
            hidden = _decode_hidden(parts)
            self._check_declared(hidden)
            times, ready_at_us = decode_stage_times(parts.stage_times, num_stages=self._num_stages_before)
        except StepFault as fault:
            if due is not None:
                fault.step_id = due.step.step_id
                fault.request_ids = due.step.request_ids
            raise
        return Frame(due.step, hidden, times, ready_at_us, due.checksum)


def _check_checksum(parts: _Parts) -> None:
    actual = parts.actual_checksum
    if actual != parts.checksum:
        raise StepFault(
            StepFaultKind.CHECKSUM,
            f"checksum of hidden states: expected {parts.checksum:016x}, got {actual:016x}",
        )


def _encode_notice(notice: PayloadNotice) -> bytes:
    return forward_pb2.RemotePayload(
        number=notice.number, size_bytes=notice.size_bytes, checksum=notice.checksum
    ).SerializeToString()


def _decode_notice(data: bytes) -> PayloadNotice:
    try:
        remote = forward_pb2.RemotePayload.FromString(data)
    except DecodeError as error:
        raise StepFault(StepFaultKind.UNDECODABLE, f"remote payload: {error}") from error
    return PayloadNotice(remote.number, remote.size_bytes, remote.checksum)


def _check_later_chunk(chunk: forward_pb2.HiddenStatesChunk, payload: Payload) -> None:
    if chunk.step_checksum or chunk.header or chunk.stage_times or chunk.remote_payload:
        raise StepFault(StepFaultKind.UNDECODABLE, "a new frame began inside an incomplete frame")
    if not payload:
        # Requiring payload in every chunk bounds the number of chunks.
        raise StepFault(StepFaultKind.UNDECODABLE, "a later chunk of a frame has no payload")


def _check_match(parts: _Parts, due: StepFrame | None) -> None:
    came = f"hidden states of step {parts.step_id} ({parts.step_checksum:016x})"
    if due is None:
        raise StepFault(StepFaultKind.SLICE_SET, f"{came}, no step waits for any")
    if (parts.step_id, parts.step_checksum) != (due.step.step_id, due.checksum):
        raise StepFault(
            StepFaultKind.SLICE_SET,
            f"{came}, expected those of step {due.step.step_id} ({due.checksum:016x})",
        )


def _decode_hidden(parts: _Parts) -> HiddenStates:
    if not parts.header:
        if parts.size_bytes:
            raise StepFault(
                StepFaultKind.HIDDEN_STATES_UNEXPECTED,
                f"{parts.size_bytes} bytes of payload without a header",
            )
        return ()
    try:
        headers = step_pb2.TensorHeaders.FromString(parts.header)
    except DecodeError as error:
        raise StepFault(StepFaultKind.UNDECODABLE, f"tensor headers: {error}") from error
    return decode_tensors(headers, parts.payload)


def encode_result_frame(result: StepResult) -> deliver_pb2.DeliverRequest:
    data = encode_result(result).SerializeToString()
    frame = deliver_pb2.ResultFrame(result=data, checksum=xxhash.xxh3_64_intdigest(data))
    return deliver_pb2.DeliverRequest(frame=frame)


def decode_result_frame(message: deliver_pb2.DeliverRequest) -> StepResult:
    """Decode the result in `message`. Raises StepFault CHECKSUM or UNDECODABLE."""
    if message.WhichOneof("message") != "frame":
        raise StepFault(
            StepFaultKind.UNDECODABLE, f"message of kind {message.WhichOneof('message')!r}, expected a result"
        )
    data, expected = message.frame.result, message.frame.checksum
    actual = xxhash.xxh3_64_intdigest(data)
    if actual != expected:
        raise StepFault(
            StepFaultKind.CHECKSUM, f"result checksum: expected {expected:016x}, got {actual:016x}"
        )
    try:
        return decode_result(step_pb2.StepResult.FromString(data))
    except DecodeError as error:
        raise StepFault(StepFaultKind.UNDECODABLE, f"result: {error}") from error
