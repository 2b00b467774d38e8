"""`/v1/messages` and `/v1/messages/count_tokens`, and errors in Anthropic's shape."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.call import Gateway, json_response, open_call, read_fields, submit
from gateway.api.conversation import Conversation, encode_messages, prepare, read_selection
from gateway.api.errors import ApiError
from gateway.api.messages.fields import MessageRequest, PromptFields
from gateway.api.messages.writer import MessageWriter, event
from gateway.api.output_body import respond_whole
from gateway.api.sse import EventStream, while_connected
from gateway.generation import Generation
from gateway.rendering import Rendering
from wire.ids import id_text

OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
"""By status; others are invalid requests, or errors of the server."""


async def create_message(gateway: Gateway, request: Request) -> Response:
    """Answer a conversation."""
    fields = await read_fields(gateway, request, MessageRequest)
    call = open_call(gateway, request, fields)
    conversation = await while_connected(request, gateway.beside_loop(partial(_prepare, gateway, fields)))
    generation = await while_connected(request, submit(gateway, call, conversation.submission))
    answers = conversation.answers(generation, id_text(call.request_id))
    writer = MessageWriter(call, answers, generation.usage)
    if fields.stream:
        return EventStream(
            _events(generation, writer),
            close=generation.cancel,
            headers=call.headers(),
            write_error=_error_event,
        )
    return await respond_whole(gateway, request, call, generation, writer)


def _prepare(gateway: Gateway, fields: MessageRequest) -> Conversation:
    return prepare(gateway, fields.chat_fields(), max_tokens=fields.max_tokens)


async def count_message_tokens(gateway: Gateway, request: Request) -> Response:
    """Count the tokens of a conversation."""
    fields = await read_fields(gateway, request, PromptFields)
    ids = await while_connected(request, gateway.beside_loop(partial(_encode, gateway, fields)))
    return json_response({"input_tokens": len(ids)})


def _encode(gateway: Gateway, fields: PromptFields) -> Sequence[int]:
    chat = fields.chat_fields()
    return encode_messages(gateway, chat, read_selection(chat.tools, chat.tool_choice))


def message_error(error: ApiError) -> Response:
    """Return an error as Anthropic's clients read it; a full queue is 529."""
    return _error_response(error, _status_of(error))


def message_refusal(error: ApiError) -> Response:
    """Return the error of a key; its limits are 429, since nothing is overloaded."""
    return _error_response(error, error.status)


def _status_of(error: ApiError) -> int:
    return OVERLOADED if error.status == 429 else error.status


def _error_response(error: ApiError, status: int) -> Response:
    return Response(
        orjson.dumps(_error_body(error, status)),
        status_code=status,
        headers=error.headers,
        media_type="application/json",
    )


def _error_body(error: ApiError, status: int) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {**error.body, "type": kind}}


def _error_event(error: ApiError) -> bytes:
    return event("error", error=_error_body(error, _status_of(error))["error"])


async def _events(
    generation: Generation, writer: MessageWriter
) -> AsyncGenerator[bytes | Rendering[bytes], None]:
    yield writer.begin()
    yield generation.rendering(writer.delta)
    yield writer.end()
