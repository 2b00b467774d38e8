"""Ways of hidden states beside the stream, from the previous stage and to the next one: shared memory
where both are on one host, and payload connections.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from stage_worker.backends.hop_memory import HopMemory
from stage_worker.handshake import Epoch
from stageline_rpc.internal.v1 import forward_pb2
from stageline_rpc.v1 import cluster_pb2
from wire.addresses import Address, parse_address
from wire.errors import StepFault, StepFaultKind
from wire.memory_listener import MemoryListener
from wire.payload_memory import MemoryOffer, MemoryReceiver, MemorySender, host_id
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
    """Makes the payload connections of a worker, and knows other ends to which one did not work.

    In epochs that begin within PAYLOAD_RETRY_S after a failure, hidden states travel another way there: a
    blocked port delays one recovery and not each, and a connection that breaks again and again ends one
    epoch and not each.
    """

    def __init__(
        self,
        listener: PayloadListener,
        *,
        memory: MemoryListener | None = None,
        hop_memory: HopMemory | None = None,
        min_bytes: int = MIN_PAYLOAD_BYTES,
        clock: Callable[[], float] = _loop_time,
        transport: Transport = PLAIN,
    ) -> None:
        """Without shared memory, hidden states smaller than `min_bytes` travel over gRPC.

        Memory is shared in both directions, or without `memory` in none. With `hop_memory`, a GPU writes what
        it sends into shared memory, which is page-locked, and hidden states of `min_bytes` or more stay on
        the device where the next stage's can copy them from there.
        """
        self.hop_memory = hop_memory
        self._listener = listener
        self._memory = memory
        self._min_bytes = min_bytes
        self._clock = clock
        self.client_context = transport.client_context
        self._avoided: dict[Address | str, tuple[float, str]] = {}

    def incoming(self) -> IncomingPayloads:
        """The ways from the previous stage in a new epoch."""
        return IncomingPayloads(self._listener, self._memory, min_bytes=self._min_bytes)

    def outgoing(self, epoch: Epoch, next_stage: str) -> OutgoingPayloads:
        """The way to the stage at this address in a new epoch."""
        return OutgoingPayloads(self, epoch, next_stage, min_bytes=self._min_bytes)

    @property
    def shares_memory(self) -> bool:
        """Other workers on this host may share memory with this one."""
        return self._memory is not None and self._memory.is_listening

    def reason_to_avoid(self, end: Address | str) -> str:
        """Why this address, or socket of shared memory, is not tried now; empty if it is."""
        until_s, reason = self._avoided.get(end, (0.0, ""))
        return reason if self._clock() < until_s else ""

    def avoid(self, address: Address, problem: str) -> str:
        """Record and log that the connection did not work; return the reason."""
        reason = f"the payload connection to {address} {problem}"
        log.warning("hidden states travel over gRPC for %g s: %s", PAYLOAD_RETRY_S, reason)
        return self._avoid(address, reason)

    def avoid_memory(self, socket: str, problem: str) -> str:
        """As `avoid`, for shared memory."""
        reason = f"memory shared with the next stage {problem}"
        log.warning("hidden states do not travel in shared memory for %g s: %s", PAYLOAD_RETRY_S, reason)
        return self._avoid(socket, reason)

    def _avoid(self, end: Address | str, reason: str) -> str:
        self._avoided[end] = self._clock() + PAYLOAD_RETRY_S, reason
        return reason


class OutgoingPayloads:
    """The way of one hop and epoch: the first one that the next stage offers and that can be opened."""

    def __init__(
        self, connections: PayloadConnections, epoch: Epoch, next_stage: str, *, min_bytes: int
    ) -> None:
        self._connections = connections
        self._epoch = epoch
        self._host = parse_address(next_stage).host
        self._min_bytes = min_bytes
        self._sender: PayloadSender | None = None
        self._memory: MemorySender | None = None
        self._tried: list[MemorySender | PayloadSender] = []
        self._is_open = self._is_pinned = self._is_on_device = self._is_closed = False
        self._changes: set[asyncio.Task[None]] = set()
        """To a faster way: they end soon after `close`."""
        self.fallback = ""
        """Why large hidden states travel over gRPC in this epoch, although a connection was offered."""
        self.same_host_fallback = ""
        """Why hidden states do not stay on the GPU, or do not travel in shared memory that is page-locked for
        it, if this stage has one, although the next stage is on this host."""

    @property
    def transport(self) -> cluster_pb2.HopTransport.ValueType:
        """How hidden states travel, once it is open: in memory first of the host, soon of the device."""
        if not self._is_open:
            return cluster_pb2.HOP_TRANSPORT_UNSPECIFIED
        if self._memory is not None:
            if self._is_on_device:
                return cluster_pb2.HOP_TRANSPORT_CUDA_IPC
            is_pinned = self._is_pinned
            return (
                cluster_pb2.HOP_TRANSPORT_PINNED_MEMORY
                if is_pinned
                else cluster_pb2.HOP_TRANSPORT_SHARED_MEMORY
            )
        is_connected = self._sender is not None
        return cluster_pb2.HOP_TRANSPORT_TCP if is_connected else cluster_pb2.HOP_TRANSPORT_GRPC

    async def open(self, accepted: forward_pb2.HopAccepted) -> None:
        """Open the best way that is offered; without one, all hidden states belong into frames."""
        if not self._epoch.hidden_states_in_frames:
            await self._open_best(accepted)
        self._is_open = True

    async def send(self, hidden: HiddenStates) -> PayloadNotice | None:
        """Send hidden states; None if they belong into the frame. Raises ConnectionError."""
        if self._memory is not None:
            return await self._memory.send(payload_of(hidden))
        if self._sender is None or sum(tensor.size_bytes for tensor in hidden) < self._min_bytes:
            return None
        return await self._sender.send(payload_of(hidden))

    def note_broken(self, error: ConnectionError) -> None:
        """Record that the connection broke within the epoch."""
        if (memory := self._memory) is not None:
            self._connections.avoid_memory(memory.offer.socket, f"broke: {error}")
        else:
            assert self._sender is not None
            self._connections.avoid(self._sender.address, f"broke: {error}")

    def close(self) -> None:
        """Idempotent."""
        self._is_closed = True
        if self._memory is not None and (hop_memory := self._connections.hop_memory) is not None:
            hop_memory.end_lending(self._memory.lend)
        for end in self._tried:
            end.close()

    async def _open_best(self, accepted: forward_pb2.HopAccepted) -> None:
        if self._connections.shares_memory and accepted.memory.host_id == host_id():
            await self._open_memory(accepted.memory)
        if self._memory is None and accepted.HasField("payloads"):
            await self._open_connection(accepted.payloads)

    async def _open_memory(self, offered: forward_pb2.MemoryOffer) -> None:
        self.same_host_fallback = self._connections.reason_to_avoid(offered.socket)
        if self.same_host_fallback:
            return
        offer = MemoryOffer(offered.host_id, offered.socket, offered.ticket, offered.slot_bytes)
        memory = MemorySender(offer, self._key(offered.ticket))
        self._tried.append(memory)
        try:
            await memory.open()
            self._memory = memory
        except ConnectionError as error:
            problem = f"could not be opened: {error}"
            self.same_host_fallback = self._connections.avoid_memory(offered.socket, problem)
        if self._memory is not None and (hop_memory := self._connections.hop_memory) is not None:
            # Not awaited: to page-lock gigabytes, or to compile a kernel, takes longer than a dial may.
            change = asyncio.create_task(self._speed_up(self._memory, hop_memory))
            self._changes.add(change)
            change.add_done_callback(self._changes.discard)

    async def _speed_up(self, memory: MemorySender, hop_memory: HopMemory) -> None:
        """Let the GPU write into slots of `memory`, then leave hidden states on the device.

        Until then, and if the driver refuses, the host copies hidden states into `memory`. It ends soon after
        `memory` is closed.
        """
        await self._pin(memory, hop_memory)
        # The states of a self-check are kept, too, which needs their bytes on the host.
        if self._is_pinned and hop_memory.shares_device and not self._epoch.is_check:
            await self._share_device(memory, hop_memory)

    async def _pin(self, memory: MemorySender, hop_memory: HopMemory) -> None:
        try:
            await memory.lock(hop_memory)
        except OSError as error:
            self.same_host_fallback = f"memory shared with the next stage is not page-locked: {error}"
            log.warning("hidden states are copied once more: %s", self.same_host_fallback)
            return
        if not self._is_closed:
            hop_memory.lend_by(memory.lend)
            self._is_pinned = True

    async def _share_device(self, memory: MemorySender, hop_memory: HopMemory) -> None:
        try:
            self._is_on_device = await memory.share_device(hop_memory, min_bytes=self._min_bytes)
        except OSError as error:
            if not self._is_closed:
                self.same_host_fallback = f"memory of the GPU is not shared with the next stage: {error}"
                log.warning("hidden states pass the host: %s", self.same_host_fallback)

    async def _open_connection(self, offered: forward_pb2.PayloadOffer) -> None:
        address = Address(offered.host or self._host, offered.port)
        self.fallback = self._connections.reason_to_avoid(address)
        if self.fallback:
            return
        tls = self._connections.client_context()
        sender = PayloadSender(address, self._key(offered.ticket), tls=tls)
        self._tried.append(sender)
        try:
            await sender.open()
            self._sender = sender
        except ConnectionError as error:
            self.fallback = self._connections.avoid(address, f"could not be opened: {error}")

    def _key(self, ticket: bytes) -> PayloadKey:
        return PayloadKey(self._epoch.number, self._epoch.outgoing_secret, ticket)


class IncomingPayloads:
    """Offers ways when the stream is accepted, and takes the payloads that frames name.

    After a fault of a way the worker does not offer it for a while, so that the fault ends one epoch.
    """

    def __init__(
        self, listener: PayloadListener, memory: MemoryListener | None = None, *, min_bytes: int
    ) -> None:
        """No connection is offered where hidden states never reach `min_bytes`."""
        self._listener = listener
        self._memory_listener = memory
        self._min_bytes = min_bytes
        self._receiver: PayloadReceiver | None = None
        self._memory: MemoryReceiver | None = None
        self._inbox: PayloadInbox | None = None
        self.fallback = ""
        """Why large hidden states arrive over gRPC in this epoch, although this worker has a payload port."""

    @property
    def same_host_fallback(self) -> str:
        """Why the GPU does not copy from memory shared with the previous stage; empty if nothing is wrong."""
        return "" if self._memory is None else self._memory.lock_problem

    def expect(self, epoch: Epoch, accepted: forward_pb2.HopAccepted, *, max_bytes: int) -> None:
        """Expect the ways, and write the offers into `accepted`; `max_bytes` is 0 where nothing arrives."""
        if epoch.hidden_states_in_frames:
            return
        if max_bytes and self._memory_listener is not None:
            self._expect_memory(self._memory_listener, epoch, accepted, max_bytes=max_bytes)
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

    def _expect_memory(
        self, listener: MemoryListener, epoch: Epoch, accepted: forward_pb2.HopAccepted, *, max_bytes: int
    ) -> None:
        self._memory = listener.expect(epoch=epoch.number, secret=epoch.incoming_secret, max_bytes=max_bytes)
        if self._memory is not None:
            offer = self._memory.offer
            accepted.memory.host_id, accepted.memory.socket = offer.host_id, offer.socket
            accepted.memory.ticket, accepted.memory.slot_bytes = offer.ticket, offer.slot_bytes

    @property
    def damaged(self) -> asyncio.Future[StepFault] | None:
        """Set when the connection carries what no sender sends; None without an offer."""
        return None if self._inbox is None else self._inbox.damaged

    async def take(self, notice: PayloadNotice) -> ArrivedPayload:
        """The payload that a frame names. Raises StepFault.

        A sender connects only if it has no shared memory, also where its segment arrives after it gave up.
        """
        is_connected = self._receiver is not None and self._receiver.is_open
        if self._memory is not None and self._memory.is_open and not is_connected:
            return await self._take_from_memory(self._memory, notice)
        if self._inbox is None:
            raise StepFault(
                StepFaultKind.UNDECODABLE, "a remote payload, and this stage offered no connection for it"
            )
        try:
            return await self._inbox.take(notice)
        except StepFault:
            self._listener.suspend()
            raise

    async def _take_from_memory(self, memory: MemoryReceiver, notice: PayloadNotice) -> ArrivedPayload:
        assert self._memory_listener is not None
        try:
            return await memory.take(notice)
        except StepFault as fault:
            self._memory_listener.suspend()
            # The frames of a traceback would keep the segment mapped, for as long as the fault is reported.
            raise fault.with_traceback(None) from None

    def note_fault(self, fault: StepFault) -> None:
        """Offer no memory for a while if a step failed by what it found on the previous stage's device."""
        is_on_device = self._memory is not None and self._memory.is_on_device
        if fault.kind is StepFaultKind.CHECKSUM and is_on_device and self._memory_listener is not None:
            self._memory_listener.suspend()

    def _suspend(self, damaged: asyncio.Future[StepFault]) -> None:
        if not damaged.cancelled():
            self._listener.suspend()

    def close(self) -> None:
        """Idempotent."""
        if self._receiver is not None:
            self._listener.forget(self._receiver)
        if self._memory is not None and self._memory_listener is not None:
            self._memory_listener.forget(self._memory)
