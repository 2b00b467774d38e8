"""Turns a client's request into a sequence, or refuses it with the numbers. Pure but for the tokenizer."""

import math
import secrets
from typing import Any

from google.protobuf import unknown_fields
from google.protobuf.message import Message

from coordinator.model import ServedModel
from coordinator.planning.plan import Plan
from coordinator.scheduling.sequence import Sequence
from coordinator.text.tokenizer import ChatMessage, TextCodec, TokenizerError
from stageline_rpc.v1 import inference_pb2
from wire.errors import InvalidRequest
from wire.ids import RequestId, SequenceKey, new_request_id, parse_request_id
from wire.steps import StepSampling

DEFAULT_MAX_TOKENS = 256
MAX_TEMPERATURE = 100.0
TEXT_SLACK = 4
MAX_SEED = 2**64 - 1


def request_id_of(request: inference_pb2.GenerateRequest) -> RequestId:
    """The client's id, or a new one. Raises InvalidRequest for anything but a UUIDv7."""
    if not request.request_id:
        return new_request_id()
    try:
        return parse_request_id(request.request_id)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def refuse_unknown_fields(message: Message) -> None:
    """Raises InvalidRequest for a field, of `message` or of one inside it, that this version would ignore."""
    unknown: Any = unknown_fields.UnknownFieldSet(message)  # iterable, which its stub does not say
    if numbers := sorted({field.field_number for field in unknown}):
        fields = ", ".join(map(str, numbers))
        raise InvalidRequest(f"{type(message).__name__} has fields that this version does not know: {fields}")
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in [value] if isinstance(value, Message) else value:
                refuse_unknown_fields(each)


def check_text_size(request: inference_pb2.GenerateRequest, model: ServedModel) -> None:
    """Refuses a text that can never fit, before it is tokenized, which would take seconds per megabyte.

    A token stands for at most as many bytes as the longest one of the vocabulary, if the tokenizer drops
    nothing; one that folds white space may drop some, so `TEXT_SLACK` times as much is let through.
    """
    text = _text_codec(model, request.WhichOneof("prompt") or "text")
    texts = [request.text, *(each.content for each in request.conversation.messages)]
    size_bytes = sum(len(each.encode()) for each in texts)
    max_tokens = model.config.max_position_embeddings
    most_bytes = TEXT_SLACK * max_tokens * text.longest_token_bytes
    if size_bytes > most_bytes:
        raise InvalidRequest(
            f"the prompt's text has {size_bytes} bytes; more than {most_bytes} can never fit into the "
            f"model's {max_tokens} tokens of at most {text.longest_token_bytes} bytes each"
        )


def resolve_prompt(request: inference_pb2.GenerateRequest, model: ServedModel) -> tuple[int, ...]:
    """The prompt's token ids. May take a while for a long text. Raises InvalidRequest."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("a prompt is needed: text, token_ids or conversation")
    if kind == "token_ids":
        prompt = tuple(request.token_ids.ids)
    else:
        prompt = tuple(_encode(request, _text_codec(model, kind)))
    if not prompt:
        raise InvalidRequest("the prompt has no tokens; at least 1 is needed")
    vocab_size = model.config.vocab_size
    if (largest := max(prompt)) >= vocab_size:
        raise InvalidRequest(f"prompt token id {largest} is outside the vocabulary [0, {vocab_size})")
    return prompt


def make_sequence(
    request: inference_pb2.GenerateRequest,
    prompt: tuple[int, ...],
    request_id: RequestId,
    *,
    model: ServedModel,
    plan: Plan,
    arrival: int,
) -> Sequence:
    """Raises InvalidRequest for parameters out of range and for a sequence that can never fit."""
    sampling = _sampling(request.sampling, model.config.vocab_size)
    max_tokens = _max_tokens(request, len(prompt), model, plan)
    stops = frozenset() if request.sampling.ignore_eos else frozenset(model.checkpoint.eos_token_ids)
    return Sequence(
        SequenceKey(request_id, 0),
        prompt,
        max_tokens=max_tokens,
        sampling=sampling,
        stop_token_ids=stops,
        arrival=arrival,
        cache_salt=request.cache_salt,
    )


def _text_codec(model: ServedModel, kind: str) -> TextCodec:
    if model.text is None:
        raise InvalidRequest(f"model {model.name} has no tokenizer: the prompt must be token_ids, not {kind}")
    return model.text


def _encode(request: inference_pb2.GenerateRequest, codec: TextCodec) -> list[int]:
    try:
        if request.WhichOneof("prompt") == "text":
            return codec.encode(request.text)
        messages = [ChatMessage(each.role, each.content) for each in request.conversation.messages]
        return codec.encode_conversation(messages)
    except TokenizerError as error:
        raise InvalidRequest(str(error)) from error


def _sampling(message: inference_pb2.SamplingParameters, vocab_size: int) -> StepSampling:
    temperature = message.temperature
    if not (math.isfinite(temperature) and 0 <= temperature <= MAX_TEMPERATURE):
        raise InvalidRequest(f"temperature is {temperature}, must be in [0, {MAX_TEMPERATURE:g}]")
    if message.top_k > vocab_size:
        raise InvalidRequest(f"top_k is {message.top_k}, must be in [0, {vocab_size}]")
    top_p = message.top_p if message.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise InvalidRequest(f"top_p is {top_p}, must be in (0, 1]")
    seed = message.seed if message.HasField("seed") else secrets.randbelow(MAX_SEED + 1)
    return StepSampling(temperature=temperature, top_k=message.top_k, top_p=top_p, seed=seed)


def _max_tokens(
    request: inference_pb2.GenerateRequest, num_prompt_tokens: int, model: ServedModel, plan: Plan
) -> int:
    room = plan.max_sequence_tokens - num_prompt_tokens
    if not request.HasField("max_tokens"):
        wanted = max(1, min(DEFAULT_MAX_TOKENS, room))
    else:
        wanted = request.max_tokens
    if wanted < 1:
        raise InvalidRequest(f"max_tokens is {wanted}, must be at least 1")
    if wanted > room:
        raise InvalidRequest(
            f"prompt of {num_prompt_tokens} + max_tokens {wanted} = {num_prompt_tokens + wanted} tokens, "
            f"more than the {plan.max_sequence_tokens} that fit ({_limit_reason(model, plan)})"
        )
    return wanted


def _limit_reason(model: ServedModel, plan: Plan) -> str:
    model_limit = model.config.max_position_embeddings
    return (
        f"model: {model_limit}, configured: {plan.limits.max_sequence_tokens}, "
        f"KV cache: {plan.num_kv_tokens} = {plan.num_blocks} blocks of {plan.block_size}"
    )
