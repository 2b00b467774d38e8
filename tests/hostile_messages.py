"""Messages that cost a careless server seconds: little to send, much to parse or to walk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from stageline_rpc.v1 import inference_pb2

GENERATE = "/stageline.v1.Inference/Generate"
ATTACH = "/stageline.v1.Inference/Attach"
SERVE = "/stageline.v1.Inference/Serve"
TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
METRICS = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
GENERATE_LIMIT = 1024 * 1024 + 16 * 4096
"""Of a model of 4,096 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """`reason` is the code that it must be refused with."""

    data: bytes
    reason: str = "MESSAGE_TOO_LARGE"
    method: str = GENERATE


def varint(value: int) -> bytes:
    """As protobuf encodes it."""
    encoded = b""
    while value > 0x7F:
        encoded += bytes([value & 0x7F | 0x80])
        value >>= 7
    return encoded + bytes([value])


def inside(number: int, content: bytes) -> bytes:
    """A field with a length: a message, bytes, text or packed numbers."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def filled(piece: bytes, *numbers: int, size: int = GENERATE_LIMIT) -> bytes:
    """As many pieces as fit into `size` bytes, inside the fields `numbers`, outermost first."""
    content = piece * ((size - 16) // len(piece))
    for number in reversed(numbers):
        content = inside(number, content)
    return content


def _biases(number: int) -> bytes:
    sampling = inference_pb2.SamplingParameters(logit_bias=dict.fromkeys(range(number), 1.0))
    return inside(6, sampling.SerializeToString())


GROUP = varint(99 << 3 | 3)
END_GROUP = varint(99 << 3 | 4)

HOSTILE: dict[str, Hostile] = {
    "7.5 million empty chat messages": Hostile(data=filled(inside(1, b""), 4, size=15_000_000)),
    "15 MB of prompt": Hostile(data=inside(2, b"a" * 15_000_000)),
    "empty chat messages": Hostile(data=filled(inside(1, b""), 4)),
    "empty bad words": Hostile(data=filled(inside(14, b""), 6)),
    "empty words": Hostile(data=filled(inside(13, b""), 6)),
    "empty stops": Hostile(data=filled(inside(16, b""), 6)),
    "empty choices": Hostile(data=filled(inside(1, b""), 6, 25)),
    "empty biases": Hostile(data=filled(inside(11, b""), 6)),
    "too many biases": Hostile(data=_biases(70_000)),
    "biases outside the vocabulary": Hostile(data=_biases(65_536), reason="INVALID_REQUEST"),
    "packed ids": Hostile(data=filled(b"\x01", 3, 1)),
    "single ids": Hostile(data=filled(b"\x08\x01", 3)),
    "allowed ids": Hostile(data=filled(b"\x01", 6, 12)),
    "sampling again and again": Hostile(data=filled(inside(6, b""))),
    "prompts in turn": Hostile(data=filled(inside(4, b"") + inside(3, b""))),
    "unknown numbers": Hostile(data=filled(varint(99 << 3) + b"\x01"), reason="INVALID_REQUEST"),
    "unknown groups": Hostile(data=filled(GROUP + END_GROUP, 6), reason="INVALID_REQUEST"),
    "nested groups": Hostile(data=filled(GROUP * 90 + END_GROUP * 90), reason="INVALID_REQUEST"),
    "many small fields in 8 kB": Hostile(data=filled(inside(1, b""), 4, size=8192), reason="INVALID_REQUEST"),
    "bad words in 8 kB": Hostile(data=filled(inside(14, b""), 6, size=8192), reason="INVALID_REQUEST"),
    "stops in 8 kB": Hostile(data=filled(inside(16, b""), 6, size=8192), reason="INVALID_REQUEST"),
    "biases in 8 kB": Hostile(data=filled(inside(11, b""), 6, size=8192), reason="INVALID_REQUEST"),
    "positions": Hostile(data=filled(inside(3, b""), size=65_000), method=ATTACH),
    "15 MB of positions": Hostile(data=filled(inside(3, b""), size=15_000_000), method=ATTACH),
    "credits": Hostile(data=filled(b"\x01", 5, 1), method=SERVE),
    "empty commands": Hostile(data=filled(inside(3, b"")), method=SERVE),
    "positions of a number": Hostile(data=filled(inside(3, b""), 2, 2), method=SERVE),
    "numbers of no command": Hostile(
        data=filled(varint(99 << 3) + b"\x01"), method=SERVE, reason="INVALID_REQUEST"
    ),
    "empty spans": Hostile(data=filled(inside(2, b""), 1, 2, size=4_000_000), method=TRACES),
    "15 MB of spans": Hostile(data=filled(inside(1, b""), size=15_000_000), method=TRACES),
    "empty metrics": Hostile(data=filled(inside(1, b""), size=4_000_000), method=METRICS),
}


def send(channel: grpc.Channel, hostile: Hostile, *, timeout_s: float = 30.0) -> tuple[str, str]:
    """Status and reason of the answer, which must be an error."""
    try:
        if hostile.method == SERVE:
            serve: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(hostile.method)
            answers = serve(iter([hostile.data]), timeout=timeout_s)
        else:
            call: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(hostile.method)
            answers = call(hostile.data, timeout=timeout_s)
        for _ in answers:
            pass
    except grpc.RpcError as error:
        return error.code().name, _reason(error)
    raise AssertionError("the message was accepted")


def _reason(error: Any) -> str:
    """Of the google.rpc.ErrorInfo in an error of the blocking client."""
    data = dict(error.trailing_metadata()).get("grpc-status-details-bin", b"")
    info = error_details_pb2.ErrorInfo()
    for detail in status_pb2.Status.FromString(data).details:
        detail.Unpack(info)
    return str(info.reason)


def open_channel(address: str) -> grpc.Channel:
    """A channel that sends messages of any size."""
    return grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])
