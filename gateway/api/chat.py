"""`POST /v1/chat/completions`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.call import Call, Gateway, Submission, open_call, output_rules, read_fields, submit
from gateway.api.errors import invalid
from gateway.api.output_body import ChoiceText, respond, usage_body
from gateway.api.sampling import Count, GenerationFields, NumLogprobs, sampling_message
from gateway.api.sse import frame, while_connected
from gateway.generation import Generation, GenerationSpec
from gateway.output import Delta, StopReason
from stageline_rpc.v1.inference_pb2 import TokenLogprobs
from text.tokenizer import BadConversation, NoChatTemplate, TemplateOptions
from wire.ids import id_text

PARTS_BETWEEN = "\n"


class ChatPart(BaseModel):
    """A part of a message's content; only text is served."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    text: str | None = None


class MessageFields(BaseModel):
    """A message; further fields are for the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | list[ChatPart] | None = None


class TemplateFields(BaseModel):
    """Fields that decide how a conversation is rendered."""

    messages: list[MessageFields]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class ChatRequest(TemplateFields, GenerationFields):
    """Body of a chat completion request."""

    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None


async def chat_completions(gateway: Gateway, request: Request) -> Response:
    """Answer a conversation."""
    fields, ignored = await read_fields(gateway, request, ChatRequest)
    fields.check_stream()
    if fields.top_logprobs is not None and not fields.logprobs:
        raise invalid("top_logprobs needs logprobs = true", param="top_logprobs")
    call = open_call(gateway, request, fields, ignored)
    submission = await _submission(gateway, fields)
    generation = await while_connected(request, submit(gateway, call, submission))
    writer = ChatWriter(gateway, call, fields, generation)
    return await respond(gateway, request, call, generation, writer, fields)


async def encode_messages(gateway: Gateway, fields: TemplateFields) -> Sequence[int]:
    """Return the token ids of the rendered conversation. Raises ApiError."""
    codec = gateway.require_codec("messages", "use /v1/completions with token ids")
    messages = [_message(index, message) for index, message in enumerate(fields.messages)]
    gateway.check_text_size((message["content"] for message in messages), param="messages")
    options = _template_options(gateway, fields)
    if "developer" not in (options.template or codec.chat_template or ""):
        for message in messages:  # OpenAI's newer name
            message["role"] = "system" if message["role"] == "developer" else message["role"]
    try:
        return await gateway.beside_loop(lambda: codec.encode_messages(messages, options))
    except (BadConversation, NoChatTemplate) as error:
        raise invalid(str(error), param="messages") from None


def _message(index: int, message: MessageFields) -> dict[str, Any]:
    """Return a message as templates read it: its text in one piece, arguments of tool calls as objects."""
    if isinstance(message.content, list):
        content = PARTS_BETWEEN.join(
            _part_text(part, f"messages[{index}].content[{number}]")
            for number, part in enumerate(message.content)
        )
    else:
        content = message.content or ""
    found = {**(message.model_extra or {}), "role": message.role, "content": content}
    calls = found.get("tool_calls")
    if isinstance(calls, list):
        found["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return found


def _part_text(part: ChatPart, param: str) -> str:
    if part.type not in ("text", "input_text") or part.text is None:
        raise invalid(f"{param} is of type {part.type!r}: only text is served", param=param)
    return part.text


def _with_parsed_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except ValueError:
        return call


def _template_options(gateway: Gateway, fields: TemplateFields) -> TemplateOptions:
    continues = bool(fields.continue_final_message)
    begins = not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
    if continues and begins:
        raise invalid(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    variables = dict(fields.chat_template_kwargs or {})
    if fields.reasoning_effort is not None:
        variables["reasoning_effort"] = fields.reasoning_effort
    return TemplateOptions(
        template=gateway.template,
        add_generation_prompt=begins,
        continue_final_message=continues,
        variables=variables,
    )


async def _submission(gateway: Gateway, fields: ChatRequest) -> Submission:
    rules = output_rules(gateway, fields)
    sampling = sampling_message(fields, gateway.upstream.model.generation_config)
    if fields.logprobs:
        sampling.logprobs = fields.top_logprobs or 0
    spec = GenerationSpec(
        rules=rules,
        num_choices=fields.n or 1,
        wants_tokens=bool(fields.logprobs or fields.return_token_ids),
    )
    wanted = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    ids = await encode_messages(gateway, fields)
    prompt = gateway.fit(ids, fields, param="messages", max_tokens=wanted)
    return Submission(spec=spec, prompts=[prompt], sampling=sampling, fields=fields)


class ChatWriter:
    """Bodies and events of a chat completion; used on the text thread."""

    def __init__(self, gateway: Gateway, call: Call, fields: ChatRequest, generation: Generation) -> None:
        self._logprobs, self._generation, self._fields = gateway.logprobs, generation, fields
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

    def delta(self, delta: Delta) -> bytes:
        choice = {
            "index": delta.choice,
            "delta": {"content": delta.text} if delta.text or not delta.finish_reason else {},
            **self._ending(delta.finish_reason, delta.stop_reason),
            "logprobs": self._logprobs_of(delta.logprobs),
        }
        if self._fields.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return self._chunk(choice)

    def _chunk(self, choice: Mapping[str, Any], **more: Any) -> bytes:
        if self._fields.includes_continuous_usage:
            more["usage"] = usage_body(self._generation.usage)
        return frame(orjson.dumps(self.body([choice], **more)))

    def body(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._head, "choices": choices, **more}

    def whole(self, choices: Sequence[ChoiceText]) -> bytes:
        more: dict[str, Any] = {"usage": usage_body(self._generation.usage)}
        if self._fields.return_token_ids:
            more |= self._prompt_ids()
        if (num_top := self._fields.prompt_logprobs) is not None:
            rows = self._generation.prompts[0].logprobs
            more["prompt_logprobs"] = self._logprobs.prompt(rows, num_top)
        bodies = [self._whole_choice(index, choice) for index, choice in enumerate(choices)]
        return orjson.dumps(self.body(bodies, **more))

    def _whole_choice(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        body = {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
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
