"""Hidden states that stay on a device between two stages: what passes the host is a checksum of theirs."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import math
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoint import DType, ScaledDType
from stage_worker.backends import hop_memory
from stage_worker.backends.contract import HandedOn
from stage_worker.backends.hop_memory import HopMemory
from stage_worker.backends.transfers import StagingRing
from stage_worker.executor import StepExecutor
from stage_worker.model.attention_views import HostArray
from stage_worker.model.checksums import plain_checksum
from stage_worker.model.kernels import by_triton
from tests.checkpoints import make_checkpoint
from tests.fake_device import FakeGpu, FakeLocks, FakeMappings, FakeQueue
from tests.host_checksum import host_checksum
from tests.integration.stage_bench import new_assignment
from tests.staged import staged_executor
from tests.tape import TapeRecorder
from tests.torch_kernels import use_torch_kernels
from tests.unit.stage_worker.backends.test_hop_memory import NotingQueue
from tests.unit.stage_worker.test_executor import Stage
from tests.unit.stage_worker.test_steps_ahead import comparable, scripted_steps
from tests.unit.wire.payload_hops import DEADLINE_S, MemoryHop, closing, until
from tests.unit.wire.test_payload_memory import passed
from wire.errors import StepFault, StepFaultKind
from wire.frames import Frame
from wire.payload_memory import MemorySender
from wire.shared_segment import DeviceSegment
from wire.staging import NUM_HOP_SLOTS, StagingSizes
from wire.tensors import HiddenStates, TensorView, WireDType, payload_of

CPU = torch.device("cpu")
LIMIT = MemoryHop.limit
SIZES = StagingSizes(input_bytes=LIMIT, output_bytes=LIMIT + 256)


class DeviceHop:
    """Both ends of a hop between two processes on one GPU."""

    def __init__(self, *, refusal: str = "", full: str = "") -> None:
        self.gpu = FakeGpu()
        self.outgoing = HopMemory(FakeLocks(), FakeMappings(self.gpu, full=full))
        self.incoming = HopMemory(FakeLocks(), FakeMappings(self.gpu, refusal=refusal))

    @asynccontextmanager
    async def opened(self, *, min_bytes: int = 1) -> AsyncIterator[tuple[MemoryHop, MemorySender]]:
        """Payloads of at least `min_bytes` stay on the device."""
        async with self.pinned() as (to, sender):
            assert await sender.share_device(self.outgoing, min_bytes=min_bytes)
            yield to, sender

    @asynccontextmanager
    async def pinned(self) -> AsyncIterator[tuple[MemoryHop, MemorySender]]:
        """Before memory of the device is shared."""
        async with closing(MemoryHop(self.incoming, self.incoming)) as to:
            sender = to.sender()
            await sender.open()
            await sender.lock(self.outgoing)
            self.outgoing.lend_by(sender.lend)
            try:
                yield to, sender
            finally:
                self.outgoing.end_lending(sender.lend)
                sender.close()

    async def ended(self) -> None:
        """All memory of the device is closed, then freed."""
        gc.collect()
        await until(lambda: not self.gpu.memory)
        assert self.gpu.errors == [] and self.outgoing.device_bytes == 0
        assert self.outgoing.stop(timeout_s=DEADLINE_S) and self.incoming.stop(timeout_s=DEADLINE_S)


@pytest.fixture
async def shared() -> AsyncIterator[DeviceHop]:
    """No memory is left behind."""
    made = DeviceHop()
    yield made
    await made.ended()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_layers=3)


def staged(
    directory: Path,
    number: int,
    queue: FakeQueue,
    hops: HopMemory,
    *,
    wire_dtype: WireDType | None = None,
    is_recorded: bool = False,
) -> StepExecutor:
    assignment = replace(new_assignment(directory, stage=number), wire_dtype=wire_dtype)
    recorder, kernels = (TapeRecorder(), by_triton) if is_recorded else (None, None)
    executor = staged_executor(assignment, queue, CPU, kernels, recorder=recorder, hops=hops)
    executor.begin_epoch(1, stage=number)
    return executor


async def arrived(to: MemoryHop, sender: MemorySender, hidden: HiddenStates) -> HiddenStates:
    """Hidden states as the next stage has them."""
    data = memoryview((await to.receiver.take(await passed(sender, payload_of(hidden)))).data)
    found, begin = list[TensorView](), 0
    for view in hidden:
        found.append(replace(view, data=data[begin : begin + view.size_bytes]))
        begin += view.size_bytes
    return tuple(found)


def has_replayed(executor: StepExecutor) -> bool:
    graphs = executor.stats.graphs
    return graphs is not None and graphs.num_replayed > 0


def place_of(hops: HopMemory, data: memoryview) -> int:
    place = hops.place_of(np.frombuffer(data, np.uint8))
    assert place is not None, "bytes on the device"
    return place.address


@pytest.mark.parametrize("is_recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("wire_dtype", [None, DType.BF16, *ScaledDType])
async def test_a_step_goes_on_from_what_stayed_on_the_device(
    wire_dtype: WireDType | None,
    is_recorded: bool,
    directory: Path,
    shared: DeviceHop,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the outputs of the same stages whose hidden states pass the host; nobody reads them there."""
    use_torch_kernels(monkeypatch)
    of_stage = partial(staged, directory, wire_dtype=wire_dtype, is_recorded=is_recorded)
    nowhere = HopMemory(FakeLocks())
    script = Stage(new_assignment(directory, stage=0))
    downs, num_on_device = NotingQueue(), 0
    async with shared.opened() as (to, sender):
        plain = [of_stage(number, FakeQueue(), nowhere) for number in (0, 1)]
        sending = of_stage(0, downs, shared.outgoing)
        taking = of_stage(1, FakeQueue(), shared.incoming)
        for step in scripted_steps(script):
            for executor in (*plain, sending, taking):
                executor.prepare(step)
            output, expected = sending.compute(Frame(step, ())), plain[0].compute(Frame(step, ()))
            assert isinstance(output, HandedOn) and isinstance(expected, HandedOn)
            hidden: HiddenStates = ()
            if output.hidden:
                hidden = await arrived(to, sender, output.hidden)
                assert place_of(shared.outgoing, memoryview(output.hidden[0].data)) == place_of(
                    shared.incoming, memoryview(hidden[0].data)
                )
                num_on_device += 1
            del output
            found = taking.compute(Frame(step, hidden))
            assert comparable(found) == comparable(plain[1].compute(Frame(step, expected.hidden)))
            del hidden, found, expected
            await asyncio.sleep(0)  # lets the loop take returned slots: `wait_for` of Python 3.12 may not
        assert num_on_device > 5
        assert all(has_replayed(executor) == is_recorded for executor in (sending, taking))
        await until(lambda: len(sender._free) == NUM_HOP_SLOTS)
        assert len(downs.targets) and not sender._written
        for executor in (*plain, sending, taking):
            executor.begin_epoch(2, stage=0)
    assert nowhere.stop(timeout_s=DEADLINE_S)


def leave(ring: StagingRing, *tensors: torch.Tensor) -> list[memoryview]:
    """What the next stage may take of a step that ends."""
    transfer = ring.begin()
    handed = transfer.hand_on(tensors)
    transfer.download()
    transfer.wait()
    return handed


def take(ring: StagingRing, *arrays: memoryview) -> list[torch.Tensor]:
    """What a step computes with. Raises StepFault."""
    transfer = ring.begin()
    given = [np.frombuffer(array, np.uint8) for array in arrays]
    place = transfer.upload(given)
    found = [place(array).clone() for array in given]
    transfer.download()
    transfer.wait()
    return found


def rings(shared: DeviceHop) -> tuple[StagingRing, StagingRing]:
    return tuple(
        StagingRing(FakeQueue(), SIZES, timeout_s=1.0, hops=hops)
        for hops in (shared.outgoing, shared.incoming)
    )  # type: ignore[return-value]


CONTENT = torch.arange(1, 2001, dtype=torch.float32)


async def test_a_slot_that_is_overwritten_fails_the_step(shared: DeviceHop) -> None:
    down, up = rings(shared)
    async with shared.opened() as (to, sender):
        (data,) = leave(down, CONTENT)
        payload = await to.receiver.take(await passed(sender, data))
        ctypes.memset(place_of(shared.outgoing, data) + 4096, 7, 1)
        with pytest.raises(StepFault, match="checksum of a payload on a device: expected") as fault:
            take(up, memoryview(payload.data))
        assert fault.value.kind is StepFaultKind.CHECKSUM


async def test_words_that_changed_places_fail_the_step(shared: DeviceHop) -> None:
    down, up = rings(shared)
    async with shared.opened() as (to, sender):
        (data,) = leave(down, CONTENT)
        payload = await to.receiver.take(await passed(sender, data))
        address = place_of(shared.outgoing, data)
        ctypes.memmove(address, bytes(CONTENT.roll(1).numpy().data), 8000)
        with pytest.raises(StepFault, match="checksum of a payload on a device"):
            take(up, memoryview(payload.data))


async def test_a_frame_with_another_checksum_fails_the_step(shared: DeviceHop) -> None:
    down, up = rings(shared)
    async with shared.opened() as (to, sender):
        (data,) = leave(down, CONTENT)
        notice = await passed(sender, data)
        assert notice.checksum == host_checksum(bytes(CONTENT.numpy().data))
        payload = await to.receiver.take(replace(notice, checksum=notice.checksum ^ 1))
        with pytest.raises(
            StepFault, match=f"expected {notice.checksum ^ 1:016x}, got {notice.checksum:016x}"
        ):
            take(up, memoryview(payload.data))


async def test_a_stamp_of_another_payload_is_no_payload(shared: DeviceHop) -> None:
    down, _ = rings(shared)
    async with shared.opened() as (to, sender):
        (data,) = leave(down, CONTENT)
        notice = await passed(sender, data)
        assert sender._segment is not None
        sender._segment.seal_on_device(sender._written[1], 7, 2, notice.size_bytes)
        with pytest.raises(
            StepFault, match=r"no slot holds payload 1 of epoch 7, but payloads .*2 of epoch 7"
        ):
            await to.receiver.take(notice)


async def test_a_payload_on_a_device_that_is_not_shared_is_refused(shared: DeviceHop) -> None:
    async with shared.pinned() as (to, sender):
        notice = await passed(sender, bytes(8000))
        assert sender._segment is not None
        sender._segment.seal_on_device(sender._written[1], 7, 1, 8000)
        with pytest.raises(
            StepFault, match="payload 1 is on a device, in memory that this stage did not open"
        ):
            await to.receiver.take(notice)


async def test_several_tensors_are_one_payload_in_one_slot(shared: DeviceHop) -> None:
    """On the device, and in page-locked memory."""
    down, up = rings(shared)
    tensors = [CONTENT.view(40, 50), CONTENT[:30].to(torch.bfloat16), CONTENT[:3]]
    async with shared.opened(min_bytes=1000) as (to, sender):
        for used in (tensors, tensors[1:]):
            parts = leave(down, *used)
            hidden = tuple(
                TensorView(DType.F32, (1, part.nbytes // 4), part, f"tensor {number}")
                for number, part in enumerate(parts)
            )
            payload = payload_of(hidden)
            await until(lambda: len(sender._free) == NUM_HOP_SLOTS - 1)
            is_on_device = shared.outgoing.place_of(np.frombuffer(payload, np.uint8)) is not None
            assert is_on_device == (used is tensors)
            segment = sender._device if is_on_device else sender._segment
            assert segment is not None and segment.slot_of(payload) is not None
            del segment
            taken = await arrived(to, sender, hidden)
            del payload, hidden, parts
            found = take(up, *(memoryview(view.data) for view in taken))
            for part, expected in zip(found, used, strict=True):
                assert torch.equal(part, expected.contiguous().view(torch.uint8).flatten())
            del taken, found


async def test_small_payloads_and_parts_of_words_go_through_memory_of_the_host(shared: DeviceHop) -> None:
    down, up = rings(shared)
    async with shared.opened(min_bytes=1000) as (to, sender):
        for tensor in (CONTENT[:249], torch.arange(1001).to(torch.uint8), CONTENT[:250]):
            (data,) = leave(down, tensor)
            is_on_device = tensor is not None and data.nbytes == 1000
            assert (shared.outgoing.place_of(np.frombuffer(data, np.uint8)) is not None) == is_on_device
            payload = await to.receiver.take(await passed(sender, data))
            (found,) = take(up, memoryview(payload.data))
            assert torch.equal(found, tensor.view(torch.uint8))
            del data, payload, found


async def test_steps_go_on_without_a_free_slot(shared: DeviceHop) -> None:
    """Their outputs pass the host, and are sent when a slot is returned."""
    down, up = rings(shared)
    async with shared.opened() as (to, sender):
        kept = []
        for _ in range(NUM_HOP_SLOTS):
            (data,) = leave(down, CONTENT)
            kept.append(await to.receiver.take(await passed(sender, data)))
            del data
        (data,) = leave(down, CONTENT)
        assert shared.outgoing.place_of(np.frombuffer(data, np.uint8)) is None
        sending = asyncio.create_task(passed(sender, data))
        await asyncio.sleep(0.01)
        assert not sending.done()
        take(up, memoryview(kept.pop(3).data))
        payload = await to.receiver.take(await sending)
        (found,) = take(up, memoryview(payload.data))
        assert torch.equal(found.view(torch.float32), CONTENT)


async def test_what_is_on_a_device_can_be_looked_at(shared: DeviceHop) -> None:
    down, up = rings(shared)
    async with shared.opened() as (to, sender):
        (data,) = leave(down, CONTENT)
        payload = await to.receiver.take(await passed(sender, data))
        for ring, content in ((down, data), (up, payload.data)):
            found = ring.on_host(np.frombuffer(content, np.uint8))
            assert found.tobytes() == bytes(CONTENT.numpy().data)
        elsewhere = np.ones(3, np.uint8)
        assert up.on_host(elsewhere) is elsewhere


@pytest.mark.parametrize("is_recorded", [False, True], ids=["eager", "recorded"])
async def test_values_that_are_not_finite_are_the_fault_of_the_stage_where_they_began(
    is_recorded: bool, directory: Path, shared: DeviceHop, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_torch_kernels(monkeypatch)
    script = Stage(new_assignment(directory, stage=0))
    looks: list[int] = []
    on_host = StagingRing.on_host

    def noted(ring: StagingRing, content: HostArray) -> HostArray:
        hops = ring._hops
        looks.append(int(hops is not None and hops.place_of(content) is not None))
        return on_host(ring, content)

    monkeypatch.setattr(StagingRing, "on_host", noted)
    async with shared.opened() as (to, sender):
        sending = staged(directory, 0, FakeQueue(), shared.outgoing, is_recorded=is_recorded)
        taking = staged(directory, 1, FakeQueue(), shared.incoming, is_recorded=is_recorded)
        for step in scripted_steps(script):
            for executor in (sending, taking):
                executor.prepare(step)
            is_last = bool(step.slices) and all(map(has_replayed, (sending, taking) if is_recorded else ()))
            if is_last:  # from here on, each row begins without a number
                with torch.inference_mode():
                    sending._compute._model._loaded().embeddings.fill_(math.nan)  # type: ignore[attr-defined]
            output = sending.compute(Frame(step, ()))
            assert isinstance(output, HandedOn)
            hidden = await arrived(to, sender, output.hidden) if output.hidden else ()
            taking.compute(Frame(step, hidden))
            del output, hidden
            if is_last:
                break
        # The input of the second stage, and the output of the first; the other output passed the host.
        assert looks.count(1) == (2 if is_recorded else 0)
        for executor in (sending, taking):
            executor.begin_epoch(2, stage=0)


async def test_refused_memory_leaves_the_hop_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    text = "cudaIpcOpenMemHandle: peer access is not supported between these two devices"
    for shared in (DeviceHop(refusal=text), DeviceHop(full=text)):
        down, up = rings(shared)
        async with shared.pinned() as (to, sender):
            with pytest.raises(OSError, match=text):
                await sender.share_device(shared.outgoing, min_bytes=1)
            (data,) = leave(down, CONTENT)
            assert shared.outgoing.covers(np.frombuffer(data, np.uint8))
            payload = await to.receiver.take(await passed(sender, data))
            (found,) = take(up, memoryview(payload.data))
            assert torch.equal(found.view(torch.float32), CONTENT)
            del data, payload
            gc.collect()
            await until(lambda made=shared: not made.gpu.memory)  # type: ignore[misc]
        await shared.ended()
    assert caplog.messages.count(f"hidden states do not stay on the GPU: {text}") == 1


@pytest.mark.parametrize("end", ["write_proof", "read_proof"])
async def test_memory_is_given_back_after_any_error_of_its_proof(
    end: str, shared: DeviceHop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(FakeMappings, end, exhausted)
    async with shared.pinned() as (_, sender):
        with pytest.raises((OSError, torch.OutOfMemoryError)):
            await sender.share_device(shared.outgoing, min_bytes=1)
        gc.collect()
        await until(lambda: not shared.gpu.memory)
    assert not shared.gpu.errors and shared.outgoing.device_bytes == 0


async def test_a_handle_to_other_memory_is_refused(
    shared: DeviceHop, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = FakeMappings(shared.gpu).allocate(LIMIT)

    def open_other(_: FakeMappings, handle: bytes) -> int:
        shared.gpu.num_open[other] += 1
        return other

    monkeypatch.setattr(FakeMappings, "open", open_other)
    async with shared.pinned() as (_, sender):
        with pytest.raises(OSError, match=r"other memory was opened: checksum .* expected"):
            await sender.share_device(shared.outgoing, min_bytes=1)
    FakeMappings(shared.gpu).free(other)


async def test_a_stage_without_a_gpu_opens_no_memory(shared: DeviceHop) -> None:
    async with closing(MemoryHop()) as to:
        sender = to.sender()
        await sender.open()
        assert not await sender.share_device(shared.outgoing, min_bytes=1)
        sender.close()


async def test_a_hop_that_ends_meanwhile_shares_nothing(shared: DeviceHop) -> None:
    async with shared.pinned() as (_, sender):
        sharing = asyncio.create_task(sender.share_device(shared.outgoing, min_bytes=1))
        await asyncio.sleep(0)
        sender.close()
        with pytest.raises(ConnectionError, match="the connection was closed"):
            await sharing


async def test_memory_is_freed_after_the_other_process_has_closed_it(shared: DeviceHop) -> None:
    """The sender's epoch has ended, and the receiver still has a step with a payload."""
    down, up = rings(shared)
    async with shared.opened() as (to, sender):
        (data,) = leave(down, CONTENT)
        payload = await to.receiver.take(await passed(sender, data))
        del data
        sender.close()
        gc.collect()
        await asyncio.to_thread(shared.outgoing._thread.join, timeout_s=DEADLINE_S)
        assert len(shared.gpu.memory) == 1 and shared.outgoing.device_bytes > 0
        (found,) = take(up, memoryview(payload.data))
        assert torch.equal(found.view(torch.float32), CONTENT)
        to.forget()
        gc.collect()
        await asyncio.to_thread(shared.incoming._thread.join, timeout_s=DEADLINE_S)
        assert len(shared.gpu.memory) == 1
        del payload, found


async def test_memory_is_freed_when_the_other_process_is_killed(
    shared: DeviceHop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hop_memory, "LEASE_WARNING_S", 0.01)
    exported = await shared.outgoing.export(4096)
    other = subprocess.Popen(["sleep", "60"], pass_fds=[exported.lease])
    os.close(exported.lease)
    del exported
    gc.collect()
    size_bytes = hop_memory.GRANULE_BYTES
    await until(lambda: f"the next stage has not closed {size_bytes} bytes of this device" in caplog.text)
    assert shared.outgoing.device_bytes == size_bytes
    other.kill()
    other.wait()
    await until(lambda: shared.outgoing.device_bytes == 0)


def test_nothing_can_be_read_where_addresses_stand_for_a_device() -> None:
    """A read ends the process."""
    segment = DeviceSegment(4096, 0)
    assert segment.slot_of(memoryview(segment.slot(3)).cast("B")[64:]) == 3
    (mapping,) = (
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.startswith(f"{segment.memory.address:x}-")
    )
    end = segment.memory.address + NUM_HOP_SLOTS * 4096
    assert mapping.split()[:2] == [f"{segment.memory.address:x}-{end:x}", "---p"]


@pytest.mark.parametrize("size", [1, 3, 4096, 5001])
def test_the_checksum_of_a_device_is_that_of_the_host_whatever_its_parts(size: int) -> None:
    words = torch.randint(-(2**31), 2**31, (size,), dtype=torch.int32)
    expected = host_checksum(bytes(words.numpy().data))
    cut = size // 3
    parts = plain_checksum(words[:cut], 0) + plain_checksum(words[cut:], cut)
    assert int(parts) % 2**64 == int(plain_checksum(words, 0)) % 2**64 == expected
    words[size // 2] ^= 1
    assert int(plain_checksum(words, 0)) % 2**64 != expected
