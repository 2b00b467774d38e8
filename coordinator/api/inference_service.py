"""`stageline.v1.Inference`: decode, one domain call, encode."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from coordinator.api.call_context import CallContexts, Operators, SecretCheck, metadata_value
from coordinator.api.output_codec import decode_positions, decode_request_id, encode_output
from coordinator.api.request_handler import RequestHandler
from coordinator.api.serve_service import ServeStreams
from coordinator.api.status import StatusReporter
from coordinator.api.tokenizer_service import TokenizerService
from coordinator.engine.engine import Engine
from coordinator.engine.output_stream import OutputStream
from coordinator.engine.request import new_attach_secret, secret_digest
from stageline_rpc.v1 import inference_pb2, inference_pb2_grpc
from wire.audit import Action, AuditLog, AuditOutcome
from wire.authorization import caller_of
from wire.channels import ATTACH_SECRET_KEY, AUTHORIZATION_KEY, JOURNALLED_KEY, when_call_ends
from wire.ids import RequestId, id_text

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
        secrets: SecretCheck,
        streams: ServeStreams,
        tokenizer: TokenizerService,
        audit: AuditLog,
    ) -> None:
        self._requests = requests
        self._engine = engine
        self._status = status
        self._callers = callers
        self._operators = operators
        self._secrets = secrets
        self._streams = streams
        self._tokenizer = tokenizer
        self._audit = audit

    async def Generate(  # type: ignore[override]  # noqa: N802  # see MessageLimits
        self, request: bytes, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        secret = metadata_value(context, ATTACH_SECRET_KEY) or new_attach_secret()
        caller = self._callers.of(context)
        stream = await self._requests.submit(request, caller, secret_digest(secret, caller.tenant))
        async for response in self._read(stream, context, ((ATTACH_SECRET_KEY, secret),)):
            yield response

    async def Attach(  # noqa: N802
        self, request: inference_pb2.AttachRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        request_id = self._check_secret("Attach", request.request_id, context)
        stream = self._engine.attach(
            request_id,
            decode_positions(request),
            deadline_s=self._callers.of(context).deadline_s,
            observes=request.observe,
        )
        state = stream.request.client_state if request.include_client_state else b""
        async for response in self._read(stream, context):
            response.client_state, state = state, b""
            yield response

    async def Cancel(  # noqa: N802
        self, request: inference_pb2.CancelRequest, context: Context
    ) -> inference_pb2.CancelResponse:
        if metadata_value(context, AUTHORIZATION_KEY) or self._operators.includes(context):
            caller, request_id = self._operators.check(context), decode_request_id(request.request_id)
        else:
            request_id = self._check_secret("Cancel", request.request_id, context)
            caller = caller_of(context)
        self._engine.cancel(request_id)
        self._audit.record(Action.CANCEL, AuditOutcome.OK, **caller, request_id=id_text(request_id))
        return inference_pb2.CancelResponse()

    def _check_secret(self, call: str, name: str, context: Context) -> RequestId:
        """Return the id of the caller's request. Raises as `SecretCheck.check`, and InvalidRequest."""
        secret, caller = metadata_value(context, ATTACH_SECRET_KEY), self._callers.of(context)
        named = decode_request_id(name)
        return self._secrets.check(call, named, secret, tenant=caller.tenant, host=caller.host)

    async def Serve(  # type: ignore[override]  # noqa: N802  # see MessageLimits
        self, requests: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[inference_pb2.ServeResponse]:
        async for response in self._streams.serve(requests, context):
            yield response

    async def GetModel(  # noqa: N802
        self, request: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        return self._status.model()

    async def GetTokenizer(  # noqa: N802
        self, request: inference_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GetTokenizerResponse]:
        client = self._callers.of(context).client
        async for response in self._tokenizer.files(request.known_sha256, client):
            yield response

    async def Tokenize(  # type: ignore[override]  # noqa: N802  # see MessageLimits
        self, request: bytes, context: Context
    ) -> inference_pb2.TokenizeResponse:
        caller = self._callers.of(context)
        with self._engine.preparing(caller.client):
            return await self._tokenizer.tokenize(request, caller.client, caller.tenant)

    async def Detokenize(  # type: ignore[override]  # noqa: N802  # see MessageLimits
        self, request: bytes, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        client = self._callers.of(context).client
        with self._engine.preparing(client):
            return await self._tokenizer.detokenize(request, client)

    async def _read(
        self, stream: OutputStream, context: Context, metadata: tuple[tuple[str, str], ...] = ()
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        when_call_ends(context, lambda: self._engine.detach(stream))
        if self._engine.has_journal:
            metadata = (*metadata, (JOURNALLED_KEY, "1"))
        if metadata:
            await context.send_initial_metadata(metadata)
        request_id = id_text(stream.request.name)
        async for output in stream.outputs():
            yield encode_output(output, request_id)
