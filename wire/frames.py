"""Frames <-> chunks on a stream, with one checksum over the whole frame.

A frame is a step on one hop: the serialised step, forwarded byte for byte, and the hidden states of this hop.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash
from google.protobuf.message import DecodeError

from stageline_rpc.v1 import stage_pb2
from wire.errors import StepFault, StepFaultKind
from wire.step_codec import decode_step
from wire.steps import Step
from wire.tensors import TensorView, decode_tensor, encode_header

CHUNK_BYTES = 1024 * 1024
"""Payload per message; gRPC moves 1 MiB messages 2-3 times faster than one large message."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A step with its serialised form and the hidden states that came with it."""

    step: Step
    step_bytes: bytes
    hidden: TensorView | None


def frame_checksum(step: bytes, hidden: bytes, payload: memoryview) -> int:
    """XXH3-64 over everything that the frame carries, lengths included."""
    digest = xxhash.xxh3_64()
    digest.update(struct.pack("<Q", len(step)))
    digest.update(step)
    digest.update(struct.pack("<Q", len(hidden)))
    digest.update(hidden)
    digest.update(payload)
    return digest.intdigest()


def encode_frame(
    step_bytes: bytes, step_id: int, hidden: TensorView | None
) -> Iterator[stage_pb2.ForwardRequest]:
    """The messages of one frame, in order. `hidden` is None into FIRST and for a step without slices."""
    header = b""
    payload = memoryview(b"")
    if hidden is not None:
        message = encode_header(hidden, step_id=step_id, step_checksum=xxhash.xxh3_64_intdigest(step_bytes))
        header = message.SerializeToString()
        payload = memoryview(hidden.data).cast("B")
    chunk = stage_pb2.FrameChunk(
        step=step_bytes, hidden=header, checksum=frame_checksum(step_bytes, header, payload)
    )
    position = 0
    while True:
        chunk.payload = bytes(payload[position : position + CHUNK_BYTES])
        position += CHUNK_BYTES
        chunk.is_last = position >= len(payload)
        yield stage_pb2.ForwardRequest(chunk=chunk)
        if chunk.is_last:
            return
        chunk = stage_pb2.FrameChunk()


class FrameAssembler:
    """Puts the chunks of one stream together again. Bounded by `max_payload_bytes` per frame."""

    def __init__(self, *, max_payload_bytes: int) -> None:
        self._max_payload_bytes = max_payload_bytes
        self._first: stage_pb2.FrameChunk | None = None
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, chunk: stage_pb2.FrameChunk) -> Frame | None:
        """The frame that `chunk` completes, or None. Raises StepFault when the frame is corrupt or out of
        bounds.
        """
        if self._first is None:
            self._first = chunk
        elif chunk.step or chunk.hidden:
            raise StepFault(StepFaultKind.UNDECODABLE, "a frame began before the one before it was complete")
        elif not chunk.payload:
            # Every further chunk brings payload, which bounds how many there can be.
            raise StepFault(StepFaultKind.UNDECODABLE, "a further chunk of a frame without payload")
        self._size += len(chunk.payload)
        if self._size > self._max_payload_bytes:
            raise StepFault(
                StepFaultKind.SHAPE,
                f"frame payload of {self._size} bytes or more, expected at most {self._max_payload_bytes}",
            )
        self._pieces.append(chunk.payload)
        if not chunk.is_last:
            return None
        first, payload = self._first, self._take_payload()
        return _decode_frame(first, payload)

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


def _decode_frame(first: stage_pb2.FrameChunk, payload: bytes) -> Frame:
    actual = frame_checksum(first.step, first.hidden, memoryview(payload))
    if actual != first.checksum:
        raise StepFault(
            StepFaultKind.CHECKSUM, f"frame checksum: expected {first.checksum:016x}, got {actual:016x}"
        )
    step = decode_step(first.step)
    try:
        hidden = _decode_hidden(first, payload, step)
    except StepFault as fault:
        fault.step_id = step.step_id
        fault.request_ids = step.request_ids
        raise
    return Frame(step, first.step, hidden)


def _decode_hidden(first: stage_pb2.FrameChunk, payload: bytes, step: Step) -> TensorView | None:
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
