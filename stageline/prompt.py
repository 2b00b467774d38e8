"""Turns what a user passes as prompt and parameters into the message that the server reads."""

from collections.abc import Sequence
from typing import TypeAlias, TypedDict

from stageline.errors import InvalidRequest
from stageline_rpc.v1 import inference_pb2


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

    Raises InvalidRequest for values that the message cannot carry. All else is for the server to judge.
    """
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
    return request


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif len(prompt) == 0:
        raise InvalidRequest("the prompt is an empty list: it needs at least one token id or chat message")
    elif isinstance(prompt[0], dict):
        request.conversation.messages.extend(_chat_message(message) for message in prompt)
    else:
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]  # protobuf refuses what is no integer


def _chat_message(message: object) -> inference_pb2.ChatMessage:
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        raise InvalidRequest(f"a chat message has exactly 'role' and 'content', this one is {message!r}")
    return inference_pb2.ChatMessage(role=message["role"], content=message["content"])
