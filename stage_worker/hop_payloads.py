"""Payload connections of a stage: from the previous stage, and to the next one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from stage_worker.handshake import Epoch
from stageline_rpc.internal.v1 import forward_pb2
from wire.addresses import Address, parse_address
from wire.errors import StepFault, StepFaultKind
from wire.payload_sockets import PayloadListener, PayloadReceiver, PayloadSender
from wire.payloads import (
    MIN_PAYLOAD_BYTES,
    PAYLOAD_RETRY_S,
    ArrivedPayload,
    PayloadInbox,
    PayloadKey,
    PayloadNotice,
)
from wire.tensors import HiddenStates, payload_of
from wire.transport import PLAIN, Transport

log = logging.getLogger(__name__)


def _loop_time() -> float:
    return asyncio.get_running_loop().time()


class PayloadConnections:
    """Makes the payload connections of a worker, and knows addresses to which one did not work.

    In epochs that begin within PAYLOAD_RETRY_S after a failure, hidden states travel over gRPC there: a
    blocked port delays one recovery and not each, and a connection that breaks again and again ends one
    epoch and not each.
    """

    def __init__(
        self,
        listener: PayloadListener,
        *,
        min_bytes: int = MIN_PAYLOAD_BYTES,
        clock: Callable[[], float] = _loop_time,
        transport: Transport = PLAIN,
    ) -> None:
        """Hidden states smaller than `min_bytes` travel over gRPC."""
        self._listener = listener
        self._min_bytes = min_bytes
        self._clock = clock
        self.client_context = transport.client_context
        self._avoided: dict[Address, tuple[float, str]] = {}

    def incoming(self) -> IncomingPayloads:
        """The connection from the previous stage in a new epoch."""
        return IncomingPayloads(self._listener, min_bytes=self._min_bytes)

    def outgoing(self, epoch: Epoch, next_stage: str) -> OutgoingPayloads:
        """The connection to the stage at this address in a new epoch."""
        return OutgoingPayloads(self, epoch, next_stage, min_bytes=self._min_bytes)

    def reason_to_avoid(self, address: Address) -> str:
        """Why this address is not dialled now; empty if it is."""
        until_s, reason = self._avoided.get(address, (0.0, ""))
        return reason if self._clock() < until_s else ""

    def avoid(self, address: Address, problem: str) -> str:
        """Record and log that the connection did not work; return the reason."""
        reason = f"the payload connection to {address} {problem}"
        self._avoided[address] = self._clock() + PAYLOAD_RETRY_S, reason
        log.warning("hidden states travel over gRPC for %g s: %s", PAYLOAD_RETRY_S, reason)
        return reason


class OutgoingPayloads:
    """The payload connection of one hop and epoch, if the next stage offers one and it can be opened."""

    def __init__(
        self, connections: PayloadConnections, epoch: Epoch, next_stage: str, *, min_bytes: int
    ) -> None:
        self._connections = connections
        self._epoch = epoch
        self._host = parse_address(next_stage).host
        self._min_bytes = min_bytes
        self._sender: PayloadSender | None = None
        self._is_open = False
        self.fallback = ""
        """Why large hidden states travel over gRPC in this epoch, although a connection was offered."""

    async def open(self, accepted: forward_pb2.HopAccepted) -> None:
        """Open the offered connection; without one, all hidden states belong into frames."""
        if not accepted.HasField("payloads"):
            return
        offer = accepted.payloads
        address = Address(offer.host or self._host, offer.port)
        self.fallback = self._connections.reason_to_avoid(address)
        if self.fallback:
            return
        self._sender = PayloadSender(
            address,
            PayloadKey(self._epoch.number, self._epoch.outgoing_secret, offer.ticket),
            tls=self._connections.client_context(),
        )
        try:
            await self._sender.open()
            self._is_open = True
        except ConnectionError as error:
            self.fallback = self._connections.avoid(address, f"could not be opened: {error}")

    async def send(self, hidden: HiddenStates) -> PayloadNotice | None:
        """Send large hidden states; None if they belong into the frame. Raises ConnectionError."""
        if not self._is_open or sum(tensor.size_bytes for tensor in hidden) < self._min_bytes:
            return None
        assert self._sender is not None
        return await self._sender.send(payload_of(hidden))

    def note_broken(self, error: ConnectionError) -> None:
        """Record that the connection broke within the epoch."""
        assert self._sender is not None
        self._connections.avoid(self._sender.address, f"broke: {error}")

    def close(self) -> None:
        """Idempotent."""
        if self._sender is not None:
            self._sender.close()


class IncomingPayloads:
    """Offers a connection when the stream is accepted, and takes the payloads that frames name.

    After a fault of the connection the worker offers none for a while, so that the fault ends one epoch.
    """

    def __init__(self, listener: PayloadListener, *, min_bytes: int) -> None:
        """Nothing is offered where hidden states never reach `min_bytes`."""
        self._listener = listener
        self._min_bytes = min_bytes
        self._receiver: PayloadReceiver | None = None
        self._inbox: PayloadInbox | None = None
        self.fallback = ""
        """Why large hidden states arrive over gRPC in this epoch, although this worker has a payload port."""

    def expect(self, epoch: Epoch, accepted: forward_pb2.HopAccepted, *, max_bytes: int) -> None:
        """Expect a connection, and write the offer into `accepted`."""
        if max_bytes < self._min_bytes:
            return
        self._receiver = self._listener.expect(
            epoch=epoch.number, secret=epoch.incoming_secret, max_bytes=max_bytes
        )
        self.fallback = self._listener.reason_to_wait
        if self._receiver is not None:
            inbox, offer = self._receiver.inbox, self._receiver.offer
            inbox.damaged.add_done_callback(self._suspend)
            self._inbox = inbox
            accepted.payloads.host, accepted.payloads.port = offer.host, offer.port
            accepted.payloads.ticket = offer.ticket

    @property
    def damaged(self) -> asyncio.Future[StepFault] | None:
        """Set when the connection carries what no sender sends; None without an offer."""
        return None if self._inbox is None else self._inbox.damaged

    async def take(self, notice: PayloadNotice) -> ArrivedPayload:
        """The payload that a frame names. Raises StepFault."""
        if self._inbox is None:
            raise StepFault(
                StepFaultKind.UNDECODABLE, "a remote payload, and this stage offered no connection for it"
            )
        try:
            return await self._inbox.take(notice)
        except StepFault:
            self._listener.suspend()
            raise

    def _suspend(self, damaged: asyncio.Future[StepFault]) -> None:
        if not damaged.cancelled():
            self._listener.suspend()

    def close(self) -> None:
        """Idempotent."""
        if self._receiver is not None:
            self._listener.forget(self._receiver)
