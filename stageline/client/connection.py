"""Connection to a coordinator, its errors, and attach secrets."""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import grpc.aio

from stageline.client.errors import (
    SUSPENDED,
    Cancelled,
    InvalidRequest,
    StatusDetails,
    Unavailable,
    from_rpc_error,
)
from wire.addresses import parse_peer_address
from wire.channels import JOURNALLED_KEY
from wire.transport import PLAIN, RenewedChannel, Transport
from wire.unreachable import unreachable_cause

MAX_REMEMBERED = 4096


def new_attach_secret() -> str:
    """Create a random secret: 43 characters of base64url."""
    return secrets.token_urlsafe(32)


class AttachSecrets:
    """Attach secrets of one client's last requests, by request id."""

    def __init__(self) -> None:
        self._secrets: OrderedDict[str, str] = OrderedDict()

    def remember(self, request_id: str, secret: str) -> None:
        """Store a secret; drops the oldest one at the limit."""
        self._secrets[request_id] = secret
        while len(self._secrets) > MAX_REMEMBERED:
            self._secrets.popitem(last=False)

    def of(self, request_id: str, given: str | None) -> str:
        """Return `given`, or the secret of this client's request. Raises InvalidRequest without either."""
        secret = given or self._secrets.get(request_id)
        if secret is None:
            raise InvalidRequest(f"request {request_id} was not sent by this client: pass its secret")
        return secret


CLOSED = "the client was closed during the call"

_Response = TypeVar("_Response")


class Connection:
    """One channel to `address` (HOST:PORT), between `open` and `close`."""

    def __init__(self, address: str, transport: Transport = PLAIN) -> None:
        self.address, self._transport = str(parse_peer_address(address)), transport
        self._channel: RenewedChannel | None = None
        self._readiness: _Readiness | None = None

    def open(self) -> None:
        """Create the channel; it connects at first use."""
        self._channel = RenewedChannel(self._transport, self.address)

    async def close(self) -> None:
        """End every call, and every wait for the coordinator."""
        channel, self._channel = self._channel, None
        if self._readiness is not None:  # gRPC would continue to wait
            self._readiness.cancel()
        if channel is not None:
            await channel.close()

    @property
    def is_open(self) -> bool:
        return self._channel is not None

    async def ready(self, timeout_s: float) -> grpc.aio.Channel:
        """Return the channel once connected. Raises Unavailable, or Cancelled when closed."""
        if self._channel is None:
            raise RuntimeError("the client is not open: use it as `async with Client(address) as client:`")
        channel = self._channel.current()
        if self._readiness is None or self._readiness.channel is not channel:
            self._readiness = _Readiness(channel)
        with typed_errors():
            if not await self._readiness.wait(timeout_s):
                cause = await unreachable_cause(self.address, self._transport)
                raise Unavailable(f"no coordinator at {self.address} within {timeout_s:g} s: {cause}")
        return channel


class _Readiness:
    """Waits of any number of calls for one channel, which is watched once for all of them."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._watch: asyncio.Future[None] | None = None
        self._num_waiting = 0

    async def wait(self, timeout_s: float) -> bool:
        """Whether the channel is connected. Raises CancelledError after `cancel`."""
        if self._is_connected:
            return True
        if self._watch is None:
            self._watch = asyncio.ensure_future(self.channel.channel_ready())
        watch = self._watch
        self._num_waiting += 1
        try:
            await asyncio.wait([watch], timeout=timeout_s)
            # The timeout may pass while the event loop is busy and the connection is made in the background.
            return (watch.done() and watch.result() is None) or self._is_connected
        finally:
            self._num_waiting -= 1
            if self._num_waiting == 0:
                self.cancel()

    def cancel(self) -> None:
        """End all waits."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()

    @property
    def _is_connected(self) -> bool:
        return self.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY


@contextmanager
def typed_errors() -> Iterator[None]:
    """Convert gRPC errors to errors of the StagelineError tree."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    except asyncio.CancelledError:
        if _is_task_cancelled():
            raise
        raise Cancelled(CLOSED) from None


async def answer(call: Awaitable[_Response]) -> _Response:
    """Return the response of a unary call."""
    with typed_errors():
        return await call


def is_connection_loss(error: grpc.aio.AioRpcError) -> bool:
    """Whether a lost connection may have ended the call, not the coordinator.

    gRPC then creates a status, always without details: UNAVAILABLE for a lost connection, CANCELLED for a
    call that reached a stopping server, others for a stream reset (by a proxy). A coordinator's own
    UNAVAILABLE without details is indistinguishable. A coordinator that stops and leaves the request to
    the next one counts as lost.
    """
    details = StatusDetails.of(error)
    if details.is_present:
        return details.reason == SUSPENDED
    return _is_made_up(error.code(), error.details() or "")


def _is_made_up(code: grpc.StatusCode, text: str) -> bool:
    if code == grpc.StatusCode.CANCELLED and text == "CANCELLED":
        return True
    return code == grpc.StatusCode.UNAVAILABLE or "RST_STREAM" in text


def is_journalled(error: grpc.aio.AioRpcError) -> bool:
    """Whether the coordinator reported that the request is in its journal."""
    return any(key == JOURNALLED_KEY for key, _ in error.initial_metadata() or ())


def _is_task_cancelled() -> bool:
    # Closing the channel during a call also raises CancelledError, in a task that was not cancelled.
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
