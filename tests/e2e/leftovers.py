"""Checks that a stopped cluster leaves no process, port or file."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import psutil

from tests.fake_processes import is_running, wait_until
from wire.addresses import parse_address


def processes_under(pid: int) -> list[int]:
    """Ids of all descendants of a process."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def listening_ports(pids: list[int]) -> list[int]:
    """TCP ports on which these processes listen."""
    return [
        connection.laddr.port
        for pid in pids
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


async def wait_until_ended(pids: list[int], *, timeout_s: float = 10.0) -> None:
    """Wait until all these processes have ended. Raises TimeoutError."""
    await asyncio.to_thread(wait_until, lambda: not any(is_running(pid) for pid in pids), timeout_s=timeout_s)


def is_free(address: str) -> bool:
    """Whether no process listens on the address."""
    where = parse_address(address)
    with socket.socket() as probe:
        return probe.connect_ex((where.host, where.port)) != 0


def leftover_files(temporary: Path) -> list[Path]:
    """Files left in a directory for temporary files."""
    return list(temporary.iterdir())


def assert_nothing_left(pids: list[int], ports: list[int], temporary: Path) -> None:
    """Assert that no process, port or file is left. `pids` and `ports` must not be empty."""
    assert pids
    assert ports
    assert [pid for pid in pids if is_running(pid)] == []
    assert [port for port in ports if not is_free(f"127.0.0.1:{port}")] == []
    assert leftover_files(temporary) == []
