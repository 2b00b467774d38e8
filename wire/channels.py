"""gRPC channels and servers with options for long-lived streams, metadata keys, and early writes."""

import asyncio
import logging
import resource
from collections.abc import Callable, Coroutine, Generator, Sequence
from types import coroutine as generator_coroutine
from typing import Any

import grpc

from wire.errors import HandshakeMismatch
from wire.interceptors import ErrorInterceptor, OnRefusal
from wire.peer_limits import PeerLimits

log = logging.getLogger(__name__)

RESERVED = 256
"""File descriptors kept free of client connections: for hops, files, the journal and the dashboard."""


def raise_file_limit() -> int:
    """Raise the process's limit of open files to the hard limit, if allowed; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):
            return soft
    return hard


def max_connections() -> int:
    """Return how many connections a server accepts at once so that `RESERVED` descriptors stay free."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(max(soft - RESERVED, soft // 2), MAX_CONNECTIONS)


ATTACH_SECRET_KEY = "stageline-attach-secret"
"""Metadata key of the secret for Attach and Cancel; Generate accepts a secret and returns it."""
AUTHORIZATION_KEY = "authorization"
"""Metadata key of the operator token, as `Bearer TOKEN`."""
TENANT_KEY = "stageline-tenant"
"""Metadata key of the tenant for which a gateway calls Generate, Attach or Cancel."""
JOURNALLED_KEY = "stageline-journalled"
"""Initial metadata key of a call whose request survives a coordinator restart (Attach continues it)."""
MODEL_KEY = "stageline-model"
"""Initial metadata key of Serve: the fingerprint of the model."""


def when_call_ends(context: grpc.aio.ServicerContext[Any, Any], callback: Callable[[], None]) -> None:
    """Call `callback` once when the call ends: completed, cancelled, deadline passed or connection lost."""
    untyped: Any = context  # the stubs name a callback class that does not exist at run time
    untyped.add_done_callback(lambda _: callback())


PROTOCOL_VERSION = 21
UPGRADE_RULE = "run releases of one protocol version on all hosts (docs/operations.md, versions and upgrades)"


def check_protocol_version(got: int) -> None:
    """Raises HandshakeMismatch for another version. Must precede all other checks of a hello."""
    if got != PROTOCOL_VERSION:
        text = f"protocol version mismatch: expected {PROTOCOL_VERSION}, got {got}: {UPGRADE_RULE}"
        raise HandshakeMismatch("protocol version", expected=PROTOCOL_VERSION, got=got, text=text)


MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_PENDING_CALLS = 32_768
MAX_STREAMS_PER_CONNECTION = 4096
"""Open calls; a client's further ones wait there."""
STREAM_WINDOW_BYTES = 64 * 1024
"""What a client may send of a message before the server reads it; then it may send the whole message."""
MAX_METADATA_BYTES = 8192
MAX_CONNECTIONS = 8192
"""Of a server; fewer where the process may not open that many files."""

# A stream may carry no message for minutes while a model loads, and both ends send pings. Without
# `max_ping_strikes` and `min_ping_interval` the server closes such a connection (GOAWAY too_many_pings).
_SHARED_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_SHARED_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also the least time for an attempt to connect, which a busy peer may need.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    # One connection per channel, so that a stalled hop cannot stall another one.
    ("grpc.use_local_subchannel_pool", 1),
    # Connect directly, even if the environment sets http_proxy.
    ("grpc.enable_http_proxy", 0),
)
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_SHARED_OPTIONS,
    ("grpc.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    # Calls that wait for the event loop. Above gRPC's default of 1,000 it cancels calls at random, without
    # a reason; admission rejects them instead, with a reason and a retry-after hint.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_CALLS),
    # Seconds; by default it cancels calls that wait longer than 30 s. The clients' deadlines end them here.
    ("grpc.server_max_unrequested_time_in_server", 86_400),
    # Close connections without calls; an open stream counts as a call.
    ("grpc.max_connection_idle_ms", 300_000),
    # Close connections that have not agreed on TLS and HTTP/2 by then.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    # Otherwise gRPC also counts calls that have ended for the client, but not yet in this process, and
    # refuses calls of a client that keeps the limit: UNAVAILABLE, without a reason, and uncounted.
    ("grpc.http.overload_protection", 0),
    # Bytes of a call's metadata, 32 more for each entry; above it gRPC refuses with RESOURCE_EXHAUSTED.
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
    # Probing would let each call send 16 MiB that nothing reads; see STREAM_WINDOW_BYTES.
    ("grpc.http2.bdp_probe", 0),
    # No compressed messages: gRPC unpacks them before it looks at their size.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # A second process on the same port must fail to bind instead of sharing the connections.
    ("grpc.so_reuseport", 0),
)


def new_server(
    *,
    authorization: Sequence[grpc.aio.ServerInterceptor] = (),
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    limits: PeerLimits | None = None,
    stream_window_bytes: int = STREAM_WINDOW_BYTES,
    on_refusal: OnRefusal | None = None,
) -> grpc.aio.Server:
    """Return a server that maps `ServingError` to statuses; the caller adds services, binds and starts it.

    `authorization` and `limits` (default: `PeerLimits`) see a call before its message is read; `on_refusal`
    is called with the method and error of each call that its limits or its message end before a servicer.
    """
    options = (
        *SERVER_OPTIONS,
        ("grpc.max_allowed_incoming_connections", max_connections()),
        ("grpc.http2.lookahead_bytes", stream_window_bytes),
    )
    _quiet_grpc()
    errors = ErrorInterceptor(limits or PeerLimits(), on_refusal)
    interceptors = (*authorization, errors, *interceptors)
    return grpc.aio.server(interceptors=interceptors, options=options)


class _OwnErrorsOnly(logging.Filter):
    """Puts what clients cause at debug: calls that end while the server writes to them."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, grpc.aio.InternalError) or isinstance(error, grpc.aio.UsageError):
            return True
        log.debug("gRPC: %s", record.getMessage())
        return False


def _quiet_grpc() -> None:
    logger = logging.getLogger("grpc._cython.cygrpc")
    if not any(isinstance(known, _OwnErrorsOnly) for known in logger.filters):
        logger.addFilter(_OwnErrorsOnly())


class StartedWrite:
    """A write that was handed to gRPC in this turn of the event loop; await it to finish it, once.

    A task would start it behind all callbacks that are due. Python 3.12 has eager tasks for this.
    When the receiver ends the call meanwhile, the error is the one of gRPC's send operation, and the call
    keeps the receiver's status: grpc.aio would replace it with INTERNAL, "Internal error from Core".
    """

    def __init__(self, write: Coroutine[Any, Any, None]) -> None:
        self._write = write
        self._error: Exception | None = None
        try:
            self._waits_for = write.send(None)
        except Exception as error:  # StopIteration: finished without waiting
            self._error = error
        else:
            if asyncio.isfuture(self._waits_for):
                self._waits_for.add_done_callback(_retrieve)

    def __await__(self) -> Generator[Any, Any, None]:
        if self._error is None:
            yield from _resume(self._write, self._waits_for)
        elif not isinstance(self._error, StopIteration):
            raise self._error


MAX_UNWRITTEN = 4


class OrderedWrites:
    """Messages to one call, in order; each is handed to gRPC at once unless an earlier one is unfinished."""

    def __init__(self) -> None:
        self._writes: asyncio.Queue[Any] = asyncio.Queue()
        self._idle_call: Any = None
        self._has_room = asyncio.Event()
        self._has_room.set()

    def put(self, message: Any) -> None:
        call, self._idle_call = self._idle_call, None
        self._writes.put_nowait(message if call is None else StartedWrite(call.write(message)))
        if self._writes.qsize() > MAX_UNWRITTEN:
            self._has_room.clear()

    async def room(self) -> None:
        """Wait until at most `MAX_UNWRITTEN` messages wait."""
        await self._has_room.wait()

    async def run(self, call: Any) -> None:
        """Write until the call ends. Raises AioRpcError with the receiver's status, or InvalidStateError."""
        while True:
            if self._writes.empty():
                self._idle_call = call
            write = await self._writes.get()
            if self._writes.qsize() <= MAX_UNWRITTEN:
                self._has_room.set()
            await finish_write(
                call, write if isinstance(write, StartedWrite) else StartedWrite(call.write(write))
            )


async def finish_write(call: Any, write: StartedWrite) -> None:
    """Finish a write to `call`. Raises AioRpcError with the receiver's status, or InvalidStateError."""
    try:
        await write
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        raise
    except Exception as error:
        raise grpc.aio.AioRpcError(
            await call.code(),
            await call.initial_metadata(),
            await call.trailing_metadata(),
            details=await call.details(),
        ) from error


def _retrieve(done: "asyncio.Future[Any]") -> None:
    """A stream that ends leaves writes that nothing awaits: their errors are not news."""
    if not done.cancelled():
        done.exception()


def _is_error_of(waits_for: Any, error: BaseException) -> bool:
    """Whether the awaited future failed, in contrast to a cancelled wait for it."""
    if not asyncio.isfuture(waits_for) or not waits_for.done() or waits_for.cancelled():
        return False
    return waits_for.exception() is error


@generator_coroutine
def _resume(write: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
    """Wait for the future that a started coroutine waits for, then run the rest of it."""
    try:
        yield waits_for
    except BaseException as error:
        if _is_error_of(waits_for, error):
            write.close()
            raise
        yield from _resume(write, write.throw(error))
    else:
        yield from write
