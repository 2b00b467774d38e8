"""Segments of hops that are page-locked: copies of a device begin and end there, and outlive nothing."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stage_worker.backends import transfers
from stage_worker.backends.contract import HandedOn
from stage_worker.backends.hop_memory import HopMemory
from stage_worker.backends.transfers import Event, StagingRing
from stage_worker.executor import StepExecutor
from stage_worker.model.attention_views import HostArray
from tests.checkpoints import make_checkpoint
from tests.fake_device import FakeLocks, FakeQueue
from tests.integration.stage_bench import new_assignment
from tests.staged import staged_executor
from tests.unit.stage_worker.test_executor import Stage
from tests.unit.stage_worker.test_steps_ahead import comparable, scripted_steps
from tests.unit.wire.payload_hops import DEADLINE_S, MemoryHop, closing, until
from tests.unit.wire.test_payload_memory import passed, segments
from wire import payload_memory
from wire.frames import Frame
from wire.payload_memory import MemorySender
from wire.shared_segment import SharedSegment
from wire.staging import NUM_HOP_SLOTS, NUM_SLOTS, StagingSizes
from wire.tensors import payload_of

CPU = torch.device("cpu")
LIMIT = MemoryHop.limit
SIZES = StagingSizes(input_bytes=LIMIT, output_bytes=LIMIT)


class NotingQueue(FakeQueue):
    """Notes from where it uploads, and whither it downloads."""

    def __init__(self, *, is_manual: bool = False) -> None:
        super().__init__(is_manual=is_manual)
        self.sources: list[int] = []
        self.targets: list[int] = []

    def upload(self, target: torch.Tensor, source: HostArray) -> Event:
        self.sources.append(source.ctypes.data)
        return super().upload(target, source)

    def download(self, target: HostArray, source: torch.Tensor) -> Event:
        self.targets.append(target.ctypes.data)
        return super().download(target, source)


class PinnedHop:
    """Both ends of a hop, each with page locks of its own, as two processes have."""

    def __init__(self, refusal: str = "") -> None:
        self.out_locks, self.in_locks = FakeLocks(refusal), FakeLocks(refusal)
        self.outgoing, self.incoming = HopMemory(self.out_locks), HopMemory(self.in_locks)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[tuple[MemoryHop, MemorySender]]:
        """The sender lends its slots; the segment is page-locked at both ends if it can be."""
        async with closing(MemoryHop(self.incoming)) as to:
            sender = to.sender()
            await sender.open()
            try:
                await sender.lock(self.outgoing)
                self.outgoing.lend_by(sender.lend)
            except OSError:
                pass
            await asyncio.to_thread(self.incoming._thread.join, timeout_s=DEADLINE_S)
            await asyncio.sleep(0)
            try:
                yield to, sender
            finally:
                self.outgoing.end_lending(sender.lend)
                sender.close()

    async def ended(self) -> None:
        """All memory is unlocked, and was mapped until then."""
        gc.collect()
        await until(lambda: not self.out_locks.locked and not self.in_locks.locked)
        assert self.outgoing.stop(timeout_s=DEADLINE_S) and self.incoming.stop(timeout_s=DEADLINE_S)
        assert self.out_locks.errors == self.in_locks.errors == []


@pytest.fixture
async def pinned() -> AsyncIterator[PinnedHop]:
    """No segment is left behind."""
    gc.collect()
    before = segments()
    made = PinnedHop()
    yield made
    await made.ended()
    assert segments() == before


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_layers=3)


def staged(directory: Path, number: int, queue: FakeQueue, hops: HopMemory) -> StepExecutor:
    executor = staged_executor(new_assignment(directory, stage=number), queue, CPU, hops=hops)
    executor.begin_epoch(1, stage=number)
    return executor


def refuse_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads stay in their slots, and are not copied by the host."""
    monkeypatch.setattr(payload_memory, "INLINE_BYTES", 0)
    monkeypatch.setattr(transfers, "MIN_DIRECT_BYTES", 1)

    def refuse(*_: object) -> int:
        raise AssertionError("a copy by the host")

    monkeypatch.setattr(SharedSegment, "write", refuse)


async def test_hidden_states_go_from_device_to_device_without_a_copy_by_the_host(
    directory: Path, pinned: PinnedHop, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_copies(monkeypatch)
    first, middle = (Stage(new_assignment(directory, stage=number)) for number in (0, 1))
    steps = list(scripted_steps(first))
    ups, downs = NotingQueue(), NotingQueue()
    async with pinned.opened() as (to, sender):
        sending = staged(directory, 0, downs, pinned.outgoing)
        taking = staged(directory, 1, ups, pinned.incoming)
        ups.sources.clear()
        for step in steps:
            sending.prepare(step)
            taking.prepare(step)
            output = sending.compute(Frame(step, ()))
            expected = first.executor.run(Frame(step, ()))
            assert isinstance(output, HandedOn) and isinstance(expected, HandedOn)
            assert comparable(output) == comparable(expected)
            if not output.hidden:
                taking.compute(Frame(step, ()))
                middle.executor.run(Frame(step, ()))
                continue
            notice = await passed(sender, payload_of(output.hidden))
            hidden = (replace(output.hidden[0], data=(await to.receiver.take(notice)).data),)
            del output
            found = taking.compute(Frame(step, hidden))
            assert comparable(found) == comparable(middle.executor.run(Frame(step, expected.hidden)))
            assert any(map(pinned.in_locks.holds, ups.sources))
            assert pinned.out_locks.holds(downs.targets[-1])
            ups.sources.clear()
            del hidden, found
        await until(lambda: len(sender._free) == NUM_HOP_SLOTS)


class _Running(Event):
    """A copy that refers to no memory, as those of a device do not, and has not ended."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError("it does not end")


class EndlessQueue(FakeQueue):
    """Downloads do not end before `synchronize`."""

    def download(self, target: HostArray, source: torch.Tensor) -> Event:
        return _Running()


async def test_memory_stays_locked_while_a_copy_to_it_has_not_ended(pinned: PinnedHop) -> None:
    queue = EndlessQueue()
    ring = StagingRing(queue, SIZES, timeout_s=DEADLINE_S, hops=pinned.outgoing)
    async with pinned.opened():
        transfer = ring.begin()
        transfer.hand_on([torch.ones(64, dtype=torch.uint8)])
        transfer.download()
        del transfer  # a step that nobody waits for
    gc.collect()
    await asyncio.to_thread(pinned.outgoing._thread.join, timeout_s=DEADLINE_S)
    assert pinned.out_locks.locked
    ring.synchronize()


async def test_what_has_no_room_in_the_slot_stays_with_the_stage(pinned: PinnedHop) -> None:
    async with pinned.opened() as (_, sender):
        room = len(sender.lend(1) or b"")
        large = replace(SIZES, output_bytes=2 * room)
        ring = StagingRing(FakeQueue(), large, timeout_s=1.0, hops=pinned.outgoing)
        for sizes, is_lent in (((room, 4), [True, False]), ((room + 1, 4), [False, False])):
            transfer = ring.begin()
            tensors = [
                torch.full((size,), number + 1, dtype=torch.uint8) for number, size in enumerate(sizes)
            ]
            fetched = [*transfer.hand_on(tensors[:1]), transfer.fetch(tensors[1])]
            transfer.download()
            transfer.wait()
            assert [bytes(part) for part in fetched] == [bytes(tensor.tolist()) for tensor in tensors]
            lent = [pinned.out_locks.holds(np.frombuffer(part, np.uint8).ctypes.data) for part in fetched]
            assert lent == is_lent
            del transfer, fetched


async def test_steps_go_on_without_a_free_slot(pinned: PinnedHop) -> None:
    """Their outputs are in the memory of the stage, and copied when they are sent."""
    ring = StagingRing(FakeQueue(), SIZES, timeout_s=1.0, hops=pinned.outgoing)
    async with pinned.opened() as (to, sender):
        lent = [sender.lend(9) for _ in range(NUM_HOP_SLOTS)]
        assert None not in lent and sender.lend(9) is None
        transfers_ = [ring.begin() for _ in range(NUM_SLOTS)]
        data = [
            transfer.hand_on([torch.full((9,), n, dtype=torch.uint8)])[0]
            for n, transfer in enumerate(transfers_)
        ]
        for transfer in transfers_:
            transfer.download()
            transfer.wait()
        lent.clear()
        for number, part in enumerate(data):
            assert (await to.receiver.take(await passed(sender, part))).data == bytes([number] * 9)


async def test_memory_that_cannot_be_locked_is_used_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    pinned = PinnedHop("cudaHostRegister: out of memory")
    async with pinned.opened() as (to, sender):
        problem = "memory shared with the previous stage is not page-locked: cudaHostRegister: out of memory"
        assert to.receiver.lock_problem == problem
        assert f"hidden states are copied once more: {problem}" in caplog.messages
        with pytest.raises(OSError, match="cudaHostRegister: out of memory"):
            await sender.lock(pinned.outgoing)
        assert pinned.outgoing.lend(1) is None
        assert (await to.receiver.take(await passed(sender, b"data"))).data == b"data"
    await pinned.ended()


async def test_a_former_hop_does_not_end_the_lending_of_the_next_one(pinned: PinnedHop) -> None:
    async with pinned.opened() as (_, sender):
        pinned.outgoing.lend_by(lambda _: memoryview(b"later"))
        pinned.outgoing.end_lending(sender.lend)
        assert bytes(pinned.outgoing.lend(1) or b"") == b"later"
        pinned.outgoing.lend_by(sender.lend)
        pinned.outgoing.end_lending(sender.lend)
        assert pinned.outgoing.lend(1) is None


async def test_memory_that_cannot_be_unlocked_stays_mapped(caplog: pytest.LogCaptureFixture) -> None:
    pinned = PinnedHop()
    before = segments()

    def refuse(address: int) -> None:
        raise OSError("cudaHostUnregister: unspecified launch failure")

    unlock, pinned.out_locks.unlock = pinned.out_locks.unlock, refuse  # type: ignore[method-assign]
    async with pinned.opened():
        pass
    gc.collect()
    await until(lambda: "memory of a hop stays mapped: cudaHostUnregister" in caplog.text)
    assert len(segments()) > len(before) and pinned.outgoing.locked_bytes == 0
    (address,) = pinned.out_locks.locked
    unlock_now = pinned.outgoing._kept.pop()
    pinned.out_locks.threads.add("MainThread")
    unlock(address)
    unlock_now()
    await pinned.ended()
