"""Payload connections that do not work are not tried again at once."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from dataclasses import replace

import pytest

from stage_worker import hop_payloads
from stage_worker.backends.hop_memory import HopMemory
from stage_worker.handshake import Epoch
from stage_worker.hop_payloads import IncomingPayloads, OutgoingPayloads, PayloadConnections
from stageline_rpc.internal.v1 import forward_pb2
from stageline_rpc.v1 import cluster_pb2
from tests.fake_device import FakeGpu, FakeLocks, FakeMappings
from tests.unit.wire.payload_hops import until
from tests.unit.wire.wire_strategies import hidden_states
from wire.addresses import Address
from wire.errors import StepFault, StepFaultKind
from wire.ids import Incarnation
from wire.memory_listener import MemoryListener
from wire.payload_memory import MemoryOffer, MemorySender
from wire.payload_sockets import PayloadListener
from wire.payloads import PAYLOAD_RETRY_S, PayloadKey, PayloadNotice, encode_header
from wire.peer_secrets import RefusedPeers

SECRET = b"s" * 32
SMALL, LARGE = hidden_states(1, 4), hidden_states(3, 4)
ADDRESS = Address("10.0.0.7", 7499)
EPOCH = Epoch(
    plan_id=1,
    number=1,
    coordinator_incarnation=Incarnation(bytes(16)),
    peers=(),
    incoming_secret=SECRET,
    outgoing_secret=SECRET,
)
DEADLINE_S = 10.0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def connections(clock: Clock | None = None) -> PayloadConnections:
    listener = PayloadListener(RefusedPeers(time.monotonic))
    return PayloadConnections(listener, min_bytes=LARGE[0].size_bytes, clock=clock or Clock())


def hop(made: PayloadConnections) -> OutgoingPayloads:
    return made.outgoing(EPOCH, "127.0.0.1:1")


def offer(*, host: str = "", port: int = 1, ticket: bytes = b"t" * 16) -> forward_pb2.HopAccepted:
    return forward_pb2.HopAccepted(payloads=forward_pb2.PayloadOffer(host=host, port=port, ticket=ticket))


def test_an_address_is_avoided_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    made = connections(clock)
    reason = "the payload connection to 10.0.0.7:7499 broke: Connection reset by peer"
    assert made.reason_to_avoid(ADDRESS) == ""
    assert made.avoid(ADDRESS, "broke: Connection reset by peer") == reason
    assert caplog.messages == [f"hidden states travel over gRPC for 30 s: {reason}"]
    clock.now_s = PAYLOAD_RETRY_S - 0.001
    assert made.reason_to_avoid(ADDRESS) == reason
    assert made.reason_to_avoid(Address("10.0.0.8", 7499)) == ""
    clock.now_s = PAYLOAD_RETRY_S
    assert made.reason_to_avoid(ADDRESS) == ""


async def test_large_hidden_states_travel_on_the_offered_connection() -> None:
    listener = PayloadListener(RefusedPeers(time.monotonic))
    listener.listen(Address("127.0.0.1", 0))
    receiver = listener.expect(epoch=1, secret=SECRET, max_bytes=1000)
    assert receiver is not None
    payloads = hop(connections())
    await payloads.open(offer(port=receiver.offer.port, ticket=receiver.offer.ticket))
    assert await payloads.send(SMALL) is None
    notice = await payloads.send(LARGE)
    assert notice is not None
    assert (await receiver.inbox.take(notice)).data == LARGE[0].data
    payloads.close()
    listener.forget(receiver)
    listener.close()


async def test_damage_that_no_frame_waits_for_suspends_the_offers(caplog: pytest.LogCaptureFixture) -> None:
    listener = PayloadListener(RefusedPeers(time.monotonic))
    listener.listen(Address("127.0.0.1", 0))
    made = PayloadConnections(listener, min_bytes=LARGE[0].size_bytes)
    incoming, accepted = made.incoming(), forward_pb2.HopAccepted()
    incoming.expect(EPOCH, accepted, max_bytes=1000)
    assert incoming.damaged is not None
    key = PayloadKey(EPOCH.number, SECRET, accepted.payloads.ticket)
    with socket.create_connection(("127.0.0.1", accepted.payloads.port)) as connection:
        connection.sendall(key.greeting() + encode_header(2, 3))
        await asyncio.wait_for(asyncio.shield(incoming.damaged), DEADLINE_S)
    await asyncio.sleep(0)
    later = forward_pb2.HopAccepted()
    waiting = made.incoming()
    waiting.expect(EPOCH, later, max_bytes=1000)
    assert not later.HasField("payloads")
    assert (incoming.fallback, waiting.fallback) == ("", "a payload did not arrive intact")
    with pytest.raises(StepFault, match="payload 2 on the connection, expected 1"):
        await incoming.take(PayloadNotice(1, 3, 0))
    assert [message for message in caplog.messages if "over gRPC" in message] == [
        "hidden states travel over gRPC for 30 s: a payload did not arrive intact"
    ]
    incoming.close()
    listener.close()


async def test_without_an_offer_everything_belongs_into_frames() -> None:
    payloads = hop(connections())
    await payloads.open(forward_pb2.HopAccepted())
    assert await payloads.send(LARGE) is None
    assert payloads.fallback == ""
    payloads.close()


async def test_a_segment_that_arrives_too_late_is_not_read() -> None:
    """The sender gave up the shared memory, and opened the payload connection instead."""
    refused = RefusedPeers(time.monotonic)
    listener, memory = PayloadListener(refused), MemoryListener(refused)
    listener.listen(Address("127.0.0.1", 0))
    memory.listen()
    made = PayloadConnections(listener, memory=memory, min_bytes=LARGE[0].size_bytes)
    incoming, accepted = made.incoming(), forward_pb2.HopAccepted()
    incoming.expect(EPOCH, accepted, max_bytes=1000)
    offered = accepted.memory
    late = MemorySender(
        MemoryOffer(offered.host_id, offered.socket, offered.ticket, offered.slot_bytes),
        PayloadKey(EPOCH.number, SECRET, offered.ticket),
    )
    await late.open()
    late.close()
    accepted.ClearField("memory")
    payloads = hop(made)
    await payloads.open(accepted)
    notice = await payloads.send(LARGE)
    assert notice is not None
    assert (await asyncio.wait_for(incoming.take(notice), DEADLINE_S)).data == LARGE[0].data
    payloads.close()
    incoming.close()
    memory.close()
    listener.close()


@pytest.mark.parametrize("is_told", [True, False], ids=["in frames", "any way"])
async def test_an_epoch_with_hidden_states_in_frames_has_no_other_way_at_either_end(is_told: bool) -> None:
    refused = RefusedPeers(time.monotonic)
    listener, memory = PayloadListener(refused), MemoryListener(refused)
    listener.listen(Address("127.0.0.1", 0))
    memory.listen()
    made = PayloadConnections(listener, memory=memory, min_bytes=1)
    told = replace(EPOCH, hidden_states_in_frames=is_told)
    incoming, accepted, offered = made.incoming(), forward_pb2.HopAccepted(), forward_pb2.HopAccepted()
    incoming.expect(told, accepted, max_bytes=1000)
    assert (accepted.HasField("memory"), accepted.HasField("payloads")) == (not is_told, not is_told)
    of_another = made.incoming()
    of_another.expect(EPOCH, offered, max_bytes=1000)
    payloads = made.outgoing(told, "127.0.0.1:1")
    await payloads.open(offered)
    assert (await payloads.send(LARGE) is None) is is_told
    assert (payloads.transport == cluster_pb2.HOP_TRANSPORT_GRPC) is is_told
    assert (payloads.fallback, payloads.same_host_fallback, incoming.fallback) == ("", "", "")
    payloads.close()
    for end in (incoming, of_another):
        end.close()
    listener.close()
    memory.close()


@pytest.mark.parametrize("refusal", ["", "cudaHostRegister: out of memory"], ids=["pinned", "refused"])
async def test_a_gpu_writes_into_shared_memory_that_can_be_page_locked(
    refusal: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the reason is in status and log, and hidden states are copied there."""
    refused, hop_memory = RefusedPeers(time.monotonic), HopMemory(FakeLocks(refusal))
    memory = MemoryListener(refused)
    memory.listen()
    made = PayloadConnections(PayloadListener(refused), memory=memory, hop_memory=hop_memory)
    incoming, accepted = made.incoming(), forward_pb2.HopAccepted()
    incoming.expect(EPOCH, accepted, max_bytes=1000)
    payloads = hop(made)
    await payloads.open(accepted)
    await asyncio.wait_for(asyncio.gather(*payloads._changes), DEADLINE_S)
    assert bool(hop_memory.locked_bytes) is not bool(refusal)
    lent, reason = hop_memory.lend(1), ""
    if refusal:
        reason = f"memory shared with the next stage is not page-locked: {refusal}"
        assert lent is None and payloads.transport == cluster_pb2.HOP_TRANSPORT_SHARED_MEMORY
    else:
        assert lent is not None and payloads.transport == cluster_pb2.HOP_TRANSPORT_PINNED_MEMORY
    assert payloads.same_host_fallback == reason and incoming.same_host_fallback == ""
    assert [message for message in caplog.messages if "once more" in message] == [
        f"hidden states are copied once more: {reason}" for _ in reason[:1]
    ]
    notice = await payloads.send(SMALL)
    assert notice is not None
    assert (await asyncio.wait_for(incoming.take(notice), DEADLINE_S)).data == SMALL[0].data
    payloads.close()
    assert hop_memory.lend(1) is None
    incoming.close()
    memory.close()
    del lent
    gc.collect()
    assert await asyncio.to_thread(hop_memory.stop, timeout_s=DEADLINE_S)
    assert hop_memory.locked_bytes == 0


class SlowLocks(FakeLocks):
    """A driver that page-locks when a test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def lock(self, address: int, size_bytes: int) -> None:
        assert self.go_on.wait(DEADLINE_S)
        super().lock(address, size_bytes)


def locking_connections(locks: FakeLocks) -> tuple[PayloadConnections, MemoryListener, HopMemory]:
    """Of a worker that listens for shared memory, and page-locks it."""
    refused, hop_memory = RefusedPeers(time.monotonic), HopMemory(locks)
    memory = MemoryListener(refused)
    memory.listen()
    made = PayloadConnections(PayloadListener(refused), memory=memory, hop_memory=hop_memory)
    return made, memory, hop_memory


async def test_a_dial_does_not_wait_for_page_locks() -> None:
    """Memory of gigabytes takes longer than a dial may: hidden states are copied by the host until then."""
    locks = SlowLocks()
    made, memory, hop_memory = locking_connections(locks)
    incoming, accepted = made.incoming(), forward_pb2.HopAccepted()
    incoming.expect(EPOCH, accepted, max_bytes=1000)
    payloads = hop(made)
    assert payloads.transport == cluster_pb2.HOP_TRANSPORT_UNSPECIFIED
    await payloads.open(accepted)
    assert payloads.transport == cluster_pb2.HOP_TRANSPORT_SHARED_MEMORY and hop_memory.lend(1) is None
    notice = await payloads.send(SMALL)
    assert notice is not None
    assert (await asyncio.wait_for(incoming.take(notice), DEADLINE_S)).data == SMALL[0].data
    locks.go_on.set()
    await until(lambda: payloads.transport == cluster_pb2.HOP_TRANSPORT_PINNED_MEMORY)
    assert hop_memory.lend(1) is not None and payloads.same_host_fallback == ""
    payloads.close()
    await ended(incoming, memory, hop_memory)


async def test_a_hop_that_ends_before_it_is_page_locked_lends_nothing() -> None:
    locks = SlowLocks()
    made, memory, hop_memory = locking_connections(locks)
    incoming, accepted = made.incoming(), forward_pb2.HopAccepted()
    incoming.expect(EPOCH, accepted, max_bytes=1000)
    payloads = hop(made)
    await payloads.open(accepted)
    payloads.close()
    locks.go_on.set()
    await asyncio.wait_for(asyncio.gather(*payloads._changes), DEADLINE_S)
    assert hop_memory._lend is None and payloads.same_host_fallback == ""
    await ended(incoming, memory, hop_memory)


REFUSAL = "cudaIpcOpenMemHandle: invalid argument"


@pytest.mark.parametrize("refusal", ["", REFUSAL], ids=["shared", "refused"])
@pytest.mark.parametrize("is_check", [False, True], ids=["serving", "self-check"])
async def test_hidden_states_stay_on_the_device_unless_they_are_kept_or_the_driver_refuses(
    refusal: str, is_check: bool, caplog: pytest.LogCaptureFixture
) -> None:
    refused, gpu = RefusedPeers(time.monotonic), FakeGpu()
    ends = [HopMemory(FakeLocks(), FakeMappings(gpu, refusal=refusal)) for _ in range(2)]
    hop_memory, of_next = ends
    memory = MemoryListener(refused, of_next, of_next)
    memory.listen()
    made = PayloadConnections(PayloadListener(refused), memory=memory, hop_memory=hop_memory, min_bytes=1)
    incoming, accepted = made.incoming(), forward_pb2.HopAccepted()
    incoming.expect(EPOCH, accepted, max_bytes=1000)
    payloads = made.outgoing(replace(EPOCH, is_check=is_check), "127.0.0.1:1")
    await payloads.open(accepted)
    await asyncio.wait_for(asyncio.gather(*payloads._changes), DEADLINE_S)
    is_shared = not refusal and not is_check
    assert payloads.transport == (
        cluster_pb2.HOP_TRANSPORT_CUDA_IPC if is_shared else cluster_pb2.HOP_TRANSPORT_PINNED_MEMORY
    )
    await until(lambda: bool(hop_memory.device_bytes) == is_shared)
    reason = f"memory of the GPU is not shared with the next stage: {REFUSAL}"
    assert payloads.same_host_fallback == (reason if refusal and not is_check else "")
    assert (f"hidden states pass the host: {reason}" in caplog.messages) == bool(refusal and not is_check)
    payloads.close()
    await ended(incoming, memory, hop_memory, of_next)
    assert gpu.errors == [] and not gpu.memory


@pytest.mark.parametrize("kind", [StepFaultKind.CHECKSUM, StepFaultKind.NON_FINITE])
async def test_damage_on_the_device_ends_one_epoch(kind: StepFaultKind) -> None:
    """It is found when the step ends, after the payload was taken; other faults are none of the hop's."""
    refused, gpu = RefusedPeers(time.monotonic), FakeGpu()
    hop_memory, of_next = (HopMemory(FakeLocks(), FakeMappings(gpu)) for _ in range(2))
    memory = MemoryListener(refused, of_next, of_next)
    memory.listen()
    made = PayloadConnections(PayloadListener(refused), memory=memory, hop_memory=hop_memory, min_bytes=1)
    incoming, accepted = made.incoming(), forward_pb2.HopAccepted()
    incoming.expect(EPOCH, accepted, max_bytes=1000)
    payloads = hop(made)
    await payloads.open(accepted)
    await asyncio.wait_for(asyncio.gather(*payloads._changes), DEADLINE_S)
    incoming.note_fault(StepFault(kind, "damaged"))
    later, offered = (
        PayloadConnections(PayloadListener(refused), memory=memory).incoming(),
        forward_pb2.HopAccepted(),
    )
    later.expect(EPOCH, offered, max_bytes=1000)
    assert offered.HasField("memory") == (kind is not StepFaultKind.CHECKSUM)
    later.close()
    payloads.close()
    await ended(incoming, memory, hop_memory, of_next)


async def ended(incoming: IncomingPayloads, memory: MemoryListener, *ends: HopMemory) -> None:
    """All memory is released."""
    incoming.close()
    memory.close()
    gc.collect()
    await until(lambda: not any(end.device_bytes or end.locked_bytes for end in ends))
    for end in ends:
        assert await asyncio.to_thread(end.stop, timeout_s=DEADLINE_S)


async def test_an_avoided_address_is_not_dialled(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = connections()
    refused = hop(made)
    await refused.open(offer())
    reason = "the payload connection to 127.0.0.1:1 could not be opened: Connection refused"
    assert refused.fallback == made.reason_to_avoid(Address("127.0.0.1", 1)) == reason
    assert len(caplog.messages) == 1
    monkeypatch.setattr(hop_payloads, "PayloadSender", None)
    payloads = hop(made)
    await payloads.open(offer())
    assert payloads.fallback == reason
    assert await payloads.send(LARGE) is None
    assert len(caplog.messages) == 1


async def test_without_a_thread_hidden_states_travel_over_grpc(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    payloads = hop(connections())
    await payloads.open(offer())
    assert payloads.fallback == (
        "the payload connection to 127.0.0.1:1 could not be opened: no thread for it: can't start new thread"
    )
    assert await payloads.send(LARGE) is None
    assert caplog.messages == [f"hidden states travel over gRPC for 30 s: {payloads.fallback}"]
    payloads.close()
