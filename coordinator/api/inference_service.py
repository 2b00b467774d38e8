"""`stageline.v1.Inference`: decodes, makes one domain call, encodes."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from coordinator.api.intake import refuse_unknown_fields
from coordinator.api.session import Output, Sessions
from coordinator.api.status import StatusReporter
from coordinator.requests.engine import Engine
from coordinator.scheduling.sequence import FinishReason, Sequence
from stageline_rpc.v1 import inference_pb2, inference_pb2_grpc
from wire.calls import when_call_ends
from wire.errors import InvalidRequest
from wire.ids import id_text, parse_request_id

FINISH_REASON_TO_MESSAGE: dict[FinishReason, inference_pb2.FinishReason.ValueType] = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """What clients call."""

    def __init__(self, sessions: Sessions, engine: Engine, status: StatusReporter) -> None:
        self._sessions = sessions
        self._engine = engine
        self._status = status

    async def Generate(  # noqa: N802
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        session = await self._sessions.accept(request)
        when_call_ends(context, session.close)
        async for output in session.outputs():
            yield encode_output(session.sequence, output)

    async def Cancel(  # noqa: N802
        self, request: inference_pb2.CancelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.CancelResponse:
        refuse_unknown_fields(request)
        try:
            request_id = parse_request_id(request.request_id)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        self._engine.cancel(request_id)
        return inference_pb2.CancelResponse()

    async def GetModel(  # noqa: N802
        self, request: inference_pb2.GetModelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> inference_pb2.GetModelResponse:
        return self._status.model()


def encode_output(sequence: Sequence, output: Output) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse(
        request_id=id_text(sequence.key.request_id),
        first_token_index=output.first_token_index,
        token_ids=output.tokens,
        text=output.text,
        text_offset=output.text_offset,
    )
    if output.finish_reason is not None:
        response.finish_reason = FINISH_REASON_TO_MESSAGE[output.finish_reason]
        response.usage.prompt_tokens = sequence.num_prompt_tokens
        response.usage.completion_tokens = sequence.num_generated_tokens
        response.usage.cached_tokens = sequence.num_cached_tokens
        response.usage.seed = sequence.sampling.seed
        response.usage.restarts = sequence.num_restarts
    return response
