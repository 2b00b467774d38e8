"""`/v1/responses`: create, retrieve, resume, cancel and delete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.call import Call, Gateway, Submission, json_response, open_call, read_fields, submit
from gateway.api.conversation import (
    ConversationFields,
    encode_messages,
    prepare,
    read_selection,
)
from gateway.api.errors import ApiError, invalid
from gateway.api.responses.earlier import InputItems, identified_items, read_input
from gateway.api.responses.fields import ResponseRequest, chat_messages
from gateway.api.responses.reading import (
    ReadableResponse,
    ResponseReading,
    as_not_found,
    look,
    new_reading,
    observe,
    readable,
)
from gateway.api.responses.stored import ResponseId, StoredResponse, not_found, parse_response_id
from gateway.api.responses.writer import ALL_EVENTS, NO_EVENTS, to_json
from gateway.api.sse import EventStream, while_connected
from gateway.upstream.contract import UpstreamFailure
from wire.foreign_text import parse_digits

PROMPT_TAIL_TOKENS = 64
"""Tokens of the prompt that the output continues: characters, and the tag that opens the reasoning."""
MAX_LISTED = 100
DEFAULT_LISTED = 20


async def create_response(gateway: Gateway, request: Request) -> Response:
    """Answer an input; in the background, or while the client waits."""
    fields = await read_fields(gateway, request, ResponseRequest)
    fields.check()
    call = open_call(gateway, request, fields)
    prepared = await while_connected(request, _prepare(gateway, call, fields))
    generation = await while_connected(request, submit(gateway, call, prepared.submission))
    stream = generation.prompts[0].stream
    identity = ResponseId(call.request_id, stream.secret if fields.is_stored else "")
    response = prepared.response
    if fields.background:
        # No reader: one that reads too slowly would be the end of the response.
        reading = new_reading(gateway, str(identity), stream, response)
        stream.detach()
        if fields.stream:
            return await _events(gateway, identity, headers=call.headers())
        return _body(reading, call.headers())
    after = ALL_EVENTS if fields.stream else NO_EVENTS
    reading = new_reading(gateway, str(identity), stream, response, after=after, span=call.span)
    if fields.stream:
        return EventStream(reading.events(), close=stream.cancel, headers=call.headers())
    try:
        await while_connected(request, reading.whole())
    finally:
        await stream.cancel()
    if reading.failure is not None:
        raise reading.failure
    return _body(reading, call.headers())


async def count_input_tokens(gateway: Gateway, request: Request) -> Response:
    """Count the tokens of a response's input."""
    fields = await read_fields(gateway, request, ResponseRequest)
    fields.check()
    num_tokens = await while_connected(request, _count_tokens(gateway, fields))
    return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})


async def _count_tokens(gateway: Gateway, fields: ResponseRequest) -> int:
    given = await read_input(gateway, fields)
    return len(await gateway.beside_loop(partial(_encode, gateway, fields, given)))


def _encode(gateway: Gateway, fields: ResponseRequest, given: InputItems) -> Sequence[int]:
    chat = _conversation(fields, given)
    return encode_messages(gateway, chat, read_selection(chat.tools, chat.tool_choice))


async def retrieve_response(gateway: Gateway, request: Request) -> Response:
    """Return a response as it is now, or its events from `starting_after` on."""
    identity, query = parse_response_id(request.path_params["response_id"]), request.query_params
    streams = _one_of(query.get("stream"), "stream", "false", "true") == "true"
    after = _count(query.get("starting_after"), "starting_after", least=0)
    if after is not None and not streams:
        raise invalid("starting_after needs stream = true", param="starting_after")
    if streams:
        return await while_connected(
            request, _events(gateway, identity, after=ALL_EVENTS if after is None else after)
        )
    return _body(await while_connected(request, look(gateway, identity)))


async def cancel_response(gateway: Gateway, request: Request) -> Response:
    """Cancel a response of the background; one that has ended stays as it is."""
    identity = parse_response_id(request.path_params["response_id"])
    reading = await observe(gateway, identity, after=NO_EVENTS)
    if not reading.stored.request.background:
        reading.stream.detach()
        raise invalid(
            "only a response of the background is cancelled: close the connection", param="background"
        )
    await reading.stream.cancel()
    return _body(await look(gateway, identity))


async def delete_response(gateway: Gateway, request: Request) -> Response:
    """Delete a response, and cancel it if it is in progress."""
    identity = parse_response_id(request.path_params["response_id"])

    async def cancel() -> None:
        tenant = gateway.visitor.tenant
        await gateway.upstream.cancel(identity.request, identity.secret, tenant=tenant)

    try:
        await cancel()  # it is kept, if it was in progress
    except UpstreamFailure as failure:
        raise as_not_found(failure) from None
    try:
        await cancel()
    except UpstreamFailure as failure:
        if not isinstance(as_not_found(failure), ApiError):
            raise
    return json_response({"id": str(identity), "object": "response", "deleted": True})


async def list_input_items(gateway: Gateway, request: Request) -> Response:
    """List the items of a response's input."""
    identity = parse_response_id(request.path_params["response_id"])
    reading = await observe(gateway, identity, after=NO_EVENTS)
    reading.stream.detach()
    return await gateway.beside_loop(partial(_listed, reading, request.query_params))


def _listed(reading: ResponseReading, query: QueryParams) -> Response:
    if (items := identified_items(reading)) is None:
        raise not_found()
    if _one_of(query.get("order"), "order", "desc", "asc") == "desc":
        items.reverse()
    limit = _count(query.get("limit"), "limit", least=1) or DEFAULT_LISTED
    if (after := query.get("after")) is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        items = items[places[0] + 1 :] if places else []
    shown = items[: min(limit, MAX_LISTED)]
    ends = (
        {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": "", "last_id": ""}
    )
    listed = {"object": "list", "data": shown, **ends, "has_more": len(shown) < len(items)}
    return Response(to_json(listed), media_type="application/json")


@dataclass(frozen=True, slots=True)
class _Prepared:
    submission: Submission
    response: ReadableResponse


async def _prepare(gateway: Gateway, call: Call, fields: ResponseRequest) -> _Prepared:
    """Render the conversation, and write down what the response is written from. Raises ApiError."""
    given = await read_input(gateway, fields)
    return await gateway.beside_loop(partial(_prepared, gateway, call, fields, given))


def _prepared(gateway: Gateway, call: Call, fields: ResponseRequest, given: InputItems) -> _Prepared:
    submission = prepare(
        gateway,
        _conversation(fields, given),
        max_tokens=fields.max_output_tokens,
        logprobs=fields.top_logprobs or 0 if fields.wants_logprobs else None,
    ).submission
    [(prompt, _)] = submission.prompts
    stored = StoredResponse(
        created=call.created,
        model=call.model,
        prompt_tail=list(prompt[-PROMPT_TAIL_TOKENS:]),
        temperature=submission.sampling.temperature,
        top_p=submission.sampling.top_p if submission.sampling.HasField("top_p") else 1.0,
        request=fields.model_copy(update={"input": given.items}),
    )
    if fields.is_stored:
        keep_s = gateway.config.response_keep_s
        submission = replace(submission, client_state=stored.encode(), keep_s=keep_s)
    return _Prepared(submission, readable(gateway, stored))


async def _events(
    gateway: Gateway,
    identity: ResponseId,
    *,
    after: int = ALL_EVENTS,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Response:
    """Stream events to a client that may leave and come again. Raises ApiError, UpstreamFailure."""
    reading = await observe(gateway, identity, after=after)

    async def leave() -> None:
        reading.stream.detach()

    return EventStream(reading.events(), close=leave, headers=headers)


def _conversation(fields: ResponseRequest, given: InputItems) -> ConversationFields:
    """Return the conversation of a request. Raises ApiError."""
    return fields.chat_fields(chat_messages(fields.instructions, given.items, first=given.num_earlier))


def _body(reading: ResponseReading, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(reading.writer.body()), headers=headers, media_type="application/json")


def _count(text: str | None, name: str, *, least: int) -> int | None:
    if text is None:
        return None
    if (count := parse_digits(text, limit=10**9 - 1)) is None or count < least:
        raise invalid(f"{name} is {text[:20]!r}, must be a number of at least {least}", param=name)
    return count


def _one_of(text: str | None, name: str, *values: str) -> str:
    """The first value is the default. Raises ApiError."""
    if text is not None and text not in values:
        raise invalid(f"{name} is {text[:20]!r}, must be {' or '.join(values)}", param=name)
    return text or values[0]
