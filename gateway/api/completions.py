"""`POST /v1/completions`."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import orjson
from pydantic import Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.call import Call, Gateway, Submission, open_call, output_rules, read_fields, submit
from gateway.api.errors import invalid
from gateway.api.output_body import ChoiceText, chunk_usage, respond, usage_body
from gateway.api.sampling import GenerationFields, NumLogprobs, sampling_message, structure_names
from gateway.api.sse import frame, while_connected
from gateway.generation import Generation, GenerationSpec
from gateway.output import Delta
from wire.ids import id_text

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256
_PROMPT_FORMS = "text, a list of texts, a list of token ids or a list of such lists"
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
        },
    ]
}


class CompletionRequest(GenerationFields):
    """Body of a completion request."""

    prompt: Annotated[str | list[Any], WithJsonSchema(_PROMPT_SCHEMA)]
    echo: bool | None = None
    logprobs: Annotated[NumLogprobs | None, Field(description="Most likely tokens per token")] = None


async def completions(gateway: Gateway, request: Request) -> Response:
    """Complete one or several prompts."""
    fields = await read_fields(gateway, request, CompletionRequest)
    fields.check_stream()
    call = open_call(gateway, request, fields)
    if not fields.is_large and _all_are(fields.prompt, int):
        submission = _submission(gateway, fields)
    else:
        submission = await gateway.beside_loop(partial(_submission, gateway, fields))
    generation = await while_connected(request, submit(gateway, call, submission))
    writer = CompletionWriter(gateway, call, fields, generation)
    return await respond(gateway, request, call, generation, writer, fields)


def _submission(gateway: Gateway, fields: CompletionRequest) -> Submission:
    rules = output_rules(gateway, fields)
    sampling = sampling_message(fields, gateway.upstream.model.generation_config)
    if fields.logprobs is not None:
        sampling.logprobs = fields.logprobs
        if fields.echo:
            sampling.prompt_logprobs = max(fields.logprobs, fields.prompt_logprobs or 0)
    spec = GenerationSpec(
        rules=rules,
        num_choices=fields.n or 1,
        echo=bool(fields.echo),
        echoes_logprobs=fields.logprobs is not None,
        wants_tokens=fields.logprobs is not None or bool(fields.return_token_ids) or gateway.codec is None,
    )
    _check_number(len(prompts := _prompts(gateway, fields.prompt)), spec.num_choices)
    fitted = [
        gateway.fit(ids, fields, param="prompt", max_tokens=fields.max_tokens, default=DEFAULT_MAX_TOKENS)
        for ids in prompts
    ]
    return Submission(
        spec=spec,
        prompts=fitted,
        sampling=sampling,
        fields=fields,
        own_names=structure_names(fields, sampling),
    )


def _check_number(num_prompts: int, num_choices: int) -> None:
    """Raise ApiError for more sequences than a coordinator's queue takes by default."""
    if num_prompts * num_choices > MAX_PROMPTS and num_prompts > 1:
        raise invalid(
            f"prompt has {num_prompts} entries of n = {num_choices} choices, {num_prompts * num_choices} in "
            f"all, the limit is {MAX_PROMPTS}",
            param="n",
        )


def _prompts(gateway: Gateway, prompt: str | list[Any]) -> Sequence[Sequence[int]]:
    """Return token ids per prompt. Raises ApiError for other forms than OpenAI's four."""
    prompts: list[Any] = [prompt] if isinstance(prompt, str) else prompt
    if not prompts:
        raise invalid("prompt is empty", param="prompt")
    if _all_are(prompts, int):
        return [prompts]
    if len(prompts) > MAX_PROMPTS:
        raise invalid(f"prompt has {len(prompts)} entries, the limit is {MAX_PROMPTS}", param="prompt")
    if _all_are(prompts, list) and all(_all_are(ids, int) for ids in prompts):
        return prompts
    if not _all_are(prompts, str):
        raise invalid(f"prompt must be {_PROMPT_FORMS}", param="prompt")
    codec = gateway.require_codec("prompt", "send token ids")
    gateway.check_text_size(prompts, param="prompt")
    return [codec.encode(text) for text in prompts]


def _all_are(values: str | Sequence[Any], kind: type) -> bool:
    """Exactly of this type: a bool is no int."""
    return all(type(value) is kind for value in values)


class CompletionWriter:
    """Bodies and events of a completion; used on the text thread."""

    def __init__(
        self, gateway: Gateway, call: Call, fields: CompletionRequest, generation: Generation
    ) -> None:
        self._logprobs, self._generation, self._fields = gateway.logprobs, generation, fields
        self._echoed: set[int] = set()
        self._choices = [ChoiceText() for _ in range(generation.num_choices)]
        self._head = {
            "id": f"cmpl-{id_text(call.request_id)}",
            "object": "text_completion",
            "created": call.created,
            "model": call.model,
            "system_fingerprint": gateway.system_fingerprint,
        }

    def begin(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        part = ChoiceText()
        part.add(delta)
        choice = self._choice(delta.choice, part)
        if self._fields.return_token_ids and delta.choice not in self._echoed:
            self._echoed.add(delta.choice)
            choice["prompt_token_ids"] = list(self._generation.prompt_of(delta.choice).ids)
        more = chunk_usage(self._fields, self._generation.usage)
        return frame(orjson.dumps(self.body([choice], **more)))

    def body(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._head, "choices": choices, **more}

    def add(self, delta: Delta) -> None:
        self._choices[delta.choice].add(delta)

    def whole(self) -> bytes:
        """Return the body of a response that is not streamed."""
        bodies = [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)]
        return orjson.dumps(self.body(bodies, usage=usage_body(self._generation.usage)))

    def _whole_choice(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        body = self._choice(index, choice)
        prompt = self._generation.prompt_of(index)
        if self._fields.return_token_ids:
            body["prompt_token_ids"] = list(prompt.ids)
        if (num_top := self._fields.prompt_logprobs) is not None:
            body["prompt_logprobs"] = self._logprobs.prompt(prompt.logprobs, num_top)
        return body

    def _choice(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        logprobs = None
        if (num_top := self._fields.logprobs) is not None:
            logprobs = self._logprobs.completion(
                choice.token_ids, choice.logprobs, choice.text_offsets, num_top
            )
        body = {
            "index": index,
            "text": choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._fields.return_token_ids:
            body["token_ids"] = choice.token_ids
        return body
