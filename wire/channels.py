"""Channels, servers and calls with the options that long-lived streams need."""

import resource
import socket
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from wire.addresses import Address, parse_address
from wire.interceptors import ErrorInterceptor

RESERVED = 256
"""Descriptors that connections of callers leave to hops, files, the journal and the dashboard."""


def raise_file_limit() -> int:
    """Raises the limit of this process to the hard one; returns it. Changes nothing where that is refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):
            return soft
    return hard


def max_connections() -> int:
    """Connections that a server accepts at once, so that descriptors are left for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 2**31 - 1
    return max(soft - RESERVED, soft // 2)


ATTACH_SECRET_KEY = "stageline-attach-secret"
"""Metadata of the secret that Attach and Cancel of a request need. A client may send one of its own with
Generate, whose initial metadata has it."""
AUTHORIZATION_KEY = "authorization"
"""Metadata of the operator token, as `Bearer TOKEN`."""
JOURNALLED_KEY = "stageline-journalled"
"""Initial metadata of a call whose request survives the coordinator: Attach finds it at the next one."""


def when_call_ends(context: grpc.aio.ServicerContext[Any, Any], callback: Callable[[], None]) -> None:
    """Calls `callback` once, however the call ends: completed, cancelled, deadline, connection lost."""
    untyped: Any = context  # the stubs ask for a class that does not exist at run time
    untyped.add_done_callback(lambda _: callback())


PROTOCOL_VERSION = 6
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_PENDING_CALLS = 100_000

# A stream may be silent for minutes while a model loads, and both ends ping meanwhile: without
# `max_ping_strikes` and `min_ping_interval` the server answers pings on a silent stream with GOAWAY
# too_many_pings.
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
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Every channel has its own connection: a stalled hop must not stall another through a shared one.
    ("grpc.use_local_subchannel_pool", 1),
    # Addresses are explicit; an http_proxy in the environment is for other traffic.
    ("grpc.enable_http_proxy", 0),
)
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_SHARED_OPTIONS,
    ("grpc.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    # Calls that wait for the event loop. Above 1,000 gRPC would cancel some at random, without a reason:
    # admission refuses them, with a reason and a time to retry.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_CALLS),
    # A connection without a call is closed after a while; an open stream counts as use.
    ("grpc.max_connection_idle_ms", 300_000),
    # A second process on the same port must fail to bind, not share its connections.
    ("grpc.so_reuseport", 0),
)


def client_channel(address: str) -> grpc.aio.Channel:
    """An insecure channel to `address` ("HOST:PORT"); it connects on first use."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def new_server(*, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> grpc.aio.Server:
    """A server whose servicers may raise our exceptions. The caller adds services, binds and starts it."""
    options = (*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", max_connections()))
    return grpc.aio.server(interceptors=(ErrorInterceptor(), *interceptors), options=options)


def bind(server: grpc.aio.Server, address: str) -> int:
    """Binds `address` and returns the port. Raises OSError with one clear line when it cannot be had."""
    _check_free(parse_address(address))
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if port == 0:
        raise OSError(
            f"cannot listen on {address}: the port is in use, or the address is not of this machine"
        )
    return port


def _check_free(address: Address) -> None:
    """gRPC would write lines of its own to stderr, and not tell the caller why."""
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {error.strerror}") from None
    problems = [_bind_problem(family, sockaddr) for family, _, _, _, sockaddr in found]
    # A name with several addresses is served on those that can be had.
    if all(problems):
        raise OSError(f"cannot listen on {address}: {problems[0]}")


def _bind_problem(family: socket.AddressFamily, sockaddr: tuple[Any, ...]) -> str | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(sockaddr)
    except OSError as error:
        return error.strerror
    return None
