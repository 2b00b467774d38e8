"""One chunk of a frame <-> the bytes of a `ForwardRequest`, without copies of the payload in between.

A message is written as its fields without the payload, and then once more with nothing but the payload:

    ForwardRequest { chunk { step, hidden, checksum, is_last, stage_times } }
    ForwardRequest { chunk { payload } }

Protobuf defines such a concatenation as one message with all of these fields, so any implementation reads it.
Here, the payload of a message of this form is a view of the received bytes; what has another form is read by
protobuf. Source: "Last One Wins" in https://protobuf.dev/programming-guides/encoding/.
"""

from google.protobuf.message import DecodeError

from stageline_rpc.v1 import stage_pb2
from wire.errors import StepFault, StepFaultKind

_CHUNK_TAG = stage_pb2.ForwardRequest.CHUNK_FIELD_NUMBER << 3 | 2
_PAYLOAD_TAG = stage_pb2.FrameChunk.PAYLOAD_FIELD_NUMBER << 3 | 2
_MOST_VARINT_BYTES = 4

Payload = bytes | memoryview


def write_chunk(head: bytes, payload: Payload) -> bytes:
    """The message with a serialised FrameChunk that has no payload, and the payload."""
    chunk = bytes((_CHUNK_TAG,)) + _varint(len(head)) + head
    if not payload:
        return chunk
    field = bytes((_PAYLOAD_TAG,)) + _varint(len(payload))
    rest = bytes((_CHUNK_TAG,)) + _varint(len(field) + len(payload))
    return b"".join((chunk, rest, field, payload))


def read_chunk(message: bytes) -> tuple[stage_pb2.FrameChunk, Payload]:
    """The chunk and its payload, which counts in place of the chunk's own.

    Raises StepFault UNDECODABLE for bytes that are no message, and for a message that is no chunk.
    """
    try:
        split = _split(message)
        if split is not None:
            return split
        request = stage_pb2.ForwardRequest.FromString(message)
    except DecodeError as error:
        raise StepFault(StepFaultKind.UNDECODABLE, f"message of the stream: {error}") from error
    if not request.HasField("chunk"):
        got = request.WhichOneof("message")
        raise StepFault(StepFaultKind.UNDECODABLE, f"message {got!r} where a chunk was due")
    return request.chunk, request.chunk.payload


def _split(message: bytes) -> tuple[stage_pb2.FrameChunk, Payload] | None:
    """None for a message that has another form than `write_chunk` gives it."""
    head = _field(message, 0, _CHUNK_TAG)
    if head is None:
        return None
    begin, end = head
    if end == len(message):
        chunk = stage_pb2.FrameChunk.FromString(message[begin:end])
        return chunk, chunk.payload
    rest = _field(message, end, _CHUNK_TAG)
    if rest is None or rest[1] != len(message):
        return None
    payload = _field(message, rest[0], _PAYLOAD_TAG)
    if payload is None or payload[1] != len(message):
        return None
    return stage_pb2.FrameChunk.FromString(message[begin:end]), memoryview(message)[payload[0] :]


def _field(message: bytes, at: int, tag: int) -> tuple[int, int] | None:
    """From where to where the content of the length-delimited field at `at` lies, if there is one with this
    tag. It may claim to end behind the message.
    """
    if at >= len(message) or message[at] != tag:
        return None
    size = shift = 0
    for begin in range(at + 1, min(at + 1 + _MOST_VARINT_BYTES, len(message))):
        byte = message[begin]
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            return begin + 1, begin + 1 + size
        shift += 7
    return None


def _varint(number: int) -> bytes:
    """Source: "Base 128 Varints" in the same guide."""
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
