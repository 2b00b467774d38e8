"""Server-sent events: frames, keep-alive comments, and streams that end with their client."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.api.errors import ApiError, api_error, error_body
from gateway.rendering import Rendering
from gateway.spans import span_of
from web.direct_chunks import EXTENSION, DirectChunks

KEEP_ALIVE_S = 15.0
DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
_Result = TypeVar("_Result")


class ClientGone(Exception):
    """The client has closed the connection."""


def frame(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def error_event(error: ApiError) -> bytes:
    return frame(orjson.dumps(error_body(error)))


def note_failure(scope: Scope, error: ApiError) -> None:
    """Note for the request's span that its response is an error, or ends with one."""
    if (span := span_of(scope)) is not None:
        span.failed(error.status, error.body["code"], str(error))


def note_departure(scope: Scope) -> None:
    """Note for the request's span that its client has closed the connection."""
    if (span := span_of(scope)) is not None:
        span.left()


class EventStream(Response):
    """Sends `events` and what renderings among them yield; calls `close` at the end, or if the client leaves.

    An error is sent as the last event: without `[DONE]`, so that no client takes the output for complete.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes | Rendering[bytes], None],
        *,
        close: Callable[[], Coroutine[Any, Any, None]],
        headers: Mapping[str, str],
        write_error: Callable[[ApiError], bytes] = error_event,
    ) -> None:
        super().__init__(headers={**headers, **_HEADERS})
        del self.headers["content-length"]
        self._events, self._close, self._write_error = events, close, write_error
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await until_disconnect(receive, self._send_events(scope, send))
        except ClientGone:
            note_departure(scope)
        finally:
            await self._close()  # also where the generator never began

    async def _send_events(self, scope: Scope, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        self._sent_s = clock()
        keep_alive = asyncio.create_task(self._keep_alive(send))
        try:
            async with contextlib.aclosing(self._events):
                async for event in self._events:
                    if isinstance(event, Rendering):
                        await self._send_rendering(event, scope, send)
                        continue
                    self._sent_s = clock()
                    await _send_part(send, event)
        except Exception as error:
            failure = api_error(error)
            note_failure(scope, failure)
            await _send_part(send, self._write_error(failure))
        finally:
            keep_alive.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_rendering(self, rendering: Rendering[bytes], scope: Scope, send: Send) -> None:
        """One write per portion, without a turn of this task where the server offers that."""
        clock = asyncio.get_running_loop().time
        direct: DirectChunks | None = scope.get("extensions", {}).get(EXTENSION)
        if direct is not None:
            write = direct.write

            def put(portion: list[bytes]) -> bool:
                self._sent_s = clock()
                return write(b"".join(portion))

            await rendering.deliver(put, direct.drain)
            return
        async with contextlib.aclosing(rendering.portions()) as portions:
            async for portion in portions:
                self._sent_s = clock()
                await _send_part(send, b"".join(portion))

    async def _keep_alive(self, send: Send) -> None:
        """Send a comment, which clients skip, after each silence: proxies close idle connections."""
        clock = asyncio.get_running_loop().time
        while True:
            silence_s = clock() - self._sent_s
            if silence_s >= KEEP_ALIVE_S:
                self._sent_s = clock()
                await _send_part(send, _KEEP_ALIVE)
            else:
                await asyncio.sleep(KEEP_ALIVE_S - silence_s)


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run `work`; cancel it and raise ClientGone when the client leaves. The body has been read."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, watcher):
            one.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """`until_disconnect` for a request whose body has been read."""
    return await until_disconnect(request.receive, work)
