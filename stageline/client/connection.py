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
from wire.channels import JOURNALLED_KEY, client_channel

MAX_REMEMBERED = 4096


def new_attach_secret() -> str:
    """An unguessable secret: 43 characters of base64url."""
    return secrets.token_urlsafe(32)


class AttachSecrets:
    """Those of the last requests of one client, by request id."""

    def __init__(self) -> None:
        self._secrets: OrderedDict[str, str] = OrderedDict()

    def remember(self, request_id: str, secret: str) -> None:
        """The oldest one is forgotten when there are too many."""
        self._secrets[request_id] = secret
        while len(self._secrets) > MAX_REMEMBERED:
            self._secrets.popitem(last=False)

    def of(self, request_id: str, given: str | None) -> str:
        """`given`, or that of a request which this client has sent. Raises InvalidRequest without either."""
        secret = given or self._secrets.get(request_id)
        if secret is None:
            raise InvalidRequest(f"request {request_id} was not sent by this client: give its secret")
        return secret


CLOSED = "the client was closed during the call"

_Response = TypeVar("_Response")


class Connection:
    """One channel to `address` (HOST:PORT), between `open` and `close`."""

    def __init__(self, address: str) -> None:
        self.address = str(parse_peer_address(address))
        self._channel: grpc.aio.Channel | None = None
        self._waiting: set[asyncio.Future[None]] = set()

    def open(self) -> None:
        """Connects when it is first used."""
        self._channel = client_channel(self.address)

    async def close(self) -> None:
        """Ends every call, and every wait for the coordinator."""
        channel, self._channel = self._channel, None
        for wait in self._waiting:  # gRPC would let them wait on
            wait.cancel()
        if channel is not None:
            await channel.close()

    @property
    def is_open(self) -> bool:
        return self._channel is not None

    async def ready(self, timeout_s: float) -> grpc.aio.Channel:
        """The channel, once it is connected. Raises Unavailable, or Cancelled when `close` comes first."""
        if self._channel is None:
            raise RuntimeError("the client is not open: use it as `async with Client(address) as client:`")
        channel = self._channel
        wait = asyncio.ensure_future(channel.channel_ready())
        self._waiting.add(wait)
        try:
            with typed_errors():
                async with asyncio.timeout(timeout_s):
                    await wait
        except TimeoutError:
            raise Unavailable(f"no coordinator at {self.address} within {timeout_s:g} s") from None
        finally:
            self._waiting.discard(wait)
        return channel


@contextmanager
def typed_errors() -> Iterator[None]:
    """Turns what gRPC raises into errors of the StagelineError tree."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    except asyncio.CancelledError:
        if _is_task_cancelled():
            raise
        raise Cancelled(CLOSED) from None


async def answer(call: Awaitable[_Response]) -> _Response:
    """The answer of a unary call."""
    with typed_errors():
        return await call


def is_connection_loss(error: grpc.aio.AioRpcError) -> bool:
    """Whether the connection may have ended the call, and not the coordinator.

    gRPC makes up a status then, never with details: UNAVAILABLE for a connection that is lost, CANCELLED for
    a call that reached a server just when it ended, several others for a stream that was reset (by a proxy in
    between). A coordinator's own UNAVAILABLE without details looks the same. One that stops and leaves the
    request to the next one is as good as lost.
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
    """Whether the coordinator had said that the request would survive it."""
    return any(key == JOURNALLED_KEY for key, _ in error.initial_metadata() or ())


def _is_task_cancelled() -> bool:
    # Closing the channel under a call raises CancelledError too, in a task that nobody cancelled.
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
