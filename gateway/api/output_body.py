"""What completions and chats share in their bodies and events."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.call import Call, Gateway
from gateway.api.sampling import GenerationFields
from gateway.api.sse import DONE, EventStream, frame, while_connected
from gateway.generation import Generation, UsageCounts
from gateway.output import Delta, StopReason
from gateway.rendering import Rendering
from stageline_rpc.v1.inference_pb2 import TokenLogprobs


def usage_body(usage: UsageCounts) -> dict[str, Any]:
    """`usage` of a response; `stageline` is an extension."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "stageline": usage.times_body(),
    }


def chunk_usage(fields: GenerationFields, usage: UsageCounts) -> dict[str, Any]:
    """`usage` of a chunk with output: null before the last chunk has it, unless it is wanted in all."""
    if not fields.includes_usage:
        return {}
    return {"usage": usage_body(usage) if fields.includes_continuous_usage else None}


@dataclass(slots=True)
class ChoiceText:
    """All deltas of a choice together."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: StopReason = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.text_offsets += delta.text_offsets
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class WholeWriter(Protocol):
    """How one API writes a response that is not streamed; called on the text thread."""

    def add(self, delta: Delta) -> None:
        """Add a delta to the response."""

    def whole(self) -> bytes:
        """The response, after all deltas."""


class Writer(WholeWriter, Protocol):
    """How one API writes its output; called on the text thread, except `begin` and `body`.

    A stream calls `begin` and `delta`.
    """

    def begin(self) -> bytes:
        """Events before the first output."""

    def delta(self, delta: Delta) -> bytes | None:
        """The event of a delta, if it has one."""

    def body(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A chunk of a stream, or the whole response."""


async def respond(
    gateway: Gateway,
    request: Request,
    call: Call,
    generation: Generation,
    writer: Writer,
    fields: GenerationFields,
) -> Response:
    """Stream the output, or await it. A client that leaves cancels the request. Raises UpstreamFailure."""
    if fields.stream:
        events = _events(generation, writer, includes_usage=fields.includes_usage)
        return EventStream(events, close=generation.cancel, headers=call.headers())
    return await respond_whole(gateway, request, call, generation, writer)


async def respond_whole(
    gateway: Gateway, request: Request, call: Call, generation: Generation, writer: WholeWriter
) -> Response:
    """Await the output. A client that leaves cancels the request. Raises UpstreamFailure."""
    try:
        await while_connected(request, _collect(generation, writer))
        body = await gateway.visitor_text.run(call.timed(writer.whole))
    finally:
        await generation.cancel()
    return Response(body, headers=call.headers(), media_type="application/json")


async def _collect(generation: Generation, writer: WholeWriter) -> None:
    rendering: Rendering[None] = generation.rendering(writer.add)
    async with aclosing(rendering.portions()) as nothing:
        async for _ in nothing:
            pass


async def _events(
    generation: Generation, writer: Writer, *, includes_usage: bool
) -> AsyncGenerator[bytes | Rendering[bytes], None]:
    if begin := writer.begin():
        yield begin
    yield generation.rendering(writer.delta)
    if includes_usage:
        yield frame(orjson.dumps(writer.body([], usage=usage_body(generation.usage))))
    yield DONE
