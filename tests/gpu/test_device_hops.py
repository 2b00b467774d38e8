"""Hidden states that stay on a GPU: between two rings of this process, and memory of another process."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial

import numpy as np
import pytest
import torch

from stage_worker.backends.cuda_runtime import CudaMappings, device_runtime
from stage_worker.backends.hop_memory import HopMemory
from stage_worker.backends.transfers import StagingRing
from tests.gpu.devices import checksum_on, locks_of, mappings_of, queue_of
from tests.host_checksum import host_checksum
from tests.unit.stage_worker.backends.test_hop_memory import LIMIT, SIZES
from tests.unit.wire.payload_hops import DEADLINE_S, MemoryHop, closing, opening, until
from tests.unit.wire.test_payload_memory import passed
from wire.errors import StepFault, StepFaultKind
from wire.payload_memory import MemorySender
from wire.shared_segment import DeviceCard
from wire.staging import NUM_HOP_SLOTS, StagingSizes

pytestmark = pytest.mark.gpu

NUM_ROUNDS = 3 * NUM_HOP_SLOTS
OTHER_DEADLINE_S = 120.0
SLOT_BYTES = 1 << 20
_OUT = StagingSizes(input_bytes=LIMIT, output_bytes=LIMIT + 256)
_IN = SIZES.with_input(1 << 16)

_OTHER_PROCESS = """
import json, os, sys, torch
from stage_worker.backends.cuda_runtime import CudaMappings
from stage_worker.backends.torch_device import prepare_thread
from stage_worker.model.checksums import plain_checksum
device = torch.device("cuda:0")
prepare_thread(device)
mappings = CudaMappings(device, plain_checksum)
if sys.argv[1] == "export":
    address = mappings.allocate(int(sys.argv[2]))
    proof, handle = mappings.write_proof(address), mappings.export(address)
    torch.cuda.synchronize()
    print(json.dumps([handle.hex(), proof]), flush=True)
else:
    print(json.dumps([mappings.read_proof(mappings.open(bytes.fromhex(sys.argv[2])))]), flush=True)
sys.stdin.read()
"""


class Both:
    """Both ends of a hop, each with a ring of its own."""

    def __init__(self, device: torch.device) -> None:
        mappings, checksum = mappings_of(device), checksum_on(device)
        self.outgoing, self.incoming = (HopMemory(locks_of(device), mappings) for _ in range(2))
        ring = partial(StagingRing, timeout_s=DEADLINE_S, checksum=checksum)
        self.down = ring(queue_of(device), _OUT, hops=self.outgoing)
        self.up = ring(queue_of(device), _IN, hops=self.incoming)

    async def left(self, sender: MemorySender, content: torch.Tensor) -> memoryview:
        transfer = self.down.begin()
        (data,) = transfer.hand_on([content])
        transfer.download()
        await asyncio.to_thread(transfer.wait)
        assert self.outgoing.place_of(np.frombuffer(data, np.uint8)) is not None
        return data

    def taken(self, data: memoryview) -> torch.Tensor:
        """Raises StepFault."""
        array, transfer = np.frombuffer(data, np.uint8), self.up.begin()
        found = transfer.upload([array])(array).clone()
        transfer.download()
        transfer.wait()
        return found


@pytest.fixture
async def both(prepared: torch.device) -> AsyncIterator[Both]:
    made = Both(prepared)
    yield made
    gc.collect()
    await until(lambda: made.outgoing.device_bytes == 0)
    assert made.outgoing.stop(timeout_s=DEADLINE_S) and made.incoming.stop(timeout_s=DEADLINE_S)


async def test_payloads_stay_on_the_device(prepared: torch.device, both: Both) -> None:
    async with closing(MemoryHop(both.incoming, both.incoming)) as to, opening(to.sender()) as sender:
        both.outgoing.lend_by(sender.lend)
        assert await sender.share_device(both.outgoing, min_bytes=1)
        for number in range(NUM_ROUNDS):
            size = LIMIT if number % 2 else 4 * (number + 1)
            content = torch.randint(0, 256, (size,), dtype=torch.uint8, device=prepared)
            data = await both.left(sender, content)
            notice = await passed(sender, data)
            assert notice.checksum == host_checksum(bytes(content.cpu().numpy().data))
            assert both.down.on_host(np.frombuffer(data, np.uint8)).tobytes() == bytes(
                content.cpu().numpy().data
            )
            payload = await to.receiver.take(notice)
            assert torch.equal(both.taken(memoryview(payload.data)), content), number
            del payload, data
        await until(lambda: len(sender._free) == NUM_HOP_SLOTS)
        both.outgoing.end_lending(sender.lend)


async def test_a_slot_that_is_overwritten_fails_the_step(prepared: torch.device, both: Both) -> None:
    async with closing(MemoryHop(both.incoming, both.incoming)) as to, opening(to.sender()) as sender:
        both.outgoing.lend_by(sender.lend)
        assert await sender.share_device(both.outgoing, min_bytes=1)
        content = torch.arange(1 << 18, dtype=torch.int32, device=prepared)
        data = await both.left(sender, content)
        payload = await to.receiver.take(await passed(sender, data))
        place = both.outgoing.place_of(np.frombuffer(data, np.uint8))
        assert place is not None
        queue_of(prepared).copy_out(place.address + 4096, content[:16])
        with pytest.raises(StepFault, match="checksum of a payload on a device") as fault:
            both.taken(memoryview(payload.data))
        assert fault.value.kind is StepFaultKind.CHECKSUM
        assert torch.ones(4, device=prepared).sum().item() == 4
        both.outgoing.end_lending(sender.lend)
        del payload, data


def _other(*arguments: str) -> tuple[subprocess.Popen[str], list[object]]:
    """Another process on the GPU, and what it says; it waits to be killed."""
    other = subprocess.Popen(
        [sys.executable, "-c", _OTHER_PROCESS, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert other.stdout is not None
    said = other.stdout.readline()
    if not said:
        other.kill()
        raise AssertionError(f"the other process ended with {other.wait()}")
    found: list[object] = json.loads(said)
    return other, found


async def test_another_process_opens_the_memory_and_is_killed(prepared: torch.device) -> None:
    if prepared.type == "cpu":
        pytest.skip("the double has no other process")
    memory = HopMemory(locks_of(prepared), CudaMappings(prepared, checksum_on(prepared)))
    exported = await memory.export(SLOT_BYTES)
    other, (proof,) = await asyncio.to_thread(_other, "open", exported.card.handle.hex())
    assert proof == exported.card.proof
    other.kill()
    other.wait()
    os.close(exported.lease)
    del exported
    gc.collect()
    await until(lambda: memory.device_bytes == 0)
    assert torch.ones(4, device=prepared).sum().item() == 4
    assert memory.stop(timeout_s=DEADLINE_S)


async def test_the_process_whose_memory_is_open_is_killed(prepared: torch.device) -> None:
    """Memory that is open stays as it was until it is closed, and the device goes on."""
    if prepared.type == "cpu":
        pytest.skip("the double has no other process")
    mappings = CudaMappings(prepared, checksum_on(prepared))
    memory = HopMemory(locks_of(prepared), mappings)
    other, (handle, proof) = await asyncio.to_thread(_other, "export", str(NUM_HOP_SLOTS * SLOT_BYTES))
    assert isinstance(handle, str) and isinstance(proof, int)
    watched, lease = os.pipe()
    segment = await memory.import_(SLOT_BYTES, DeviceCard(bytes.fromhex(handle), proof), lease)
    other.kill()
    other.wait()
    assert mappings.read_proof(segment.slots.address) == proof
    del segment
    gc.collect()
    await until(lambda: not memory._on_device)
    assert await asyncio.to_thread(os.read, watched, 1) == b""
    os.close(watched)
    torch.cuda.synchronize()
    assert torch.ones(4, device=prepared).sum().item() == 4
    assert memory.stop(timeout_s=DEADLINE_S)


def test_a_refusal_of_the_driver_is_an_error_of_that_call_alone(prepared: torch.device) -> None:
    if prepared.type == "cpu":
        pytest.skip("the double refuses nothing by itself")
    mappings = CudaMappings(prepared, checksum_on(prepared))
    with pytest.raises(OSError, match="IpcOpenMemHandle: "):
        mappings.open(bytes(64))
    with pytest.raises(OSError, match="Malloc: "):
        mappings.allocate(1 << 50)
    assert device_runtime() is device_runtime()
    assert torch.ones(4, device=prepared).sum().item() == 4
