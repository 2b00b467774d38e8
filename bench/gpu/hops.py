"""Hops between two stages on one device, each way, without the frame: from hidden states to hidden states.

Both ends are in one process, as a stage has them: with rings of their own, and page locks of their own. The
driver opens no handle in the process that made it: there, memory of the device is used as it is.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from checkpoint import BoundaryTensor
from checkpoint.boundary import HIDDEN_STATES
from stage_worker.backends.contract import KernelChoice
from stage_worker.backends.cuda_runtime import CudaMappings
from stage_worker.backends.hop_memory import HopMemory
from stage_worker.backends.tensor_views import from_frame, payload, to_frame
from stage_worker.backends.transfers import (
    CudaPageLocks,
    CudaQueue,
    HostTransfers,
    StagingRing,
    StepTransfers,
)
from stage_worker.model.checksums import Checksum, checksum_of
from stage_worker.model.kernels import has_triton_kernels
from wire.addresses import Address
from wire.memory_listener import MemoryListener
from wire.payload_memory import MemorySender
from wire.payload_sockets import PayloadListener, PayloadSender
from wire.payloads import ArrivedPayload, PayloadNotice
from wire.peer_secrets import RefusedPeers
from wire.staging import StagingSizes
from wire.tensors import HiddenStates, TensorView, WireDType, payload_of

IPC, PINNED, SHARED, TCP = WAYS = ("CUDA IPC", "pinned memory", "shared memory", "tcp")
OF_GPUS = IPC, PINNED
TIMEOUT_S = 30.0
_SECRET = bytes(32)
_ROOM_BYTES = 1 << 16
"""Of a ring beside hidden states."""


@dataclass(frozen=True, slots=True)
class HopWay:
    """Transfers of the stage before and of the stage behind, and what moves a payload between them."""

    down: StepTransfers
    up: StepTransfers
    send: Callable[[memoryview], Awaitable[PayloadNotice | None]]
    take: Callable[[PayloadNotice], Awaitable[ArrivedPayload]]

    async def pass_on(self, hidden: Tensor, dtype: WireDType) -> Tensor:
        """Hidden states [n, width] as the stage behind computes with them, when they are there."""
        boundary = (BoundaryTensor(name=HIDDEN_STATES, width=hidden.shape[1]),)
        transfer = self.down.begin()
        left = to_frame([hidden], boundary, dtype, transfer.hand_on)
        transfer.download()
        await asyncio.to_thread(transfer.wait)
        del transfer
        notice = await self.send(payload_of(left))
        assert notice is not None, "a payload within the limit"
        arrived = await self.take(notice)
        return self._entered((_with_data(left[0], arrived),), boundary, hidden.dtype)

    def _entered(
        self, arrived: HiddenStates, boundary: tuple[BoundaryTensor, ...], dtype: torch.dtype
    ) -> Tensor:
        inputs = [payload(view) for view in arrived]
        transfer = self.up.begin()
        place = transfer.upload(inputs)
        (entered,) = from_frame(arrived, [place(array) for array in inputs], boundary, dtype)
        transfer.fetch(entered[:1, :1])  # its arrival is the end of the hop
        transfer.download()
        transfer.wait()
        return entered


def _with_data(view: TensorView, arrived: ArrivedPayload) -> TensorView:
    return TensorView(view.dtype, view.shape, memoryview(arrived.data), view.name)


async def hop_s(way: str, hidden: Tensor, dtype: WireDType, *, rounds: int) -> float:
    """Least seconds of a hop of `hidden` [n, width] by a way of `WAYS`. Raises OSError where it cannot be."""
    max_bytes = hidden.numel() * 4
    least = float("inf")
    async with _opened(way, hidden.device, max_bytes) as hop:
        for _ in range(rounds + 1):  # the first one takes memory
            began_s = time.perf_counter()
            found = await hop.pass_on(hidden, dtype)
            least = min(least, time.perf_counter() - began_s)
            assert torch.equal(found, hidden), f"other hidden states by {way}"
            del found
    gc.collect()
    return least


@asynccontextmanager
async def _opened(way: str, device: torch.device, max_bytes: int) -> AsyncIterator[HopWay]:
    async with AsyncExitStack() as stack:
        locks = [_hop_memory(stack, device) if way in OF_GPUS else None for _ in range(2)]
        down, up = (_transfers(device, max_bytes, hops) for hops in locks)
        refused = RefusedPeers(time.monotonic)
        if way == TCP:
            connections = PayloadListener(refused)
            connections.listen(Address("127.0.0.1", 0))
            stack.callback(connections.close)
            expected = connections.expect(epoch=1, secret=_SECRET, max_bytes=max_bytes)
            assert expected is not None, "it listens"
            stack.callback(connections.forget, expected)
            address = Address("127.0.0.1", expected.offer.port)
            connection = PayloadSender(address, expected.key)
            stack.callback(connection.close)
            await connection.open()
            yield HopWay(down, up, connection.send, expected.inbox.take)
            return
        outgoing, incoming = locks
        memory = MemoryListener(refused, incoming, incoming)
        memory.listen()
        stack.callback(memory.close)
        receiver = memory.expect(epoch=1, secret=_SECRET, max_bytes=max_bytes)
        assert receiver is not None, "it listens"
        stack.callback(memory.forget, receiver)
        sender = MemorySender(receiver.offer, receiver.key)
        stack.callback(sender.close)
        await sender.open()
        if outgoing is not None and incoming is not None:
            await _lock(sender, outgoing, incoming)
        if outgoing is not None and way == IPC:
            await sender.share_device(outgoing, min_bytes=1)
        yield HopWay(down, up, sender.send, receiver.take)


async def _lock(sender: MemorySender, outgoing: HopMemory, incoming: HopMemory) -> None:
    """Raises OSError, also if the receiver's end is not locked in time."""
    await sender.lock(outgoing)
    outgoing.lend_by(sender.lend)
    async with asyncio.timeout(TIMEOUT_S):
        while not incoming.locked_bytes:
            await asyncio.sleep(0.001)


class OwnMappings(CudaMappings):
    """Opens handles of its own process."""

    _addresses: ClassVar[dict[bytes, int]] = {}

    def export(self, address: int) -> bytes:
        handle = super().export(address)
        self._addresses[handle] = address
        return handle

    def open(self, handle: bytes) -> int:
        return self._addresses.pop(handle)

    def close(self, address: int) -> None:
        pass


def _hop_memory(stack: AsyncExitStack, device: torch.device) -> HopMemory:
    memory = HopMemory(CudaPageLocks(device), OwnMappings(device, _checksum(device)))
    stack.callback(memory.stop, timeout_s=TIMEOUT_S)
    return memory


def _transfers(device: torch.device, max_bytes: int, hops: HopMemory | None) -> StepTransfers:
    if device.type == "cpu":
        return HostTransfers()
    room = max_bytes + _ROOM_BYTES
    sizes = StagingSizes(input_bytes=room, output_bytes=room)
    return StagingRing(CudaQueue(device), sizes, timeout_s=TIMEOUT_S, hops=hops, checksum=_checksum(device))


def _checksum(device: torch.device) -> Checksum:
    return checksum_of(has_triton=has_triton_kernels(KernelChoice.AUTO, device))
