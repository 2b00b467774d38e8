"""The worker process: its output and exit."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from stageline_rpc.internal.v1 import join_pb2
from tests.checkpoints import make_checkpoint
from tests.integration.doubles import CoordinatorDouble
from tests.integration.stage_bench import assign_message, new_assignment

DEADLINE_S = 60.0


@pytest.fixture
async def coordinator() -> AsyncIterator[CoordinatorDouble]:
    double = CoordinatorDouble()
    await double.start()
    yield double
    await double.stop()


async def start_worker(coordinator: str, *options: str, **variables: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "stageline", "worker", "--coordinator", coordinator, *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # Works with an installed project and with pytest's own import path.
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables,
    )


async def ended(process: asyncio.subprocess.Process) -> tuple[int, list[str], list[str]]:
    """Exit status, lines of stdout, lines of stderr."""
    async with asyncio.timeout(DEADLINE_S):
        stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return process.returncode, stdout.decode().splitlines(), stderr.decode().splitlines()


@pytest.mark.matrix(1)
@pytest.mark.parametrize("options", [(), ("--mock", "step=1ms")], ids=["computes", "mock"])
async def test_a_worker_that_computes_on_the_cpu_warns_of_unused_gpus(
    coordinator: CoordinatorDouble, tmp_path: Path, options: tuple[str, ...]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-a)'\n")
    program.chmod(0o755)
    path = os.pathsep.join((str(tmp_path), os.environ["PATH"]))
    process = await start_worker(coordinator.address, *options, PATH=path)
    async with asyncio.timeout(DEADLINE_S):
        await coordinator.links.get()
    process.terminate()
    await coordinator.stop()
    _, _, errors = await ended(process)
    warnings = [line for line in errors if "this worker computes on the CPU" in line]
    assert len(warnings) == (0 if options else 1)
    assert all("GPU: start it with --device auto" in line for line in warnings)


async def test_a_worker_prints_its_address_and_drains_on_sigterm(
    coordinator: CoordinatorDouble, tmp_path: Path
) -> None:
    process = await start_worker(coordinator.address, "--name", "w0")
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            line = (await process.stdout.readline()).decode().strip()
            link = await coordinator.links.get()
        assert line == f"stageline worker w0 listening on {link.hello.address}"
        assert link.hello.pid == process.pid
        assignment = new_assignment(make_checkpoint(tmp_path, "llama", num_layers=3), stage=1)
        link.send(assign=assign_message(assignment))
        await link.answer("loaded")
        process.send_signal(signal.SIGTERM)
        await link.answer("drain_requested")
        await link.next_heartbeat()
        assert process.returncode is None
        link.send(leave=join_pb2.Leave(reason="drained", exit_process=True))
        status, stdout, stderr = await ended(process)
        assert (status, stdout) == (0, [])
        assert any("drained" in line for line in stderr)
        assert not [line for line in stderr if "Traceback" in line or "ERROR" in line]
    finally:
        if process.returncode is None:
            process.kill()


@pytest.mark.full
async def test_a_second_sigterm_stops_without_draining(coordinator: CoordinatorDouble) -> None:
    process = await start_worker(coordinator.address)
    try:
        async with asyncio.timeout(DEADLINE_S):
            link = await coordinator.links.get()
        # A heartbeat shows that the signal handler is installed.
        await link.next_heartbeat()
        process.send_signal(signal.SIGTERM)
        await link.answer("drain_requested")
        process.send_signal(signal.SIGTERM)
        status, _, stderr = await ended(process)
        assert status == 0
        assert not [line for line in stderr if "Traceback" in line or "ERROR" in line]
        assert link.answers.empty()
    finally:
        if process.returncode is None:
            process.kill()


@pytest.mark.full
async def test_a_draining_worker_stops_when_its_coordinator_stops(
    coordinator: CoordinatorDouble,
) -> None:
    process = await start_worker(coordinator.address)
    try:
        async with asyncio.timeout(DEADLINE_S):
            link = await coordinator.links.get()
        await link.next_heartbeat()
        process.send_signal(signal.SIGTERM)
        await link.answer("drain_requested")
        link.hang_up()
        status, _, _ = await ended(process)
        assert status == 0
        assert coordinator.links.empty()
    finally:
        if process.returncode is None:
            process.kill()


@pytest.mark.full
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
async def test_a_worker_stops_at_once_while_waiting_for_its_coordinator(
    signal_number: signal.Signals,
) -> None:
    process = await start_worker("127.0.0.1:1")
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            await process.stdout.readline()
        process.send_signal(signal_number)
        status, _, stderr = await ended(process)
        assert status == 0
        assert sum("waiting for the coordinator at 127.0.0.1:1" in line for line in stderr) <= 1
    finally:
        if process.returncode is None:
            process.kill()


@pytest.mark.full
async def test_a_port_in_use_is_reported_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        status, stdout, stderr = await ended(await start_worker("127.0.0.1:1", "--listen", address))
    assert (status, stdout) == (1, [])
    assert len(stderr) == 1
    assert f"cannot listen on {address}" in stderr[0]


@pytest.mark.full
async def test_a_missing_device_is_reported_in_one_line() -> None:
    status, stdout, stderr = await ended(await start_worker("127.0.0.1:1", "--device", "cuda:63"))
    assert (status, stdout) == (1, [])
    assert len(stderr) == 1
    assert "cuda:63" in stderr[0]


@pytest.mark.full
async def test_a_rejected_handshake_is_reported_in_one_line(coordinator: CoordinatorDouble) -> None:
    coordinator.refusal = (
        grpc.StatusCode.FAILED_PRECONDITION,
        "protocol version mismatch: expected 2, got 1",
    )
    status, _, stderr = await ended(await start_worker(coordinator.address))
    assert status == 1
    assert "expected 2, got 1" in stderr[-1]
    assert not [line for line in stderr if "Traceback" in line]
