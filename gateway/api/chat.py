"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers import AnswerDelta, Answers, WholeAnswer
from gateway.api.call import Call, Gateway, open_call, read_fields, submit
from gateway.api.conversation import Conversation, ConversationFields, prepare
from gateway.api.errors import invalid
from gateway.api.output_body import chunk_usage, respond, usage_body
from gateway.api.sampling import Count, NumLogprobs
from gateway.api.sse import frame, while_connected
from gateway.generation import Generation
from gateway.output import Delta, StopReason
from gateway.parsers.events import (
    Content,
    ParsedAnswer,
    ParserEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from stageline_rpc.v1.inference_pb2 import TokenLogprobs
from wire.ids import id_text

_PLACEHOLDER = "text"
_CONTENT_KEY = b'"content":'
_PLACEHOLDER_JSON = _CONTENT_KEY + orjson.dumps(_PLACEHOLDER)


class ChatRequest(ConversationFields):
    """Body of a chat completion request."""

    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None


async def chat_completions(gateway: Gateway, request: Request) -> Response:
    """Answer a conversation."""
    fields = await read_fields(gateway, request, ChatRequest)
    fields.check_stream()
    if fields.top_logprobs is not None and not fields.logprobs:
        raise invalid("top_logprobs needs logprobs = true", param="top_logprobs")
    call = open_call(gateway, request, fields)
    conversation = await gateway.beside_loop(partial(_conversation, gateway, fields))
    generation = await while_connected(request, submit(gateway, call, conversation.submission))
    answers = conversation.answers(generation, id_text(call.request_id))
    writer = ChatWriter(gateway, call, fields, generation, answers)
    return await respond(gateway, request, call, generation, writer, fields)


def _conversation(gateway: Gateway, fields: ChatRequest) -> Conversation:
    limit = fields.max_completion_tokens
    return prepare(
        gateway,
        fields,
        max_tokens=fields.max_tokens if limit is None else limit,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        wants_tokens=bool(fields.return_token_ids),
    )


class ChatWriter:
    """Bodies and events of a chat completion; used on the text thread."""

    def __init__(
        self, gateway: Gateway, call: Call, fields: ChatRequest, generation: Generation, answers: Answers
    ) -> None:
        self._logprobs, self._generation, self._fields = gateway.logprobs, generation, fields
        self._answers = answers
        self._choices = [WholeAnswer() for _ in range(generation.num_choices)]
        self._head = {
            "id": f"chatcmpl-{id_text(call.request_id)}",
            "object": "chat.completion.chunk" if fields.stream else "chat.completion",
            "created": call.created,
            "model": call.model,
            "system_fingerprint": gateway.system_fingerprint,
        }

    def begin(self) -> bytes:
        """Return a chunk with the role, for each choice."""
        prompt = self._prompt_ids() if self._fields.return_token_ids else {}
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}, **prompt)
            for index in range(self._generation.num_choices)
        )

    def delta(self, delta: Delta) -> bytes | None:
        """Return a chunk; None while all of the text waits."""
        if self._is_plain and (text := self._answers.content(delta)):
            before, after = self._frames[delta.choice]
            return before + orjson.dumps(text) + after
        answer = self._answers.read(delta)
        if not (answer.events or answer.finish_reason or self._wants_tokens):
            return None
        return self._answer_chunk(answer)

    @cached_property
    def _is_plain(self) -> bool:
        """Chunks differ in their text only."""
        return not (self._wants_tokens or self._fields.includes_continuous_usage)

    @cached_property
    def _frames(self) -> Sequence[tuple[bytes, bytes]]:
        """What stands around the content of a chunk, for each choice."""
        found = []
        for index in range(self._generation.num_choices):
            chunk = self._answer_chunk(AnswerDelta(index, [Content(_PLACEHOLDER)]))
            before, _, after = chunk.partition(_PLACEHOLDER_JSON)  # quotes of other strings are escaped
            found.append((before + _CONTENT_KEY, after))
        return found

    def _answer_chunk(self, answer: AnswerDelta) -> bytes:
        choice = {
            "index": answer.choice,
            "delta": delta_body(answer.events),
            **self._ending(answer.finish_reason, answer.stop_reason),
            "logprobs": self._logprobs_of(answer.logprobs),
        }
        if self._fields.return_token_ids:
            choice["token_ids"] = list(answer.token_ids)
        return self._chunk(choice)

    @property
    def _wants_tokens(self) -> bool:
        return bool(self._fields.logprobs or self._fields.return_token_ids)

    def _chunk(self, choice: Mapping[str, Any], **more: Any) -> bytes:
        more |= chunk_usage(self._fields, self._generation.usage)
        return frame(orjson.dumps(self.body([choice], **more)))

    def body(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._head, "choices": choices, **more}

    def add(self, delta: Delta) -> None:
        self._choices[delta.choice].add(self._answers.read(delta))

    def whole(self) -> bytes:
        more: dict[str, Any] = {"usage": usage_body(self._generation.usage)}
        if self._fields.return_token_ids:
            more |= self._prompt_ids()
        if (num_top := self._fields.prompt_logprobs) is not None:
            rows = self._generation.prompts[0].logprobs
            more["prompt_logprobs"] = self._logprobs.prompt(rows, num_top)
        bodies = [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)]
        return orjson.dumps(self.body(bodies, **more))

    def _whole_choice(self, index: int, choice: WholeAnswer) -> dict[str, Any]:
        body = {
            "index": index,
            "message": message_body(choice.parsed),
            **self._ending(choice.finish_reason, choice.stop_reason),
            "logprobs": self._logprobs_of(choice.logprobs),
        }
        if self._fields.return_token_ids:
            body["token_ids"] = choice.token_ids
        return body

    def _ending(self, finish_reason: str | None, stop_reason: StopReason) -> dict[str, Any]:
        return {"finish_reason": finish_reason, "stop_reason": stop_reason}

    def _logprobs_of(self, rows: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._fields.logprobs:
            return None
        return self._logprobs.chat(rows, self._fields.top_logprobs or 0)

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._generation.prompts[0].ids)}


def delta_body(events: Sequence[ParserEvent]) -> dict[str, Any]:
    """`delta` of a chunk. The first entry of a call has its id and name, all together its arguments."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case Content(text):
                delta["content"] = delta.get("content", "") + text
            case Reasoning(text):
                delta["reasoning_content"] = delta["reasoning"] = delta.get("reasoning", "") + text
            case ToolCallStart(index, identifier, name):
                calls[index] = {"index": index, **_call_body(identifier, name, "")}
            case ToolCallArguments(index, fragment):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += fragment
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def message_body(answer: ParsedAnswer) -> dict[str, Any]:
    """`message` of a choice: empty content beside calls is null, reasoning has both of its names."""
    body: dict[str, Any] = {
        "role": "assistant",
        "content": answer.content or (None if answer.calls else ""),
        "refusal": None,
    }
    if answer.reasoning:
        body["reasoning_content"] = body["reasoning"] = answer.reasoning
    if answer.calls:
        body["tool_calls"] = [_call_body(call.id, call.name, call.arguments) for call in answer.calls]
    return body


def _call_body(identifier: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}
