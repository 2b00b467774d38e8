"""Turns what a user passes as prompt and parameters into the message that the server reads."""

from collections.abc import Sequence
from typing import TypeAlias, TypedDict

from stageline.errors import InvalidRequest
from stageline_rpc.v1 import inference_pb2
from wire.channels import MAX_MESSAGE_BYTES

_UINT32 = range(2**32)
_UINT64 = range(2**64)


class ChatMessage(TypedDict):
    """One message of a conversation; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage]


def build_request(
    prompt: Prompt,
    *,
    max_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    ignore_eos: bool,
    cache_salt: str,
    request_id: str | None,
) -> inference_pb2.GenerateRequest:
    """The message for these arguments; what is None stays unset, so that the server's default holds.

    Raises InvalidRequest for values that the message cannot carry, and for a message that is too large to be
    sent. All else is for the server to judge.
    """
    _check_range("max_tokens", max_tokens, _UINT32)
    _check_range("top_k", top_k, _UINT32)
    _check_range("seed", seed, _UINT64)
    try:
        request = inference_pb2.GenerateRequest(
            request_id=request_id or "",
            max_tokens=max_tokens,
            cache_salt=cache_salt,
            sampling=inference_pb2.SamplingParameters(
                temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, ignore_eos=ignore_eos
            ),
        )
        _set_prompt(request, prompt)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(str(error)) from error
    size_bytes = request.ByteSize()
    if size_bytes > MAX_MESSAGE_BYTES:
        raise InvalidRequest(
            f"the request has {size_bytes} bytes with its prompt, a message has at most {MAX_MESSAGE_BYTES}"
        )
    return request


def _check_range(name: str, value: object, allowed: range) -> None:
    # What is no integer at all is left to protobuf, and must not meet a range, which would try every number.
    if isinstance(value, int) and value not in allowed:
        raise InvalidRequest(f"{name} is {value}, must be in [{allowed.start}, {allowed.stop - 1}]")


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif len(prompt) == 0:
        raise InvalidRequest("the prompt is an empty list: it needs at least one token id or chat message")
    elif isinstance(prompt[0], dict):
        request.conversation.messages.extend(_chat_message(message) for message in prompt)
    else:
        for token_id in prompt:
            _check_range("a token id", token_id, _UINT32)
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]  # protobuf refuses what is no integer


def _chat_message(message: object) -> inference_pb2.ChatMessage:
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        raise InvalidRequest(f"a chat message has exactly 'role' and 'content', this one is {message!r}")
    return inference_pb2.ChatMessage(role=message["role"], content=message["content"])
