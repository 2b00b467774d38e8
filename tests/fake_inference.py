"""An Inference service with invented tokens and the faults that a test configures."""

# ruff: noqa: N802 - gRPC names the methods

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from stageline_rpc.v1 import inference_pb2, inference_pb2_grpc

REQUEST_ID = "01890a5d-ac96-774b-bcce-b302099a8057"
ENDLESS = 10**9

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One call ends with this status after `after` messages.

    Without details UNAVAILABLE is what a client sees of a lost connection. A Generate that `is_accepted` is
    known to Attach afterwards.
    """

    after: int = 0
    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    is_accepted: bool = True
    detail: Message | None = None


class FakeInference(inference_pb2_grpc.InferenceServicer):
    """Answers " 0", " 1", ... one token each, in turn for every choice.

    A prompt "!after:CODE" fails with that status after one token, "!overloaded" is refused with the hint to
    retry in 1.5 s, "!endless" never ends, "!gap" leaves a token out, "!unfinished" ends without a finish
    reason, "!uneven" gives choice 0 a token less than the others. A conversation is answered with its length.
    """

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.attaches: list[inference_pb2.AttachRequest] = []
        self.calls: list[str] = []
        self.faults: deque[Fault] = deque()
        """The next calls meet one each."""
        self.known: dict[str, inference_pb2.GenerateRequest] = {}
        """What Attach and Cancel find."""
        self.may_answer = asyncio.Event()
        """Streams begin once it is set, which it is at first."""
        self.may_answer.set()
        self.ended_early = asyncio.Event()
        self.num_ended_early = 0
        self.cancelled_ids: list[str] = []
        self.has_tokenizer = os.environ.get("FAKE_TOKENIZER", "1") == "1"
        self.has_chat_template = os.environ.get("FAKE_CHAT_TEMPLATE", "1") == "1"

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.calls.append("generate")
        self.requests.append(request)
        fault = self._next_fault()
        if fault is not None and not fault.is_accepted:
            await _abort(context, fault.code, fault.detail)
        if request.request_id in self.known:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"request {request.request_id} is in use")
        if request.text == "!overloaded":
            delay = error_details_pb2.RetryInfo(
                retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_000)
            )
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, delay)
        self.known[request.request_id] = request
        async for response in self._stream(request, {}, fault, context):
            yield response

    async def Attach(
        self, request: inference_pb2.AttachRequest, context: _Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.calls.append("attach")
        self.attaches.append(request)
        fault = self._next_fault()
        if fault is not None and not fault.is_accepted:
            await _abort(context, fault.code, fault.detail)
        if request.request_id not in self.known:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no request {request.request_id}")
        generate = self.known[request.request_id]
        starts = dict.fromkeys(range(_num_choices(generate)), request.from_token)
        starts |= {position.choice: position.from_token for position in request.positions}
        async for response in self._stream(generate, starts, fault, context):
            yield response

    async def Cancel(
        self, request: inference_pb2.CancelRequest, context: _Context
    ) -> inference_pb2.CancelResponse:
        if request.request_id != REQUEST_ID and request.request_id not in self.known:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no request {request.request_id}")
        self.cancelled_ids.append(request.request_id)
        return inference_pb2.CancelResponse()

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: _Context
    ) -> inference_pb2.GetModelResponse:
        return inference_pb2.GetModelResponse(
            name="fake-stories",
            has_tokenizer=self.has_tokenizer,
            has_chat_template=self.has_chat_template,
        )

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: _Context
    ) -> inference_pb2.TokenizeResponse:
        """One id per word."""
        text = request.text or " ".join(message.content for message in request.conversation.messages)
        return inference_pb2.TokenizeResponse(token_ids=range(len(text.split())))

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: _Context
    ) -> inference_pb2.DetokenizeResponse:
        return inference_pb2.DetokenizeResponse(text="".join(f" {token}" for token in request.token_ids))

    def _next_fault(self) -> Fault | None:
        return self.faults.popleft() if self.faults else None

    async def _stream(
        self,
        request: inference_pb2.GenerateRequest,
        starts: Mapping[int, int],
        fault: Fault | None,
        context: _Context,
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        try:
            await self.may_answer.wait()
            for number, response in enumerate(self._responses(request, starts)):
                if fault is not None and number == fault.after:
                    await _abort(context, fault.code, fault.detail)
                yield response
                if request.text.startswith("!after:"):
                    await _abort(context, grpc.StatusCode[request.text.removeprefix("!after:")], None)
                if request.request_id in self.cancelled_ids:
                    await _abort(context, grpc.StatusCode.CANCELLED, None)
                await asyncio.sleep(0.01 if request.text == "!endless" else 0)
            if fault is not None:
                await _abort(context, fault.code, fault.detail)
        except (asyncio.CancelledError, GeneratorExit):
            # gRPC cancels the wait inside, or closes this generator where it stands at `yield`.
            self.ended_early.set()
            self.num_ended_early += 1
            raise
        finally:
            if request.on_disconnect.action != inference_pb2.OnDisconnect.ACTION_DETACH:
                self.known.pop(request.request_id, None)

    def _responses(
        self, request: inference_pb2.GenerateRequest, starts: Mapping[int, int]
    ) -> Iterator[inference_pb2.GenerateResponse]:
        choices = range(_num_choices(request))
        longest = max(_num_tokens(request, choice) for choice in choices)
        for index in range(min(starts.values(), default=0), longest + 1):
            for choice in choices:
                num_tokens = _num_tokens(request, choice)
                # A call that attaches after the last token still gets the finish reason.
                is_late_end = starts.get(choice, 0) == num_tokens == index
                if starts.get(choice, 0) <= index < num_tokens or is_late_end:
                    yield self._response(request, choice, index)

    def _response(
        self, request: inference_pb2.GenerateRequest, choice: int, index: int
    ) -> inference_pb2.GenerateResponse:
        num_tokens = _num_tokens(request, choice)
        response = inference_pb2.GenerateResponse(
            request_id=request.request_id or REQUEST_ID,
            choice=choice,
            first_token_index=index + (1 if request.text == "!gap" and index else 0),
            text_offset=sum(len(self._text(earlier, request)) for earlier in range(index)),
        )
        if index < num_tokens:
            response.token_ids.append(index)
            response.text = self._text(index, request)
            if request.sampling.HasField("logprobs"):
                response.logprobs.append(_logprobs(index, request.sampling.logprobs))
        if index == choice == 0 and request.sampling.HasField("prompt_logprobs"):
            response.prompt_logprobs.extend(_prompt_logprobs(request))
        if index >= num_tokens - 1 and request.text != "!unfinished":
            response.finish_reason = inference_pb2.FINISH_REASON_LENGTH
            response.usage.CopyFrom(_usage(request, num_tokens))
        return response

    def _text(self, index: int, request: inference_pb2.GenerateRequest) -> str:
        if not self.has_tokenizer:
            return ""
        num_messages = len(request.conversation.messages)
        return f" {num_messages} messages" if num_messages else f" {index}"


def _num_choices(request: inference_pb2.GenerateRequest) -> int:
    return request.sampling.n or 1


def _num_tokens(request: inference_pb2.GenerateRequest, choice: int) -> int:
    if request.text == "!endless":
        return ENDLESS
    num_tokens = request.max_tokens if request.HasField("max_tokens") else 4
    return num_tokens - (1 if request.text == "!uneven" and choice == 0 else 0)


def _num_prompt_tokens(request: inference_pb2.GenerateRequest) -> int:
    return len(request.text.split()) or len(request.token_ids.ids)


def _logprobs(token_id: int, num_top: int) -> inference_pb2.TokenLogprobs:
    top = [inference_pb2.TopLogprob(token_id=token_id + rank, logprob=-0.5 - rank) for rank in range(num_top)]
    return inference_pb2.TokenLogprobs(token_id=token_id, logprob=-0.5, rank=1, top=top)


def _prompt_logprobs(request: inference_pb2.GenerateRequest) -> Iterator[inference_pb2.TokenLogprobs]:
    yield inference_pb2.TokenLogprobs(token_id=0)
    for token_id in range(1, _num_prompt_tokens(request)):
        yield _logprobs(token_id, request.sampling.prompt_logprobs)


def _usage(request: inference_pb2.GenerateRequest, num_tokens: int) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=_num_prompt_tokens(request),
        completion_tokens=num_tokens,
        seed=request.sampling.seed or 7,
    )


async def _abort(context: _Context, code: grpc.StatusCode, detail: Message | None) -> None:
    if detail is not None:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status = status_pb2.Status(code=code.value[0], message="said the server", details=[packed])
        context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    await context.abort(code, "said the server")
