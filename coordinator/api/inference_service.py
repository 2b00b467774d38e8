"""`stageline.v1.Inference`: decodes, makes one domain call, encodes."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from coordinator.api.callers import Callers, metadata_value
from coordinator.api.operators import Operators
from coordinator.api.output_messages import encode_output
from coordinator.api.session import Sessions
from coordinator.api.status import StatusReporter
from coordinator.requests.attach_secret import digest_of, new_attach_secret
from coordinator.requests.attachment import Attachment, Positions
from coordinator.requests.engine import Engine
from stageline_rpc.v1 import inference_pb2, inference_pb2_grpc
from wire.calls import ATTACH_SECRET_KEY, AUTHORIZATION_KEY, JOURNALLED_KEY, when_call_ends
from wire.errors import InvalidRequest
from wire.ids import RequestId, parse_request_id

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """What clients call."""

    def __init__(
        self,
        sessions: Sessions,
        engine: Engine,
        status: StatusReporter,
        callers: Callers,
        operators: Operators,
    ) -> None:
        self._sessions = sessions
        self._engine = engine
        self._status = status
        self._callers = callers
        self._operators = operators

    async def Generate(  # type: ignore[override]  # noqa: N802  # see MessageLimits
        self, request: bytes, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        secret = metadata_value(context, ATTACH_SECRET_KEY) or new_attach_secret()
        attachment = await self._sessions.accept(request, self._callers.of(context), digest_of(secret))
        async for response in self._read(attachment, context, ((ATTACH_SECRET_KEY, secret),)):
            yield response

    async def Attach(  # noqa: N802
        self, request: inference_pb2.AttachRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        request_id = _request_id(request.request_id)
        self._engine.check_secret(request_id, metadata_value(context, ATTACH_SECRET_KEY))
        attachment = self._engine.attach(
            request_id,
            _positions(request),
            deadline_s=self._callers.of(context).deadline_s,
        )
        async for response in self._read(attachment, context):
            yield response

    async def Cancel(  # noqa: N802
        self, request: inference_pb2.CancelRequest, context: Context
    ) -> inference_pb2.CancelResponse:
        request_id = _request_id(request.request_id)
        if metadata_value(context, AUTHORIZATION_KEY):
            self._operators.check(context)
        else:
            self._engine.check_secret(request_id, metadata_value(context, ATTACH_SECRET_KEY))
        self._engine.cancel(request_id)
        return inference_pb2.CancelResponse()

    async def GetModel(  # noqa: N802
        self, request: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        return self._status.model()

    async def _read(
        self, attachment: Attachment, context: Context, metadata: tuple[tuple[str, str], ...] = ()
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        when_call_ends(context, lambda: self._engine.leave(attachment))
        if self._engine.durability.journal is not None:
            metadata = (*metadata, (JOURNALLED_KEY, "1"))
        if metadata:
            await context.send_initial_metadata(metadata)
        async for output in attachment.outputs():
            yield encode_output(output)


def _request_id(text: str) -> RequestId:
    try:
        return parse_request_id(text)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def _positions(request: inference_pb2.AttachRequest) -> Positions:
    by_choice = {each.choice: each.from_token for each in request.positions}
    if len(by_choice) < len(request.positions):
        raise InvalidRequest("positions has a choice twice")
    prompt_token = request.from_prompt_token if request.HasField("from_prompt_token") else None
    return Positions(request.from_token, by_choice, prompt_token)
