"""A response that is read from the coordinator: its events, its whole, or what there is of it now."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import grpc

from gateway.api.call import Gateway
from gateway.api.conversation import read_rules
from gateway.api.errors import ApiError, api_error
from gateway.api.responses.stored import ResponseId, StoredResponse, decode_stored, not_found
from gateway.api.responses.writer import ALL_EVENTS, NO_EVENTS, ResponseRules, ResponseWriter
from gateway.spans import OutputTimes, RequestSpan
from gateway.upstream.contract import ChoiceEnd, Tokens, TokenStream, UpstreamFailure
from stageline_rpc.v1.inference_pb2 import FINISH_REASON_LENGTH

MAX_NEW_TOKENS = 16
"""More tokens at once belong to a response that was there before its reader."""
_NOT_FOUND = frozenset(
    {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT}
)


def as_not_found(failure: UpstreamFailure) -> Exception:
    """The error of an id that the coordinator does not accept, or the failure itself."""
    return not_found() if failure.status in _NOT_FOUND else failure


@dataclass(slots=True)
class ResponseReading:
    """One reader of a response; `failure` is what ended it, if it did not end by itself."""

    gateway: Gateway
    stream: TokenStream
    stored: StoredResponse
    writer: ResponseWriter
    span: RequestSpan | None = None
    failure: UpstreamFailure | None = None

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events as they come."""
        if begin := self.writer.begin():
            yield begin
        async with aclosing(self._portions()) as portions:
            async for portion in portions:
                yield portion
        if (failure := self.failure) is not None:
            if failure.may_continue:
                yield self.writer.interruption(api_error(failure).body)
            elif event := self.writer.fail(failure):
                yield event

    async def whole(self) -> None:
        """Read to the end. Raises UpstreamFailure if the response may have no end yet."""
        async for _ in self._portions():
            pass
        self._end()

    async def look(self) -> None:
        """Read what there was when the stream attached. Raises UpstreamFailure."""
        found = self.stream.found
        if found.has_ended:
            await self.whole()
        elif found.num_tokens:
            async for _ in self._portions(num_tokens=found.num_tokens):
                pass
            self._end()

    def _end(self) -> None:
        if self.failure is None:
            return
        if self.failure.may_continue:
            raise self.failure
        self.writer.fail(self.failure)

    async def _portions(self, *, num_tokens: int | None = None) -> AsyncGenerator[bytes, None]:
        """Yield the events of what arrives; after `num_tokens`, nothing more is awaited."""
        writer, times = self.writer, self._times
        try:
            async for item in self.stream:
                portion = b""
                if isinstance(item, Tokens):
                    # What was there before would keep the text of live streams waiting.
                    is_old = len(item.token_ids) > MAX_NEW_TOKENS
                    push = partial(writer.push, item.token_ids, item.logprobs)
                    portion = await self._run(push, is_old=is_old)
                elif isinstance(item, ChoiceEnd):
                    is_cut = item.finish_reason == FINISH_REASON_LENGTH
                    portion = await self._run(partial(writer.end, is_cut=is_cut, usage=item.usage))
                if portion:
                    if times is not None:
                        times.output()
                    yield portion
                if num_tokens is not None and writer.num_tokens >= num_tokens:
                    return
        except UpstreamFailure as failure:
            self.failure = failure
            if self.span is not None:
                error = api_error(failure)
                self.span.failed(error.status, error.body["code"], str(error))

    @property
    def _times(self) -> OutputTimes | None:
        return None if self.span is None else self.span.output

    def _run(self, work: Callable[[], bytes], *, is_old: bool = False) -> Awaitable[bytes]:
        """Run work of the text thread, or beside it."""
        run = self.gateway.beside_loop if is_old else self.gateway.visitor_text.run
        return run(work if (times := self._times) is None else times.timed(work))


async def observe(gateway: Gateway, identity: ResponseId, *, after: int = ALL_EVENTS) -> ResponseReading:
    """Begin to read a response that this or another gateway submitted. Raises ApiError, UpstreamFailure."""
    try:
        stream = await gateway.upstream.observe(
            identity.request, identity.secret, owner=gateway.visitor.owner
        )
    except UpstreamFailure as failure:
        raise as_not_found(failure) from None

    def read() -> ResponseReading:
        known = readable(gateway, decode_stored(stream.client_state))
        return new_reading(gateway, str(identity), stream, known, after=after)

    try:
        return await gateway.beside_loop(read)
    except BaseException as error:
        stream.detach()
        if isinstance(error, ApiError | ValueError):  # no gateway has checked what a client of gRPC wrote
            raise not_found() from None
        raise


@dataclass(frozen=True, slots=True)
class ReadableResponse:
    """A response that is stored, or will be, and how its tokens are read."""

    stored: StoredResponse
    rules: ResponseRules


def readable(gateway: Gateway, stored: StoredResponse) -> ReadableResponse:
    """Slow work, for `Gateway.beside_loop`. Raises ApiError."""
    rules = read_rules(gateway, stored.request.chat_fields(()), stored.prompt_tail)
    return ReadableResponse(stored, ResponseRules(*rules))


def new_reading(
    gateway: Gateway,
    identity: str,
    stream: TokenStream,
    response: ReadableResponse,
    *,
    after: int = ALL_EVENTS,
    span: RequestSpan | None = None,
) -> ResponseReading:
    """Return a reader; `span` belongs to the request that created the response."""
    writer = ResponseWriter(identity, response.stored, response.rules, gateway.logprobs, after=after)
    return ResponseReading(gateway, stream, response.stored, writer, span)


async def look(gateway: Gateway, identity: ResponseId) -> ResponseReading:
    """Read what there is of a response now. Raises ApiError, UpstreamFailure."""
    reading = await observe(gateway, identity, after=NO_EVENTS)
    try:
        await reading.look()
    finally:
        reading.stream.detach()
    return reading
