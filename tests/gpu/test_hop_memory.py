"""Copies of a GPU into memory that processes share, and from it, without a copy by the host."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest
import torch

from stage_worker.backends.hop_memory import HopMemory
from stage_worker.backends.transfers import StagingRing
from tests.gpu.devices import locks_of, queue_of
from tests.unit.stage_worker.backends.test_hop_memory import LIMIT, SIZES
from tests.unit.wire.payload_hops import DEADLINE_S, MemoryHop, closing, opening, until
from tests.unit.wire.test_payload_memory import passed
from wire.staging import NUM_HOP_SLOTS

pytestmark = pytest.mark.gpu

NUM_ROUNDS = 3 * NUM_HOP_SLOTS


async def test_payloads_go_from_device_to_device_through_page_locked_memory(prepared: torch.device) -> None:
    """Both ends are in one process, which locks each of its two mappings of the same memory."""
    outgoing, incoming = HopMemory(locks_of(prepared)), HopMemory(locks_of(prepared))
    down = StagingRing(queue_of(prepared), SIZES, timeout_s=DEADLINE_S, hops=outgoing)
    up = StagingRing(queue_of(prepared), SIZES.with_input(1 << 16), timeout_s=DEADLINE_S, hops=incoming)
    async with closing(MemoryHop(incoming)) as to, opening(to.sender()) as sender:
        await sender.lock(outgoing)
        await until(lambda: incoming.locked_bytes > 0)
        assert to.receiver.lock_problem == ""
        outgoing.lend_by(sender.lend)
        for number in range(NUM_ROUNDS):
            content = torch.randint(0, 256, (LIMIT,), dtype=torch.uint8, device=prepared)
            transfer = down.begin()
            (data,) = transfer.hand_on([content])
            transfer.download()
            await asyncio.to_thread(transfer.wait)
            assert outgoing.covers(np.frombuffer(data, np.uint8))
            payload = await to.receiver.take(await passed(sender, data))
            array = np.frombuffer(payload.data, np.uint8)
            assert incoming.covers(array)
            arriving = up.begin()
            found = arriving.upload([array])(array)
            assert torch.equal(found, content), number
            arriving.download()
            arriving.wait()
            del payload, array, data, transfer, arriving, found
        await until(lambda: len(sender._free) == NUM_HOP_SLOTS)
        outgoing.end_lending(sender.lend)
    gc.collect()
    await until(lambda: outgoing.locked_bytes == incoming.locked_bytes == 0)
    assert outgoing.stop(timeout_s=DEADLINE_S) and incoming.stop(timeout_s=DEADLINE_S)


async def test_memory_that_the_driver_refuses_is_an_error_of_that_call_alone(prepared: torch.device) -> None:
    if prepared.type == "cpu":
        pytest.skip("the double refuses nothing by itself")
    memory = HopMemory(locks_of(prepared))
    async with closing(MemoryHop()) as to, opening(to.sender()) as sender:
        await sender.lock(memory)
        with pytest.raises(OSError, match=r"cudaHostRegister: .*already"):
            await sender.lock(memory)
        assert torch.ones(4, device=prepared).sum().item() == 4
    gc.collect()
    await until(lambda: memory.locked_bytes == 0)
    assert memory.stop(timeout_s=DEADLINE_S)
