"""A worker joins, loads, heartbeats, rejoins after a broken stream, and leaves on request."""

import asyncio
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from checkpoint import DType
from stage_worker.assignment import Assignment
from stage_worker.backends import torch_backend
from stage_worker.backends.contract import DeviceError
from stage_worker.coordinator_client import JoinRefused
from stage_worker.loading import stage_loader
from stage_worker.policy import WORKER_POLICY
from stage_worker.server import Worker
from stageline_rpc.internal.v1 import join_pb2
from stageline_rpc.v1 import cluster_pb2
from tests.integration.doubles import DEADLINE_S, CoordinatorDouble, WorkerLink
from tests.integration.scenario import assert_same, expected_outputs, run_scenario
from tests.integration.stage_bench import (
    assign_message,
    new_assignment,
    running_worker,
    stage_bench,
    worker_config,
)
from wire.channels import PROTOCOL_VERSION
from wire.ids import StageRole
from wire.payload_memory import memory_domain
from wire.transport import TransportSettings


@pytest.fixture
async def coordinator() -> AsyncIterator[CoordinatorDouble]:
    double = CoordinatorDouble()
    await double.start()
    yield double
    await double.stop()


@pytest.fixture
def assignment(tiny_llama: Path) -> Assignment:
    return new_assignment(tiny_llama, stage=1)


class Gate:
    """Blocks calls of `wrap`ped functions until it is opened; counts the calls."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.called = threading.Event()
        self.num_calls = 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def gated(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            self.called.set()
            assert self.opened.wait(DEADLINE_S)
            return function(*args, **kwargs)

        return gated

    async def wait_called(self) -> None:
        assert await asyncio.to_thread(self.called.wait, DEADLINE_S), "never called"


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


async def load(link: WorkerLink, assignment: Assignment) -> join_pb2.StageLoaded:
    link.send(assign=assign_message(assignment))
    loaded: join_pb2.StageLoaded = await link.answer("loaded")
    assert loaded.plan_id == assignment.plan_id
    return loaded


async def test_hello_has_identity_and_address_of_the_worker(coordinator: CoordinatorDouble) -> None:
    async with running_worker(worker_config(coordinator.address)) as worker:
        hello = (await coordinator.link()).hello
        port = worker.listen_address.rpartition(":")[2]
        assert hello == join_pb2.WorkerHello(
            protocol_version=PROTOCOL_VERSION,
            name=f"{socket.gethostname()}-{port}",
            incarnation=hello.incarnation,
            address=f"127.0.0.1:{port}",
            supports_bf16=torch.ops.mkldnn._is_mkldnn_bf16_supported(),
            device="cpu",
            memory_bytes=1 << 30,
            last_epoch=0,
            pid=os.getpid(),
            hostname=socket.gethostname(),
            memory_domain=memory_domain(),
        )
        assert len(hello.incarnation) == 16


async def test_a_wildcard_address_is_advertised_as_the_outgoing_address(
    coordinator: CoordinatorDouble,
) -> None:
    anywhere = TransportSettings(insecure=True)
    config = replace(worker_config(coordinator.address), listen="0.0.0.0:0", transport=anywhere)
    async with running_worker(config) as worker:
        port = worker.listen_address.removeprefix("0.0.0.0:")
        assert (await coordinator.link()).hello.address == f"127.0.0.1:{port}"


async def test_a_given_address_and_name_are_advertised(coordinator: CoordinatorDouble) -> None:
    config = replace(worker_config(coordinator.address, name="gpu-a"), advertise="gpu-a.example:7481")
    async with running_worker(config):
        hello = (await coordinator.link()).hello
        assert (hello.name, hello.address) == ("gpu-a", "gpu-a.example:7481")


async def test_heartbeats_continue_while_a_model_loads(
    coordinator: CoordinatorDouble, assignment: Assignment, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_backend, "load_stage", gate.wrap(stage_loader.load_stage))
    async with running_worker(worker_config(coordinator.address)):
        link = await coordinator.link()
        link.send(assign=assign_message(assignment))
        for _ in range(3):
            heartbeat = await link.next_heartbeat()
            assert (heartbeat.load_progress, heartbeat.weight_bytes) == (0.0, 0)
            assert heartbeat.resident_bytes > 0
        assert link.answers.empty()
        gate.opened.set()
        loaded = await link.answer("loaded")
        heartbeat = await link.next_heartbeat()
        assert heartbeat.load_progress == 1.0
        assert (heartbeat.weight_bytes, heartbeat.kv_bytes) == (loaded.weight_bytes, loaded.kv_bytes)
        assert heartbeat.kv.blocks_free == assignment.num_blocks
        assert loaded.kv_bytes == assignment.num_blocks * assignment.block_size * 2 * 2 * 16 * 4


async def test_loaded_is_reported_after_the_warm_up(
    coordinator: CoordinatorDouble, assignment: Assignment, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_loader, "warm_up", gate.wrap(stage_loader.warm_up))
    async with running_worker(worker_config(coordinator.address)):
        link = await coordinator.link()
        link.send(assign=assign_message(assignment))
        await gate.wait_called()
        await link.next_heartbeat()
        assert link.answers.empty(), "reported as loaded before the warm-up"
        gate.opened.set()
        loaded = await link.answer("loaded")
        assert loaded.warmup_ms > 0


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({"fingerprint": "0" * 32}, ["fingerprint", "expected " + "0" * 32]),
        ({"model_directory": "/nowhere/at/all"}, ["/nowhere/at/all is not a directory"]),
        ({"layer_begin": 2, "layer_end": 5}, ["[2, 5)", "3 layers"]),
        ({"layer_begin": 0}, ["[0, 2) of 3", "expected MIDDLE"]),
        ({"layer_end": 3}, ["[1, 3) of 3", "expected MIDDLE"]),
        ({"num_blocks": 1 << 24}, ["bytes of weights", "16777216 blocks of 4 tokens", "has 1073741824"]),
    ],
    ids=["fingerprint", "path", "layers", "no-embeddings", "no-head", "memory"],
)
async def test_an_assignment_that_cannot_be_loaded_is_rejected(
    coordinator: CoordinatorDouble, assignment: Assignment, change: dict[str, Any], reasons: list[str]
) -> None:
    async with running_worker(worker_config(coordinator.address)):
        link = await coordinator.link()
        link.send(assign=assign_message(replace(assignment, plan_id=1, **change)))
        failed = await link.answer("load_failed")
        assert failed.plan_id == 1
        for reason in reasons:
            assert reason in failed.reason
        await load(link, replace(assignment, plan_id=2))


async def test_an_inconsistent_assignment_is_rejected(
    coordinator: CoordinatorDouble, assignment: Assignment
) -> None:
    async with running_worker(worker_config(coordinator.address)):
        link = await coordinator.link()
        message = assign_message(assignment)
        message.role = cluster_pb2.STAGE_ROLE_LAST
        link.send(assign=message)
        assert "stage 1 of 3 is MIDDLE, assigned as LAST" in (await link.answer("load_failed")).reason
        await load(link, assignment)


async def test_the_model_path_of_the_worker_takes_precedence(
    coordinator: CoordinatorDouble, assignment: Assignment
) -> None:
    config = replace(worker_config(coordinator.address), model_directory=Path(assignment.model_directory))
    async with running_worker(config):
        link = await coordinator.link()
        await load(link, replace(assignment, model_directory="/only/on/the/coordinator"))


@pytest.mark.full
async def test_a_load_is_aborted_for_another_assignment(
    coordinator: CoordinatorDouble, assignment: Assignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_loaded, cancelled, go_on = asyncio.Event(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    advance, cancel = stage_loader.LoadProgress.advance, stage_loader.LoadProgress.cancel

    def gated(progress: stage_loader.LoadProgress, num_bytes: int) -> None:
        advance(progress, num_bytes)
        if 0.5 < progress.fraction < 1.0 and not go_on.is_set():
            loop.call_soon_threadsafe(half_loaded.set)
            assert go_on.wait(DEADLINE_S)

    def noticed(progress: stage_loader.LoadProgress) -> None:
        cancel(progress)
        cancelled.set()

    monkeypatch.setattr(stage_loader.LoadProgress, "advance", gated)
    monkeypatch.setattr(stage_loader.LoadProgress, "cancel", noticed)
    async with running_worker(worker_config(coordinator.address)):
        link = await coordinator.link()
        link.send(assign=assign_message(assignment))
        await asyncio.wait_for(half_loaded.wait(), DEADLINE_S)
        assert 0.5 < (await link.next_heartbeat()).load_progress < 1.0
        link.send(assign=assign_message(replace(assignment, plan_id=2, num_blocks=16)))
        await asyncio.wait_for(cancelled.wait(), DEADLINE_S)
        go_on.set()
        failed = await link.answer("load_failed")
        assert (failed.plan_id, "load cancelled" in failed.reason) == (1, True)
        assert (await link.answer("loaded")).plan_id == 2


@pytest.mark.full
async def test_a_repeated_assignment_is_not_loaded_again(
    coordinator: CoordinatorDouble, assignment: Assignment, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.opened.set()
    monkeypatch.setattr(torch_backend, "load_stage", gate.wrap(stage_loader.load_stage))
    async with running_worker(worker_config(coordinator.address)):
        link = await coordinator.link()
        await load(link, assignment)
        moved = replace(assignment, plan_id=2, stage=2, num_stages=4, role=StageRole.MIDDLE)
        await load(link, moved)
        assert gate.num_calls == 1
        for other in ({"num_blocks": 16}, {"dtype": DType.BF16}, {"max_step_tokens": 16}):
            await load(link, replace(assignment, **other))
        assert gate.num_calls == 4


async def test_a_worker_rejoins_with_its_stage_after_a_broken_stream(
    assignment: Assignment, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.opened.set()
    monkeypatch.setattr(torch_backend, "load_stage", gate.wrap(stage_loader.load_stage))
    async with stage_bench(assignment) as bench:
        expected = expected_outputs(assignment)
        assert_same(await run_scenario(bench), expected)
        num_loads = gate.num_calls
        incarnation = bench.link.hello.incarnation
        bench.link.hang_up()
        bench.link = await bench.coordinator.link()
        assert bench.link.hello.incarnation != incarnation
        assert bench.link.hello.last_epoch == 1
        assert (await bench.link.next_heartbeat()).epoch == 0
        await load(bench.link, assignment)
        assert gate.num_calls == num_loads
        assert_same(await run_scenario(bench), expected)


async def test_a_load_that_outlives_its_connection_is_kept_unreported(
    coordinator: CoordinatorDouble, assignment: Assignment, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_backend, "load_stage", gate.wrap(stage_loader.load_stage))
    async with running_worker(worker_config(coordinator.address)):
        link = await coordinator.link()
        link.send(assign=assign_message(assignment))
        await gate.wait_called()
        link.hang_up()
        link = await coordinator.link()
        gate.opened.set()
        await load(link, replace(assignment, plan_id=7))
        assert gate.num_calls == 1


class LogWatch(logging.Handler):
    """Sets `logged` when a line with `text` is logged."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text
        self.logged = asyncio.Event()
        self.num_lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self.num_lines += 1
            self.logged.set()


async def test_a_worker_waits_for_its_coordinator_and_logs_it_once(assignment: Assignment) -> None:
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        watch = LogWatch(f"waiting for the coordinator at {address}: nothing listens there")
        logger = logging.getLogger("stage_worker.coordinator_client")
        logger.addHandler(watch)
        logger.setLevel(logging.INFO)
        try:
            async with running_worker(worker_config(address)):
                await asyncio.wait_for(watch.logged.wait(), DEADLINE_S)
                reserved.close()
                coordinator = CoordinatorDouble()
                await coordinator.start(address)
                await load(await coordinator.link(), assignment)
                assert watch.num_lines == 1
                await coordinator.stop()
        finally:
            logger.removeHandler(watch)


async def test_a_worker_whose_device_failed_does_not_wait_for_the_coordinator(
    coordinator: CoordinatorDouble, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stage_worker.coordinator_client")
    worker = Worker(worker_config(coordinator.address))
    await worker.start()
    task = asyncio.create_task(worker.run())
    await coordinator.link()
    worker._note_device_failure("illegal memory access")
    await coordinator.stop()
    with pytest.raises(DeviceError, match="illegal memory access"):
        await asyncio.wait_for(task, DEADLINE_S)
    assert await worker.stop()
    assert "waiting for the coordinator" not in caplog.text
    assert f"the connection to the coordinator at {coordinator.address} ended" in caplog.text


async def test_a_rejected_handshake_stops_the_worker(coordinator: CoordinatorDouble) -> None:
    coordinator.refusal = (
        grpc.StatusCode.FAILED_PRECONDITION,
        "protocol version mismatch: expected 2, got 1",
    )
    worker = Worker(worker_config(coordinator.address))
    await worker.start()
    with pytest.raises(JoinRefused, match="expected 2, got 1"):
        await asyncio.wait_for(worker.run(), DEADLINE_S)
    assert await worker.stop()


async def test_leave_stops_the_process_if_requested(coordinator: CoordinatorDouble) -> None:
    worker = Worker(worker_config(coordinator.address))
    await worker.start()
    task = asyncio.create_task(worker.run())
    link = await coordinator.link()
    link.send(leave=join_pb2.Leave(reason="not wanted now", exit_process=False))
    again = await coordinator.link()
    assert again.hello.incarnation != link.hello.incarnation
    again.send(leave=join_pb2.Leave(reason="the cluster goes down", exit_process=True))
    await asyncio.wait_for(task, DEADLINE_S)
    assert await worker.stop()


async def test_a_coordinator_silent_for_its_lease_is_dialled_again(
    coordinator: CoordinatorDouble, caplog: pytest.LogCaptureFixture
) -> None:
    """The double answers no heartbeat, as after a partition."""
    coordinator.lease_ms = 100
    with caplog.at_level(logging.INFO):
        async with running_worker(worker_config(coordinator.address)):
            first, second = await coordinator.link(), await coordinator.link()
    assert first.hello.incarnation != second.hello.incarnation
    assert ": silent for 0.1 s" in caplog.text


async def test_the_coordinator_sets_the_drain_timeout(
    coordinator: CoordinatorDouble,
) -> None:
    coordinator.drain_timeout_ms = 600_000
    async with running_worker(worker_config(coordinator.address)) as worker:
        link = await coordinator.link()
        await link.next_heartbeat()
        assert worker.leave_timeout_s == 600 + WORKER_POLICY.loading_timeout_s
