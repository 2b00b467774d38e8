"""Notifications to systemd: settings, what is told when, and sockets of both kinds."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from telemetry.service_manager import (
    UNSUPERVISED,
    NotifySettings,
    Supervision,
    read_notify_settings,
    supervised,
)
from wire.condition import STARTING, Condition, ProcessState

DEADLINE_S = 60.0
READY, DRAINING = Condition("serving", is_ready=True), Condition("draining", is_stopping=True)
EXTENDED = {"EXTEND_TIMEOUT_USEC": 60_000_000}


def test_settings_are_read_from_the_variables_of_systemd() -> None:
    def read(**variables: str) -> NotifySettings:
        return read_notify_settings(variables, pid=7)

    assert read() == read(WATCHDOG_USEC="5") == UNSUPERVISED
    assert read(NOTIFY_SOCKET="@a") == NotifySettings("@a", None)
    assert read(NOTIFY_SOCKET="/a", WATCHDOG_USEC="2500000") == NotifySettings("/a", 2.5)
    assert read(NOTIFY_SOCKET="/a", WATCHDOG_USEC="1", WATCHDOG_PID="7").watchdog_s == 1e-6
    assert read(NOTIFY_SOCKET="/a", WATCHDOG_USEC="1", WATCHDOG_PID="8").watchdog_s is None
    for wrong in ({"NOTIFY_SOCKET": "vsock:2"}, {"NOTIFY_SOCKET": "/a", "WATCHDOG_USEC": "soon"}):
        with pytest.raises(ValueError, match=r"must be"):
            read(**wrong)


def test_each_change_is_told_once_and_the_watchdog_always() -> None:
    supervision = Supervision(watchdog=True, is_started=lambda condition: condition.is_ready)
    assert supervision.next_fields(STARTING) == {"STATUS": "starting", "WATCHDOG": 1, **EXTENDED}
    assert supervision.next_fields(STARTING) == {"WATCHDOG": 1, **EXTENDED}
    assert supervision.next_fields(READY) == {"READY": 1, "STATUS": "serving", "WATCHDOG": 1}
    assert supervision.next_fields(READY) == {"WATCHDOG": 1}
    assert supervision.next_fields(STARTING) == {"STATUS": "starting", "WATCHDOG": 1}
    assert supervision.next_fields(READY) == {"STATUS": "serving", "WATCHDOG": 1}
    assert supervision.last_fields() == {"STOPPING": 1}
    assert supervision.next_fields(DRAINING) == {
        "STOPPING": 1,
        "STATUS": "draining",
        "WATCHDOG": 1,
        **EXTENDED,
    }
    assert supervision.next_fields(DRAINING) == {"WATCHDOG": 1, **EXTENDED}
    assert supervision.last_fields() == {}


def test_without_a_watchdog_nothing_is_told_between_changes() -> None:
    supervision = Supervision(watchdog=False, is_started=lambda condition: condition.is_ready)
    assert supervision.next_fields(READY) == {"READY": 1, "STATUS": "serving"}
    assert supervision.next_fields(READY) == {}


class Manager:
    """The socket of a service manager."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self.socket.setblocking(False)
        self.lines: list[str] = []

    async def until(self, line: str) -> None:
        """Wait for a line that was not waited for."""
        async with asyncio.timeout(DEADLINE_S):
            while line not in self.lines:
                received = await asyncio.get_running_loop().sock_recv(self.socket, 4096)
                self.lines += received.decode().splitlines()
        del self.lines[: self.lines.index(line) + 1]


@asynccontextmanager
async def managed(
    address: str, condition: Callable[[], Condition], watchdog_s: float | None = None
) -> AsyncIterator[Manager]:
    manager = Manager(address)
    try:
        async with supervised(NotifySettings(address, watchdog_s), condition):
            yield manager
        await manager.until("STOPPING=1")
    finally:
        manager.socket.close()


@pytest.mark.parametrize("is_abstract", [False, True])
async def test_a_process_is_followed_to_its_end(tmp_path: Path, *, is_abstract: bool) -> None:
    state = ProcessState()
    address = f"@stageline-test-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    async with managed(address, state.current) as manager:
        await manager.until("STATUS=starting")
        await manager.until("EXTEND_TIMEOUT_USEC=60000000")
        state.follow(lambda: READY)
        await manager.until("READY=1")
        await manager.until("STATUS=serving")


async def test_a_hanging_loop_starves_the_watchdog(tmp_path: Path) -> None:
    async with managed(str(tmp_path / "notify"), lambda: READY, watchdog_s=0.3) as manager:
        for _ in range(3):
            await manager.until("WATCHDOG=1")
        manager.lines.clear()
        _drain(manager.socket)
        _block_the_loop(0.9)
        assert _drain(manager.socket) == b""
        await manager.until("WATCHDOG=1")


def _block_the_loop(time_s: float) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.settimeout(time_s)
        with pytest.raises(TimeoutError):
            left.recv(1)


def _drain(of: socket.socket) -> bytes:
    received = b""
    while True:
        try:
            received += of.recv(4096)
        except BlockingIOError:
            return received


async def test_a_lost_manager_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = ProcessState()
    with caplog.at_level(logging.WARNING):
        async with supervised(NotifySettings(str(tmp_path / "gone"), 0.001), state.current):
            async with asyncio.timeout(DEADLINE_S):
                while not caplog.messages:
                    await asyncio.sleep(0.01)
    assert caplog.messages == ["the service manager is not notified: No such file or directory"]
