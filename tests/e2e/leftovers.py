"""What a cluster may leave behind when it ends: nothing."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import psutil

from tests.fake_processes import is_running, wait_until
from wire.addresses import parse_address


def processes_under(pid: int) -> list[int]:
    """The ids of all processes that a process has started, and those have."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def listening_ports(pids: list[int]) -> list[int]:
    """The TCP ports on which these processes listen."""
    return [
        connection.laddr.port
        for pid in pids
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]


async def wait_until_gone(pids: list[int], *, timeout_s: float = 10.0) -> None:
    """Returns when none of these processes runs any more. Raises TimeoutError."""
    await asyncio.to_thread(wait_until, lambda: not any(is_running(pid) for pid in pids), timeout_s=timeout_s)


def is_free(address: str) -> bool:
    """Whether nobody listens there."""
    where = parse_address(address)
    with socket.socket() as probe:
        return probe.connect_ex((where.host, where.port)) != 0


def leftover_files(temporary: Path) -> list[Path]:
    """What was made in a directory for temporary files, and is still there."""
    return list(temporary.iterdir())


def assert_nothing_left(pids: list[int], ports: list[int], temporary: Path) -> None:
    """No process, no port, no temporary file. There must have been some: an empty list proves nothing."""
    assert pids
    assert ports
    assert [pid for pid in pids if is_running(pid)] == []
    assert [port for port in ports if not is_free(f"127.0.0.1:{port}")] == []
    assert leftover_files(temporary) == []
