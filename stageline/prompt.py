"""What a user may pass as prompt."""

from collections.abc import Sequence
from typing import TypeAlias, TypedDict

from stageline import values
from stageline.errors import InvalidRequest
from stageline_rpc.v1 import inference_pb2


class ChatMessage(TypedDict):
    """One message of a conversation; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage]


def set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    """Puts the prompt into the message. Raises InvalidRequest for what a message cannot carry."""
    if isinstance(prompt, str):
        request.text = values.text("the prompt", prompt)
    elif len(prompt) == 0:
        raise InvalidRequest("the prompt is an empty list: it needs at least one token id or chat message")
    elif isinstance(prompt[0], dict):
        request.conversation.messages.extend(_chat_message(message) for message in prompt)
    else:
        request.token_ids.ids.extend(values.token_ids("the prompt", prompt))


def _chat_message(message: object) -> inference_pb2.ChatMessage:
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        raise InvalidRequest(f"a chat message has exactly 'role' and 'content', this one is {message!r}")
    return inference_pb2.ChatMessage(
        role=values.text("a message's role", message["role"]),
        content=values.text("a message's content", message["content"]),
    )
