"""What supervisors see of real processes from the start to the end of a cluster: ports and notifications."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from deploy import LocalProcess
from tests.e2e.commands import Shell, exit_code, until_logged

pytestmark = pytest.mark.asyncio(loop_scope="package")

DEADLINE_S = 60.0
EVERYWHERE = ("--health-listen", "0.0.0.0:0")


def ask(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def port_of(process: LocalProcess) -> str:
    line = await until_logged(process, "health at ")
    found = re.fullmatch(r"health at (http://\S+/)", line)
    assert found is not None
    return found[1]


async def until_ready(port: str, status: int, text: str) -> None:
    """The process is healthy meanwhile."""
    async with asyncio.timeout(DEADLINE_S):
        while (answer := await asyncio.to_thread(ask, f"{port}readyz")) != (status, f"{text}\n"):
            assert await asyncio.to_thread(ask, f"{port}healthz") == (200, "ok\n"), answer
            await asyncio.sleep(0.02)


async def test_probes_follow_the_cluster(tmp_path: Path) -> None:
    """They listen on all interfaces without certificates."""
    async with Shell(tmp_path) as shell:
        await _follow(shell)


async def _follow(shell: Shell) -> None:
    coordinator, address = await shell.coordinator(
        "--stages", "2", "--mock-model", "layers=2,vocab=100", *EVERYWHERE
    )
    of_coordinator = await port_of(coordinator)
    await until_ready(of_coordinator, 503, "waiting for workers")
    mock = ("worker", "--mock", "step=1ms", "--coordinator", address, *EVERYWHERE)
    first = await shell.start("w0", *mock, "--name", "w0")
    of_first = await port_of(first)
    await until_ready(of_first, 200, "joined without a stage")
    second = await shell.start("w1", *mock, "--name", "w1")
    of_second = await port_of(second)
    await until_ready(of_coordinator, 200, "serving")
    for port in (of_first, of_second):
        await until_ready(port, 200, "serving a stage")
    second.send_signal(signal.SIGKILL)
    await until_ready(of_first, 200, "serving a stage")
    coordinator.send_signal(signal.SIGKILL)
    await until_ready(of_first, 503, "waiting for the coordinator")
    first.send_signal(signal.SIGTERM)
    assert await exit_code(first, timeout_s=DEADLINE_S) == "exit code 0"


@pytest.mark.full
async def test_a_health_port_in_use_is_one_line(tmp_path: Path) -> None:
    async with Shell(tmp_path) as shell:
        await _refuse_one_in_use(shell)


async def _refuse_one_in_use(shell: Shell) -> None:
    coordinator, _ = await shell.coordinator("--stages", "1", "--mock-model", "layers=1", *EVERYWHERE)
    taken = (await port_of(coordinator)).removeprefix("http://").removesuffix("/")
    for command in (("worker", "--mock", "step=1ms"), ("coordinator", "--stages", "1", "--no-http")):
        process = await shell.start(f"late-{command[0]}", *command, "--health-listen", taken)
        assert await exit_code(process, timeout_s=DEADLINE_S) == "exit code 1"
        assert f"cannot serve health on {taken}" in process.last_lines(1)[0]


class Manager:
    """The socket of a service manager for one process, which has a watchdog."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self.prefix = ("/usr/bin/env", f"NOTIFY_SOCKET={path}", "WATCHDOG_USEC=60000000")
        self.told: list[str] = []

    async def until(self, line: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while line not in self.told:
                received = await asyncio.get_running_loop().sock_recv(self._socket, 4096)
                self.told += received.decode().splitlines()

    def close(self) -> None:
        self._socket.close()


@pytest.mark.full
async def test_a_service_manager_follows_the_three_processes(tmp_path: Path) -> None:
    head, worker, gateway = (Manager(tmp_path / name) for name in ("head", "worker", "gateway"))
    mock = ("--stages", "1", "--mock-model", "layers=1,vocab=100", "--no-http", "--listen", "127.0.0.1:0")
    try:
        async with Shell(tmp_path) as shell:
            coordinator = await shell.start("c", "coordinator", *mock, prefix=head.prefix)
            await head.until("READY=1")
            assert "STATUS=serving" not in head.told, "workers could not start after it"
            at = ("--coordinator", await coordinator.listening_address(timeout_s=DEADLINE_S))
            api = await shell.start("g", "gateway", *at, "--listen", "127.0.0.1:0", prefix=gateway.prefix)
            await shell.start("w", "worker", *at, "--mock", "step=1ms", prefix=worker.prefix)
            for manager in (worker, gateway, head):
                await manager.until("READY=1")
                await manager.until("WATCHDOG=1")
            await head.until("STATUS=serving")
            await worker.until("STATUS=serving a stage")
            assert worker.told.index("EXTEND_TIMEOUT_USEC=60000000") < worker.told.index("READY=1")
            for manager, process in ((gateway, api), (head, coordinator)):
                process.send_signal(signal.SIGTERM)
                await manager.until("STOPPING=1")
                assert await exit_code(process, timeout_s=DEADLINE_S) == "exit code 0"
            await worker.until("STATUS=waiting for the coordinator")
            assert "STOPPING=1" not in worker.told
    finally:
        for manager in (head, worker, gateway):
            manager.close()
