"""The Stage service: accepts the hop stream of the previous stage, and computes references."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from stage_worker.links import probe_handler
from stage_worker.policy import WORKER_POLICY
from stage_worker.stage_manager import StageManager
from stageline_rpc.internal.v1 import forward_pb2
from wire.addresses import peer_host
from wire.errors import HandshakeMismatch, InvalidRequest, MessageTooLarge, StaleStream
from wire.message_reads import receive_within
from wire.peer_identity import peer_identity
from wire.reference import encode_reference
from wire.stage_calls import Messages, forward_handler, reference_handler

MAX_UNTRUSTED_BYTES = 64 * 1024
"""Maximum message size before the secret is checked; hellos and reference requests have a few KiB."""


class StageService:
    """Passes the previous stage's stream to the stage."""

    def __init__(self, host: StageManager) -> None:
        self._host = host

    def add_to(self, server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers(
            (
                forward_handler(self.forward),
                reference_handler(self.compute_reference),
                probe_handler(),
            )
        )

    async def forward(
        self, messages: Messages, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[forward_pb2.ForwardResponse]:
        caller = peer_identity(context)
        session = await self._host.accept(
            await _hello(aiter(messages)), host=peer_host(context), caller=caller
        )
        yield forward_pb2.ForwardResponse(accepted=session.accepted())
        await session.receive(messages)

    async def compute_reference(
        self, message: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> forward_pb2.ComputeReferenceResponse:
        _check_size(message)
        try:
            request = forward_pb2.ComputeReferenceRequest.FromString(message)
        except DecodeError:
            raise InvalidRequest("the request cannot be decoded as the message of this method") from None
        return encode_reference(await self._host.reference(request, host=peer_host(context)))


async def _hello(messages: Messages) -> forward_pb2.HopHello:
    try:
        message = await receive_within(lambda: anext(messages, b""), WORKER_POLICY.hello_timeout_s)
        _check_size(message)
        first = forward_pb2.ForwardRequest.FromString(message)
    except TimeoutError:
        raise StaleStream(f"no hello within {WORKER_POLICY.hello_timeout_s:g} s") from None
    except DecodeError:
        raise HandshakeMismatch("first message", expected="hello", got="bytes that are no message") from None
    if not first.HasField("hello"):
        got = next((field.name for field, _ in first.ListFields()), None)
        raise HandshakeMismatch("first message", expected="hello", got=got)
    return first.hello


def _check_size(message: bytes) -> None:
    """Raises MessageTooLarge for a large message of a peer that is not authenticated yet."""
    if len(message) > MAX_UNTRUSTED_BYTES:
        raise MessageTooLarge(f"message has {len(message)} bytes, the limit is {MAX_UNTRUSTED_BYTES}")
