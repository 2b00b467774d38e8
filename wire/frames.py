"""Frames <-> chunks on a stream, with one checksum over the whole frame.

A frame is a step on one hop: the serialised step, forwarded byte for byte, and the hidden states of this hop.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash
from google.protobuf.message import DecodeError

from stageline_rpc.v1 import stage_pb2
from wire.errors import StepFault, StepFaultKind
from wire.stage_times import decode_stage_times, encode_stage_times
from wire.step_codec import decode_step
from wire.steps import StageTime, Step
from wire.tensors import TensorView, decode_tensor, encode_header

CHUNK_BYTES = 1024 * 1024
"""Payload per message; gRPC moves 1 MiB messages 2-3 times faster than one large message."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A step with its serialised form, the hidden states that came with it, and what the stages before have
    spent on it.
    """

    step: Step
    step_bytes: bytes
    hidden: TensorView | None
    stage_times: tuple[StageTime, ...] = ()


def frame_checksum(step: bytes, hidden: bytes, stage_times: bytes, payload: bytes | memoryview) -> int:
    """XXH3-64 over everything that the frame carries, lengths included."""
    digest = xxhash.xxh3_64()
    digest.update(struct.pack("<Q", len(step)))
    digest.update(step)
    digest.update(struct.pack("<Q", len(hidden)))
    digest.update(hidden)
    digest.update(struct.pack("<Q", len(stage_times)))
    digest.update(stage_times)
    digest.update(payload)
    return digest.intdigest()


def encode_frame(
    step_bytes: bytes, step_id: int, hidden: TensorView | None, stage_times: Sequence[StageTime] = ()
) -> Iterator[stage_pb2.ForwardRequest]:
    """The messages of one frame, in order. `hidden` is None into FIRST and for a step without slices;
    `stage_times` are those of the stages up to the sending one.
    """
    header = b""
    payload: bytes | memoryview = b""
    if hidden is not None:
        message = encode_header(hidden, step_id=step_id, step_checksum=xxhash.xxh3_64_intdigest(step_bytes))
        header = message.SerializeToString()
        payload = hidden.data if isinstance(hidden.data, bytes) else memoryview(hidden.data).cast("B")
    times = encode_stage_times(stage_times)
    chunk = stage_pb2.FrameChunk(
        step=step_bytes,
        hidden=header,
        stage_times=times,
        checksum=frame_checksum(step_bytes, header, times, payload),
    )
    position = 0
    while True:
        piece = payload[position : position + CHUNK_BYTES]
        chunk.payload = piece if isinstance(piece, bytes) else bytes(piece)
        position += CHUNK_BYTES
        chunk.is_last = position >= len(payload)
        yield stage_pb2.ForwardRequest(chunk=chunk)
        if chunk.is_last:
            return
        chunk = stage_pb2.FrameChunk()


@dataclass(slots=True)
class _Beginning:
    """The fields of a frame's first chunk; reading one from a message copies it."""

    step: bytes
    hidden: bytes
    stage_times: bytes
    checksum: int


class FrameAssembler:
    """Puts the chunks of one stream together again. Bounded by `max_payload_bytes` per frame."""

    def __init__(self, *, max_payload_bytes: int, num_stages_before: int | None = None) -> None:
        """`num_stages_before` stages have computed the frames of this stream already; None for any number."""
        self._max_payload_bytes = max_payload_bytes
        self._num_stages_before = num_stages_before
        self._first: _Beginning | None = None
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, chunk: stage_pb2.FrameChunk) -> Frame | None:
        """The frame that `chunk` completes, or None. Raises StepFault when the frame is corrupt or out of
        bounds.
        """
        payload = chunk.payload
        if self._first is None:
            self._first = _Beginning(chunk.step, chunk.hidden, chunk.stage_times, chunk.checksum)
        elif chunk.step or chunk.hidden or chunk.stage_times:
            raise StepFault(StepFaultKind.UNDECODABLE, "a frame began before the one before it was complete")
        elif not payload:
            # Every further chunk brings payload, which bounds how many there can be.
            raise StepFault(StepFaultKind.UNDECODABLE, "a further chunk of a frame without payload")
        self._size += len(payload)
        if self._size > self._max_payload_bytes:
            raise StepFault(
                StepFaultKind.SHAPE,
                f"frame payload of {self._size} bytes or more, expected at most {self._max_payload_bytes}",
            )
        self._pieces.append(payload)
        if not chunk.is_last:
            return None
        first = self._first
        return self._decode(first, self._take_payload())

    def finish(self) -> None:
        """The stream has ended. Raises StepFault UNDECODABLE when it ended inside a frame."""
        if self._first is not None:
            raise StepFault(
                StepFaultKind.UNDECODABLE,
                f"the stream ended inside a frame, after {self._size} bytes of payload",
            )

    def _take_payload(self) -> bytes:
        pieces, self._pieces, self._first, self._size = self._pieces, [], None, 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _decode(self, first: _Beginning, payload: bytes) -> Frame:
        actual = frame_checksum(first.step, first.hidden, first.stage_times, payload)
        if actual != first.checksum:
            raise StepFault(
                StepFaultKind.CHECKSUM, f"frame checksum: expected {first.checksum:016x}, got {actual:016x}"
            )
        step = decode_step(first.step)
        try:
            hidden = _decode_hidden(first, payload, step)
            stage_times = decode_stage_times(first.stage_times, num_stages=self._num_stages_before)
        except StepFault as fault:
            fault.step_id = step.step_id
            fault.request_ids = step.request_ids
            raise
        return Frame(step, first.step, hidden, stage_times)


def _decode_hidden(first: _Beginning, payload: bytes, step: Step) -> TensorView | None:
    if not first.hidden:
        if payload:
            raise StepFault(
                StepFaultKind.HIDDEN_STATES_UNEXPECTED, f"{len(payload)} bytes of payload without a header"
            )
        return None
    try:
        header = stage_pb2.TensorHeader.FromString(first.hidden)
    except DecodeError as error:
        raise StepFault(StepFaultKind.UNDECODABLE, f"tensor header: {error}") from error
    step_checksum = xxhash.xxh3_64_intdigest(first.step)
    if (header.step_id, header.step_checksum) != (step.step_id, step_checksum):
        raise StepFault(
            StepFaultKind.SLICE_SET,
            f"hidden states of step {header.step_id} ({header.step_checksum:016x}) came with "
            f"step {step.step_id} ({step_checksum:016x})",
        )
    return decode_tensor(header, payload)
