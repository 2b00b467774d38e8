"""Gateways of a cluster, and clients of them, as processes."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psutil

START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway that listens on `address`."""

    process: Process
    address: str


def cpu_s(pid: int) -> float:
    """Processor time of a process."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


@asynccontextmanager
async def running_gateways(
    coordinator: str, count: int, *, arguments: Sequence[str] = ()
) -> AsyncIterator[list[Gateway]]:
    """Start gateways, with further `arguments`; kill them at the end."""
    async with AsyncExitStack() as stack:
        yield [await _start(coordinator, arguments, stack) for _ in range(count)]


async def _start(coordinator: str, arguments: Sequence[str], stack: AsyncExitStack) -> Gateway:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "stageline", "gateway"),
        *("--coordinator", coordinator, "--listen", "127.0.0.1:0", "--log-level", "error", *arguments),
        stdout=PIPE,
    )
    stack.push_async_callback(_kill, process)
    assert process.stdout is not None
    async with asyncio.timeout(START_TIMEOUT_S):
        line = (await process.stdout.readline()).decode()
    return Gateway(process, line.rpartition(" ")[2].strip())


@dataclass(frozen=True, slots=True)
class EventCount:
    """What the streams of a client have received; `bad` responses were no streams."""

    started: int
    events: int
    bad: int


class EventClient:
    """A process that reads streams (`bench.harness.sse_client`)."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def count(self) -> EventCount:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return EventCount(*map(int, (await self._process.stdout.readline()).split()))


@asynccontextmanager
async def running_streams_of(
    gateways: Sequence[Gateway], num_streams: int, path: str, body: dict[str, Any]
) -> AsyncIterator[EventClient]:
    """Read streams, evenly over the gateways, until the end of the context."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.harness.sse_client", path, json.dumps(body), str(num_streams)),
        *(gateway.address for gateway in gateways),
        stdin=PIPE,
        stdout=PIPE,
    )
    try:
        yield EventClient(process)
    finally:
        await _kill(process)


@asynccontextmanager
async def running_hostile_client(gateway: Gateway, num_connections: int) -> AsyncIterator[list[int]]:
    """Send hostile bodies until the end of the context; yield the statuses, which grow."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.harness.hostile_client", gateway.address, str(num_connections)),
        stdout=PIPE,
    )
    statuses: list[int] = []

    async def read() -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            statuses.append(int(line))

    reading = asyncio.create_task(read())
    try:
        yield statuses
    finally:
        await _kill(process)
        await reading


async def _kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
