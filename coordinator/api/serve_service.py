"""`Inference/Serve`: the requests of one gateway on one stream; decode, one domain call, encode."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from coordinator.api.call_context import CallContext, CallContexts, SecretCheck, check_client
from coordinator.api.output_codec import (
    decode_positions,
    decode_request_id,
    encode_logprobs,
    finish_reason_of,
    usage_of,
)
from coordinator.api.request_handler import RequestHandler
from coordinator.api.tenants import tenant_of
from coordinator.engine.engine import Engine
from coordinator.engine.output_batch import (
    MAX_NUMBERS,
    Accepted,
    BatchMessage,
    Failure,
    LogprobRows,
    NumberedOpening,
    NumberedStream,
    OutputBatch,
)
from coordinator.engine.request import new_attach_secret, secret_digest
from stageline_rpc.internal.v1 import serve_pb2
from stageline_rpc.v1 import inference_pb2
from wire.channels import JOURNALLED_KEY, MODEL_KEY, when_call_ends
from wire.errors import (
    ClusterUnavailable,
    DeadlinePassed,
    InvalidRequest,
    Overloaded,
    RequestCancelled,
    ServingError,
    status_of,
)
from wire.ids import id_text
from wire.interceptors import sent_reason
from wire.message_scan import MessageScan

log = logging.getLogger(__name__)

MAX_POSITIONS = 64
MAX_FIELDS = 256
_SCAN = MessageScan(
    serve_pb2.ServeEnvelope.DESCRIPTOR,
    max_fields=MAX_FIELDS,
    max_counts={
        "stageline.v1.AttachRequest.positions": MAX_POSITIONS,
        "stageline.v1.GrantCredit.numbers": MAX_NUMBERS,
        "stageline.v1.GrantCredit.tokens": MAX_NUMBERS,
    },
)
Context = grpc.aio.ServicerContext[Any, Any]


class ServeStreams:
    """The streams of all gateways."""

    def __init__(
        self,
        requests: RequestHandler,
        engine: Engine,
        callers: CallContexts,
        secrets: SecretCheck,
        *,
        fingerprint: str,
    ) -> None:
        """`fingerprint` is the model's."""
        self._requests = requests
        self._engine = engine
        self._callers = callers
        self._secrets = secrets
        self._metadata = ((MODEL_KEY, fingerprint), *(((JOURNALLED_KEY, "1"),) if engine.has_journal else ()))
        self._streams: set[ServeStream] = set()

    async def serve(
        self, messages: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[inference_pb2.ServeResponse]:
        """Serve one gateway until either end closes the stream."""
        stream = ServeStream(
            self._requests, self._engine, self._callers, self._secrets, caller=self._callers.of(context)
        )
        self._streams.add(stream)
        reader = asyncio.create_task(stream.read(messages), name="serve-reader")

        def end() -> None:
            self._streams.discard(stream)
            reader.cancel()
            stream.close()

        when_call_ends(context, end)
        await context.send_initial_metadata(self._metadata)
        async for message in stream.batch.messages():
            yield encode_batch(message)

    def close(self) -> None:
        """End all streams after what is left to send."""
        for stream in self._streams:
            stream.batch.close(ClusterUnavailable("the coordinator is stopping"))


class ServeStream:
    """Executes the commands of one gateway."""

    def __init__(
        self,
        requests: RequestHandler,
        engine: Engine,
        callers: CallContexts,
        secrets: SecretCheck,
        *,
        caller: CallContext,
    ) -> None:
        self.batch = OutputBatch(self._ended)
        self._requests = requests
        self._engine = engine
        self._callers = callers
        self._secrets = secrets
        self._caller = caller
        self._submitting: dict[int, asyncio.Task[None]] = {}
        self._deadlines: dict[int, asyncio.TimerHandle] = {}

    async def read(self, messages: AsyncIterator[bytes]) -> None:
        """Execute commands until the gateway ends the stream, or sends a message that cannot be read."""
        try:
            async for data in messages:
                self.execute(decode_command(data))
        except Exception as error:  # any: it ends the stream, whose other task sends it
            self.batch.close(error)
        else:
            self.batch.close()

    def execute(self, command: serve_pb2.ServeEnvelope) -> None:
        """Execute one command; an error of it is in the next message. Raises InvalidRequest without one."""
        match command.WhichOneof("command"):
            case "submit":
                self._begin(command.submit, self._submit)
            case "attach":
                self._begin(command.attach, self._attach)
            case "cancel":
                self._try(self._cancel, command.cancel)
            case "stop":
                self._try(self._stop, command.stop)
            case "credit":
                self._grant(command.credit)
            case "detach":
                self._try(self._detach, command.detach)
            case None:
                raise InvalidRequest("message has no command")

    def close(self) -> None:
        """Detach from the requests, according to their `on_disconnect`."""
        for task in self._submitting.values():
            task.cancel()
        self.batch.end_all()
        for timer in self._deadlines.values():
            timer.cancel()

    def _try(self, run: Callable[[Any], None], message: Any) -> None:
        try:
            run(message)
        except ServingError as error:
            self.batch.reject(message.number, error)

    def _begin(self, message: Any, run: Callable[[Any], None]) -> None:
        """Run a command that takes a new number; its failure ends the number."""
        try:
            self.batch.reserve(message.number, message.credit, owner=message.tenant or message.client)
        except (InvalidRequest, Overloaded) as error:
            self.batch.reject(message.number, error)
            return
        try:
            check_client(message.client)
            run(message)
        except Exception as error:
            self._fail(message.number, error)

    def _submit(self, message: serve_pb2.SubmitEnvelope) -> None:
        number = message.number
        deadline_s = self._set_deadline(number, message)
        task = asyncio.create_task(self._accept(message, deadline_s), name=f"serve-submit-{number}")
        self._submitting[number] = task
        task.add_done_callback(lambda _: self._submitting.pop(number, None))

    async def _accept(self, message: serve_pb2.SubmitEnvelope, deadline_s: float | None) -> None:
        created = "" if message.attach_secret else new_attach_secret()
        try:
            caller = self._callers.on_stream(self._caller, message, deadline_s=deadline_s)
            await self._requests.submit(
                message.request,
                caller,
                secret_digest(message.attach_secret or created, caller.tenant),
                tokens_only=True,
                open_stream=NumberedOpening(batch=self.batch, number=message.number, secret=created),
            )
        except Exception as error:
            self._fail(message.number, error)

    def _attach(self, message: inference_pb2.AttachNumber) -> None:
        name = decode_request_id(message.request.request_id)
        tenant = tenant_of(self._caller.identity, message.tenant)
        request_id = self._secrets.check(
            "Serve", name, message.attach_secret, tenant=tenant, host=self._caller.host
        )
        self._engine.attach(
            request_id,
            decode_positions(message.request),
            deadline_s=self._set_deadline(message.number, message),
            observes=message.request.observe,
            open_stream=NumberedOpening(
                batch=self.batch,
                number=message.number,
                includes_state=message.request.include_client_state,
            ),
        )

    def _cancel(self, message: inference_pb2.CancelNumber) -> None:
        number = message.number
        stream = self.batch.find(number)
        if (task := self._submitting.get(number)) is not None:
            task.cancel()
        if stream is not None and stream.request.is_live:
            self._engine.cancel(stream.request.id)
        self._fail(number, RequestCancelled("the request was cancelled"))

    def _detach(self, message: inference_pb2.DetachNumber) -> None:
        number = message.number
        self.batch.find(number)
        if self.batch.is_reserved(number):
            raise InvalidRequest(f"number {number} is not accepted yet: cancel it")
        self.batch.end(number)

    def _stop(self, message: inference_pb2.StopChoice) -> None:
        stream = self.batch.find(message.number)
        if self.batch.is_reserved(message.number):
            raise InvalidRequest(f"number {message.number} is not accepted yet, so it has no tokens")
        if stream is not None:
            choice = self._engine.stop_choice(stream.request, message.choice, after_token=message.after_token)
            stream.skip(choice)
            stream.wake()

    def _grant(self, message: inference_pb2.GrantCredit) -> None:
        if len(message.numbers) != len(message.tokens):
            raise InvalidRequest(
                f"credit has {len(message.numbers)} numbers and {len(message.tokens)} tokens"
            )
        for number, tokens in zip(message.numbers, message.tokens, strict=True):
            try:
                self.batch.grant(number, tokens)
            except ServingError as error:
                self.batch.reject(number, error)

    def _set_deadline(
        self, number: int, message: serve_pb2.SubmitEnvelope | inference_pb2.AttachNumber
    ) -> float | None:
        """Begin the timeout of a number; return its end on the engine's clock."""
        if not message.HasField("timeout"):
            return None
        timeout_s = max(0.0, message.timeout.seconds + message.timeout.nanos / 1e9)
        loop = asyncio.get_running_loop()
        self._deadlines[number] = loop.call_later(timeout_s, self._expire, number)
        return self._engine.now_s() + timeout_s

    def _expire(self, number: int) -> None:
        """End a number at its deadline; the engine cancels the request when it is detached."""
        if (task := self._submitting.get(number)) is not None:
            task.cancel()
        self._fail(number, DeadlinePassed("the request deadline has passed"))

    def _fail(self, number: int, error: Exception) -> None:
        if not isinstance(error, ServingError | DecodeError):
            log.exception("unexpected error in Serve", exc_info=error)
        self.batch.fail(number, error)
        self._forget_deadline(number)

    def _ended(self, stream: NumberedStream) -> None:
        self._forget_deadline(stream.number)
        self._engine.detach(stream)

    def _forget_deadline(self, number: int) -> None:
        if (timer := self._deadlines.pop(number, None)) is not None:
            timer.cancel()


def decode_command(data: bytes) -> serve_pb2.ServeEnvelope:
    """Decode a ServeRequest. Raises MessageTooLarge, InvalidRequest or DecodeError."""
    _SCAN.check(data)
    return serve_pb2.ServeEnvelope.FromString(data)


def encode_batch(message: BatchMessage) -> inference_pb2.ServeResponse:
    """Encode one message; its tokens are columns."""
    response = inference_pb2.ServeResponse(
        numbers=message.numbers,
        choices=message.choices,
        counts=message.counts,
        token_ids=message.token_ids,
    )
    for acceptance in message.accepted:
        _encode_acceptance(acceptance, response.accepted.add())
    for rows in message.logprobs:
        _encode_rows(rows, response.logprobs.add(number=rows.number, choice=rows.choice.index).tokens)
    for rows in message.prompt_logprobs:
        prompt = response.prompt_logprobs.add(number=rows.number, first_prompt_token_index=rows.first_index)
        _encode_rows(rows, prompt.tokens)
    for number, choice in message.ends:
        response.ends.add(
            number=number,
            choice=choice.index,
            finish_reason=finish_reason_of(choice),
            usage=usage_of(choice),
        )
    for failure in message.failures:
        _encode_failure(failure, response.failures.add())
    for failure in message.rejections:
        _encode_failure(failure, response.rejections.add())
    return response


def _encode_acceptance(acceptance: Accepted, message: inference_pb2.Accepted) -> None:
    request = acceptance.request
    message.number, message.request_id = acceptance.number, id_text(request.name)
    message.attach_secret, message.client_state = acceptance.secret, acceptance.client_state
    message.num_tokens.extend(choice.buffer.num_readable_tokens for choice in request.choices)
    message.has_ended = not request.is_live


def _encode_rows(rows: LogprobRows, messages: Any) -> None:
    for token, logprobs in zip(rows.tokens, rows.rows, strict=True):
        encode_logprobs(token, logprobs, messages.add())


def _encode_failure(failure: Failure, message: inference_pb2.NumberFailure) -> None:
    error = failure.error
    if isinstance(error, DecodeError):
        error = InvalidRequest("request cannot be decoded as a GenerateRequest")
    code, text = status_of(error)
    message.number, message.code = failure.number, code.value[0]
    message.reason, message.message = sent_reason(error), text
    if isinstance(error, InvalidRequest):
        message.field = error.field
    if isinstance(error, Overloaded) and error.retry_after_s is not None:
        message.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
