"""`stageline.v1.Inference`: decode, one domain call, encode."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from coordinator.api.call_context import CallContexts, Operators, metadata_value
from coordinator.api.request_handler import RequestHandler
from coordinator.api.status import StatusReporter
from coordinator.engine.engine import Engine
from coordinator.engine.output_stream import Output, OutputStream, Positions
from coordinator.engine.request import Choice, new_attach_secret, secret_digest
from coordinator.scheduler.sequence import FinishReason
from stageline_rpc.v1 import inference_pb2, inference_pb2_grpc
from wire.addresses import peer_host
from wire.channels import ATTACH_SECRET_KEY, AUTHORIZATION_KEY, JOURNALLED_KEY, when_call_ends
from wire.errors import AttachSecretMismatch, InvalidRequest, InvariantBroken
from wire.ids import RequestId, id_text, parse_request_id
from wire.peer_secrets import RefusedPeers
from wire.steps import TokenLogprobs

FINISH_REASON_TO_MESSAGE: dict[FinishReason, inference_pb2.FinishReason.ValueType] = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


def encode_output(output: Output) -> inference_pb2.GenerateResponse:
    """Encode one message of one choice; the last one has finish reason and usage."""
    choice, piece = output.choice, output.piece
    response = inference_pb2.GenerateResponse(
        request_id=id_text(choice.sequence.key.request_id),
        choice=choice.index,
        first_token_index=piece.first_token_index,
        token_ids=piece.tokens,
        text=piece.text,
        text_offset=piece.text_offset,
    )
    for token, logprobs in zip(piece.tokens, piece.logprobs, strict=bool(piece.logprobs)):
        _encode_logprobs(token, logprobs, response.logprobs.add())
    if output.prompt_logprobs:
        response.first_prompt_token_index = start = output.first_prompt_token_index
        prompt = choice.sequence.all_tokens[start : start + len(output.prompt_logprobs)]
        for token, logprobs in zip(prompt, output.prompt_logprobs, strict=True):
            _encode_logprobs(token, logprobs, response.prompt_logprobs.add())
    if piece.is_last:
        _end(choice, response)
    return response


def _encode_logprobs(
    token: int, logprobs: TokenLogprobs | None, message: inference_pb2.TokenLogprobs
) -> None:
    message.token_id = token
    if logprobs is None:
        return
    message.logprob, message.rank = logprobs.logprob, logprobs.rank
    for token_id, logprob in logprobs.top:
        message.top.add(token_id=token_id, logprob=logprob)


def _end(choice: Choice, response: inference_pb2.GenerateResponse) -> None:
    reason, sequence = choice.buffer.finish_reason, choice.sequence
    if reason is None:
        raise InvariantBroken("the end of a choice without a reason")
    response.finish_reason = FINISH_REASON_TO_MESSAGE[reason]
    response.usage.prompt_tokens = sequence.num_prompt_tokens
    response.usage.completion_tokens = sequence.num_generated_tokens
    response.usage.cached_tokens = sequence.num_cached_tokens
    response.usage.seed = sequence.sampling.seed
    response.usage.restarts = sequence.num_restarts


Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Called by clients."""

    def __init__(
        self,
        requests: RequestHandler,
        engine: Engine,
        status: StatusReporter,
        callers: CallContexts,
        operators: Operators,
        refused: RefusedPeers,
    ) -> None:
        """`refused` counts and logs wrong attach secrets."""
        self._requests = requests
        self._engine = engine
        self._status = status
        self._callers = callers
        self._operators = operators
        self._refused = refused

    async def Generate(  # type: ignore[override]  # noqa: N802  # see MessageLimits
        self, request: bytes, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        secret = metadata_value(context, ATTACH_SECRET_KEY) or new_attach_secret()
        stream = await self._requests.submit(request, self._callers.of(context), secret_digest(secret))
        async for response in self._read(stream, context, ((ATTACH_SECRET_KEY, secret),)):
            yield response

    async def Attach(  # noqa: N802
        self, request: inference_pb2.AttachRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        request_id = _request_id(request.request_id)
        self._check_secret("Attach", request_id, context)
        stream = self._engine.attach(
            request_id,
            _positions(request),
            deadline_s=self._callers.of(context).deadline_s,
        )
        async for response in self._read(stream, context):
            yield response

    async def Cancel(  # noqa: N802
        self, request: inference_pb2.CancelRequest, context: Context
    ) -> inference_pb2.CancelResponse:
        request_id = _request_id(request.request_id)
        if metadata_value(context, AUTHORIZATION_KEY):
            self._operators.check(context)
        else:
            self._check_secret("Cancel", request_id, context)
        self._engine.cancel(request_id)
        return inference_pb2.CancelResponse()

    def _check_secret(self, call: str, request_id: RequestId, context: Context) -> None:
        try:
            self._engine.check_secret(request_id, metadata_value(context, ATTACH_SECRET_KEY))
        except AttachSecretMismatch:
            self._refused.note(call, "wrong attach secret", host=peer_host(context))
            raise

    async def GetModel(  # noqa: N802
        self, request: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        return self._status.model()

    async def _read(
        self, stream: OutputStream, context: Context, metadata: tuple[tuple[str, str], ...] = ()
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        when_call_ends(context, lambda: self._engine.detach(stream))
        if self._engine.has_journal:
            metadata = (*metadata, (JOURNALLED_KEY, "1"))
        if metadata:
            await context.send_initial_metadata(metadata)
        async for output in stream.outputs():
            yield encode_output(output)


def _request_id(text: str) -> RequestId:
    try:
        return parse_request_id(text)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def _positions(request: inference_pb2.AttachRequest) -> Positions:
    by_choice = {position.choice: position.from_token for position in request.positions}
    if len(by_choice) < len(request.positions):
        raise InvalidRequest("positions has a choice twice")
    prompt_token = request.from_prompt_token if request.HasField("from_prompt_token") else None
    return Positions(request.from_token, by_choice, prompt_token)
