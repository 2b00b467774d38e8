"""Size limits of messages (bytes, fields, entries), checked before parsing."""

from __future__ import annotations  # grpc's handler types are generic in its stubs only

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from coordinator.api.request_parser import MAX_ENTRIES
from stageline_rpc.internal.v1 import deliver_pb2, join_pb2
from stageline_rpc.v1 import cluster_pb2, inference_pb2, telemetry_pb2
from wire.errors import MessageTooLarge
from wire.message_scan import MessageScan
from wire.sampling import MAX_CHOICES

MAX_GENERATE_BYTES = 2 * 1024 * 1024
PARAMETER_BYTES = 1024 * 1024
"""Limit for a request without its prompt: 65,536 biases take 0.7 MB."""
BYTES_PER_TOKEN = 16
"""Limit per prompt token: an id takes up to 5 bytes, text rarely more than 8."""
MAX_GENERATE_FIELDS = 131_072
MAX_CLIENT_STATE_BYTES = 256 * 1024
MAX_CONVERSATION_MESSAGES = 4096
MAX_CHOICE_TEXTS = 16_384
INLINE_BYTES = 8 * 1024
"""Messages up to this size are parsed and checked within a few milliseconds, regardless of content."""

MAX_UNARY_BYTES = 64 * 1024
MAX_UNARY_FIELDS = 1024
MAX_CONTROL_BYTES = 256 * 1024
MAX_CONTROL_FIELDS = 8192
MAX_RESULT_FIELDS = 64

_FILES: tuple[FileDescriptor, ...] = (
    inference_pb2.DESCRIPTOR,
    cluster_pb2.DESCRIPTOR,
    telemetry_pb2.DESCRIPTOR,
    health_pb2.DESCRIPTOR,
)
GENERATE = "/stageline.v1.Inference/Generate"
_RAW_METHODS = (
    GENERATE,
    "/stageline.v1.Inference/Serve",
    "/stageline.v1.Inference/Tokenize",
    "/stageline.v1.Inference/Detokenize",
    "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
)
"""Methods whose servicers receive bytes, and parse large messages on another thread."""


class GenerateDecoder:
    """Decodes a GenerateRequest within size limits."""

    def __init__(self, *, max_model_len: int, vocab_size: int) -> None:
        """`max_model_len` is the longest accepted sequence, in tokens."""
        self.max_bytes = min(MAX_GENERATE_BYTES, PARAMETER_BYTES + BYTES_PER_TOKEN * max_model_len)
        self._scan = MessageScan(
            inference_pb2.GenerateRequest.DESCRIPTOR,
            max_fields=MAX_GENERATE_FIELDS,
            max_counts={
                "stageline.v1.Conversation.messages": MAX_CONVERSATION_MESSAGES,
                "stageline.v1.Choices.texts": MAX_CHOICE_TEXTS,
                # Of the prompt and of bad_word_ids together.
                "stageline.v1.TokenIds.ids": max_model_len + MAX_ENTRIES,
                "stageline.v1.SamplingParameters.logit_bias": MAX_ENTRIES,
                "stageline.v1.SamplingParameters.allowed_token_ids": max(vocab_size, 1),
                "stageline.v1.SamplingParameters.stop_token_ids": max(vocab_size, 1),
            },
        )

    def check_size(self, data: bytes) -> None:
        if len(data) > self.max_bytes:
            raise MessageTooLarge(f"the request has {len(data)} bytes, the limit is {self.max_bytes}")

    def decode(self, data: bytes) -> inference_pb2.GenerateRequest:
        """Decode a message in at most 100 ms. Raises MessageTooLarge, InvalidRequest or DecodeError."""
        self.check_size(data)
        self._scan.check(data)
        message = inference_pb2.GenerateRequest.FromString(data)
        if (size_bytes := len(message.client_state)) > MAX_CLIENT_STATE_BYTES:
            raise MessageTooLarge(
                f"client_state has {size_bytes} bytes, the limit is {MAX_CLIENT_STATE_BYTES}"
            )
        return message


class MessageLimits(grpc.aio.ServerInterceptor):
    """Deserializers that reject a large message before it is parsed."""

    def __init__(self) -> None:
        self._deserializers: dict[str, Callable[[bytes], Any]] = dict.fromkeys(_RAW_METHODS, bytes)
        for file in _FILES:
            for service in file.services_by_name.values():
                for method in service.methods:
                    name = f"/{service.full_name}/{method.name}"
                    self._deserializers.setdefault(name, _small(GetMessageClass(method.input_type)))
        self._deserializers["/stageline.internal.v1.MembershipService/Join"] = _bounded(
            join_pb2.JoinRequest, MAX_CONTROL_BYTES, MAX_CONTROL_FIELDS
        )
        # Its content is bytes with a checksum.
        self._deserializers["/stageline.internal.v1.StepResultsService/Deliver"] = _bounded(
            deliver_pb2.DeliverRequest, None, MAX_RESULT_FIELDS
        )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        deserializer = self._deserializers.get(str(handler_call_details.method))
        if handler is None or deserializer is None:
            return handler
        return handler._replace(request_deserializer=deserializer)


def _small(message_type: Any) -> Callable[[bytes], Any]:
    """Deserializer for a method whose messages have few fields."""
    return _bounded(message_type, MAX_UNARY_BYTES, MAX_UNARY_FIELDS)


def _bounded(message_type: Any, max_bytes: int | None, max_fields: int) -> Callable[[bytes], Any]:
    descriptor: Descriptor = message_type.DESCRIPTOR
    positions = {"stageline.v1.AttachRequest.positions": MAX_CHOICES}
    is_attach = descriptor.full_name == "stageline.v1.AttachRequest"
    scan = MessageScan(descriptor, max_fields=max_fields, max_counts=positions if is_attach else None)

    def deserialize(data: bytes) -> Any:
        if max_bytes is not None and len(data) > max_bytes:
            raise MessageTooLarge(f"the message has {len(data)} bytes, the limit is {max_bytes}")
        scan.check(data)
        return message_type.FromString(data)

    return deserialize
