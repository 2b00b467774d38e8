"""Hidden states in shared memory: tokens stay the same, none of their bytes travels on a connection."""

from __future__ import annotations

import gc
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stage_worker import next_stage_stream
from stage_worker.config import SameHost, WorkerConfig
from stageline_rpc.v1 import cluster_pb2
from tests.faults.byte_proxy import ByteProxy
from tests.integration.calls import until
from tests.integration.cluster import Answer, Cluster
from tests.integration.request_cases import SoloRuns, mixed_cases
from tests.integration.test_cluster_faults import reported_faults
from tests.ports import unused_address
from tests.unit.wire.test_payload_memory import segments
from wire import payload_memory, shared_segment
from wire.frames import encode_hidden_states
from wire.payload_memory import MemoryReceiver, MemorySender
from wire.payloads import PayloadNotice
from wire.staging import HOP_DATA_OFFSET
from wire.tensors import HopRoute

NUM_STAGES = 3
MIDDLE = "w1"
SHARED, TCP = cluster_pb2.HOP_TRANSPORT_SHARED_MEMORY, cluster_pb2.HOP_TRANSPORT_TCP
GRPC, NOWHERE = cluster_pb2.HOP_TRANSPORT_GRPC, cluster_pb2.HOP_TRANSPORT_UNSPECIFIED


class SharingCluster(Cluster):
    """Payload connections into MIDDLE pass `line`; without shared memory, all hidden states do."""

    def __init__(
        self, model: Path, line: ByteProxy, hidden_states: HopRoute = HopRoute.AUTO, **of_middle: Any
    ) -> None:
        super().__init__(
            model, layers=(1,) * NUM_STAGES, same_host=SameHost.AUTO, hidden_states=hidden_states
        )
        self._line, self._of_middle = line, of_middle

    def worker_config(self, name: str, *arguments: Any, **more: Any) -> WorkerConfig:
        config = replace(super().worker_config(name, *arguments, **more), min_payload_bytes=1)
        if name != MIDDLE:
            return config
        through_line = {"payload_listen": self._line.target, "payload_advertise": self._line.address}
        return replace(config, **through_line | self._of_middle)

    async def transports(self) -> list[int]:
        """Of the hops in the present epoch, in order, as the status has them."""

        def is_told(status: cluster_pb2.GetStatusResponse) -> bool:
            return all(worker.hop_transport for worker in status.workers if worker.stage < NUM_STAGES - 1)

        status = await self.wait_status(is_told)
        return [worker.hop_transport for worker in sorted(status.workers, key=lambda worker: worker.stage)]


@pytest.fixture(scope="module")
def solo(varied_llama: Path) -> SoloRuns:
    return SoloRuns(varied_llama)


@asynccontextmanager
async def serving(
    model: Path, hidden_states: HopRoute = HopRoute.AUTO, **of_middle: Any
) -> AsyncIterator[tuple[SharingCluster, ByteProxy]]:
    """No segment is left behind."""
    async with ByteProxy(unused_address()) as line:
        async with SharingCluster(model, line, hidden_states, **of_middle) as cluster:
            yield cluster, line
        gc.collect()
        assert segments() == []


def has_begun(answers: list[Answer]) -> bool:
    return all(len(answer.tokens) >= 3 for answer in answers)


async def test_hidden_states_travel_in_shared_memory(varied_llama: Path, solo: SoloRuns) -> None:
    async with serving(varied_llama) as (cluster, line):
        solo.check(await cluster.generate_all(mixed_cases(6)))
        assert line.num_connections == 0
        assert await cluster.transports() == [SHARED, SHARED, NOWHERE]
        status = await cluster.client.status()
        assert {worker.same_host_fallback for worker in status.workers} == {""}


def mapped_bytes() -> int:
    """Size of the segments that this process has mapped, each once."""
    sizes: dict[str, int] = {}
    for line in segments():
        if line.startswith("/"):
            continue  # an open file
        begin, end = line.split()[0].split("-")
        sizes[line.split()[4]] = int(end, 16) - int(begin, 16)
    return sum(sizes.values())


@pytest.mark.matrix(1)
@pytest.mark.parametrize("of_middle", [{}, {"same_host": SameHost.OFF}], ids=["all", "not the middle"])
async def test_the_plan_counts_the_memory_that_stages_share(
    varied_llama: Path, of_middle: dict[str, Any]
) -> None:
    async with serving(varied_llama, **of_middle) as (cluster, _):
        await cluster.generate_all(mixed_cases(2))
        plan = cluster.server.controller.state.plan
        assert plan is not None
        planned = [stage.segment_bytes for stage in plan.stages]
        assert planned[0] == planned[1] and planned[2] == 0
        assert bool(planned[0]) is not bool(of_middle)
        assert mapped_bytes() == sum(planned)
        assert all(stage.total_bytes <= stage.memory_bytes for stage in plan.stages)


@pytest.mark.full
async def test_no_hidden_states_are_in_frames(
    varied_llama: Path, solo: SoloRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes = {"in frames": 0, "beside": 0}

    def counted(*step: Any, notice: PayloadNotice | None, **more: Any) -> Any:
        if notice is None:
            num_bytes["in frames"] += sum(tensor.size_bytes for tensor in step[2])
        else:
            num_bytes["beside"] += notice.size_bytes
        return encode_hidden_states(*step, notice=notice, **more)

    monkeypatch.setattr(next_stage_stream, "encode_hidden_states", counted)
    async with serving(varied_llama) as (cluster, _):
        solo.check(await cluster.generate_all(mixed_cases(6)))
    assert num_bytes["in frames"] == 0 and num_bytes["beside"] > 10_000


async def test_a_worker_that_shares_no_memory_gets_a_connection(varied_llama: Path, solo: SoloRuns) -> None:
    async with serving(varied_llama, same_host=SameHost.OFF) as (cluster, line):
        solo.check(await cluster.generate_all(mixed_cases(6)))
        assert line.num_bytes > 10_000
        assert await cluster.transports() == [TCP, TCP, NOWHERE]
        status = await cluster.client.status()
        assert {worker.same_host_fallback for worker in status.workers} == {""}


async def test_without_any_offer_hidden_states_travel_over_grpc(varied_llama: Path, solo: SoloRuns) -> None:
    off = {"payload_listen": "off", "payload_advertise": None, "same_host": SameHost.OFF}
    async with serving(varied_llama, **off) as (cluster, _):
        solo.check(await cluster.generate_all(mixed_cases(2)))
        assert await cluster.transports() == [GRPC, TCP, NOWHERE]


@pytest.mark.matrix(1)
@pytest.mark.parametrize("of_middle", [{}, {"same_host": SameHost.OFF}], ids=["memory", "connection"])
async def test_the_coordinator_puts_all_hidden_states_into_frames_whatever_workers_offer(
    varied_llama: Path, solo: SoloRuns, of_middle: dict[str, Any]
) -> None:
    async with serving(varied_llama, HopRoute.GRPC, **of_middle) as (cluster, line):
        solo.check(await cluster.generate_all(mixed_cases(6)))
        assert await cluster.transports() == [GRPC, GRPC, NOWHERE]
        assert line.num_connections == 0 and mapped_bytes() == 0
        status = await cluster.client.status()
        assert {(worker.payload_fallback, worker.same_host_fallback) for worker in status.workers} == {
            ("", "")
        }
        plan = cluster.server.controller.state.plan
        assert plan is not None
        assert [stage.segment_bytes for stage in plan.stages] == [0] * NUM_STAGES


async def test_memory_that_cannot_be_shared_is_told_before_the_epoch(
    varied_llama: Path, solo: SoloRuns, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As between containers with networks of their own: one kernel, and the socket is out of reach."""
    numbers = itertools.count()
    monkeypatch.setattr(payload_memory, "socket_address", lambda name: f"\0{name}-{next(numbers)}")
    async with serving(varied_llama) as (cluster, line):
        epoch = cluster.epoch
        solo.check(await cluster.generate_all(mixed_cases(2)))
        assert cluster.epoch == epoch
        assert line.num_bytes > 1_000
        assert await cluster.transports() == [TCP, TCP, NOWHERE]
        reason = "memory shared with the next stage could not be opened: Connection refused"
        status = await cluster.wait_status(
            lambda status: sum(bool(worker.same_host_fallback) for worker in status.workers) == NUM_STAGES - 1
        )
        assert {worker.same_host_fallback for worker in status.workers} == {reason, ""}
    logged = f"hidden states do not travel in shared memory for 30 s: {reason}"
    assert caplog.messages.count(logged) == NUM_STAGES - 1


def _overwritten(slot: Any, number: int) -> None:
    shared_segment._STAMP.pack_into(slot, 0, 1, number + 1, 4, 0)


def _flipped(slot: Any, number: int) -> None:
    slot[HOP_DATA_OFFSET] ^= 1


def _stale(slot: Any, number: int) -> None:
    shared_segment._STAMP.pack_into(slot, 0, 0, number, 4, 0)


@pytest.mark.matrix(0)
@pytest.mark.parametrize(
    ("change", "kind"),
    [(_overwritten, "UNDECODABLE"), (_flipped, "CHECKSUM"), (_stale, "UNDECODABLE")],
    ids=["overwritten", "falsified", "stale"],
)
async def test_a_damaged_slot_ends_one_epoch_and_changes_no_token(
    varied_llama: Path,
    solo: SoloRuns,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Any, int], None],
    kind: str,
) -> None:
    send, is_armed = MemorySender.send, [False]

    async def send_and_change(sender: MemorySender, data: Any) -> Any:
        notice = await send(sender, data)
        if is_armed[0] and notice is not None and sender._segment is not None:
            is_armed[0] = False
            change(sender._segment.slot(sender._written[notice.number]), notice.number)
        return notice

    monkeypatch.setattr(MemorySender, "send", send_and_change)
    async with serving(varied_llama) as (cluster, _):
        epoch = cluster.epoch
        async with cluster.generating(mixed_cases(6)) as answers:
            await until(lambda: has_begun(answers))
            is_armed[0] = True
        solo.check(answers)
        assert cluster.epoch == epoch + 1
        # The next epoch does not share the memory of this hop.
        assert sorted(await cluster.transports()) == sorted([SHARED, TCP, NOWHERE])
    assert {found for _, found in reported_faults(caplog)} == {kind}
    assert "hidden states do not travel in shared memory for 30 s: a payload did not arrive" in caplog.text


@pytest.mark.full
async def test_a_receiver_that_breaks_the_hop_ends_one_epoch(
    varied_llama: Path, solo: SoloRuns, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take, is_armed = MemoryReceiver.take, [False]

    async def take_and_close(receiver: MemoryReceiver, notice: Any) -> Any:
        payload = await take(receiver, notice)
        if is_armed[0] and receiver._socket is not None:
            is_armed[0] = False
            receiver._socket.close()
        return payload

    monkeypatch.setattr(MemoryReceiver, "take", take_and_close)
    async with serving(varied_llama) as (cluster, _):
        epoch = cluster.epoch
        async with cluster.generating(mixed_cases(6)) as answers:
            await until(lambda: has_begun(answers))
            is_armed[0] = True
        solo.check(answers)
        assert cluster.epoch == epoch + 1
    assert {found for _, found in reported_faults(caplog)} == {"NEIGHBOUR"}
    assert "memory shared with the next stage broke: the connection was closed" in caplog.text
