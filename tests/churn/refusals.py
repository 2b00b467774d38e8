"""Refused and failed requests of a gateway: memory after each kind of end stays flat."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from httpx2 import AsyncClient

from builtin_model import MODEL_DIRECTORY
from coordinator.api.grammars import ENTRY_BYTES, MAX_REMEMBERED_BYTES
from deploy import LocalCluster, LocalClusterConfig
from tests.churn.report import MB, MOST_GROWTH_BYTES
from tests.e2e.clusters import START_TIMEOUT_S
from tests.e2e.commands import ENVIRONMENT
from tests.faults.byte_proxy import ByteProxy
from tests.ports import unused_address
from tests.temporary import run_directory

GATEWAY = "gateway"
AT_ONCE = 32
WINDOWS = ((0.2, 0.4), (0.8, 1.0))
"""Shares of the requests after which medians of memory are compared: caches and the allocator's arenas fill
before, which takes some 800 requests of a kind, so that fewer than 4,000 tell little. The allocator gives
back some megabytes now and then."""
TIMEOUT_S = 600.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = list(range(3, 1000)) * 2
LONG = {"prompt": PROMPT[:500], "max_tokens": 1400, "ignore_eos": True}
STREAM = {**LONG, "stream": True}


JSON = {"content-type": "application/json"}


_NUMBER = "n0000000"


def _with_schema(properties: dict[str, Any]) -> bytes:
    schema = {"type": "object", "properties": properties}
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    }
    return json.dumps(body).encode()


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway under test, between its clients and a proxy to the coordinator."""

    http: AsyncClient
    proxy: ByteProxy
    processes: Mapping[str, psutil.Process]
    """The gateway and the coordinator."""
    numbers: Iterator[int] = field(default_factory=itertools.count)

    async def refused(self, status: int, path: str, body: bytes) -> None:
        """A request that is refused; its number is in place of `_NUMBER`, so that each is another one."""
        body = body.replace(_NUMBER.encode(), f"n{next(self.numbers):07}".encode())
        response = await self.http.post(path, content=body, headers=JSON)
        if response.status_code != status:
            raise AssertionError(f"status {response.status_code}, expected {status}: {response.text[:300]}")

    async def left(self) -> None:
        """A client that leaves a running stream."""
        async with self.http.stream("POST", COMPLETIONS, json=STREAM) as response:
            await anext(response.aiter_lines())

    async def lost(self) -> None:
        """A stream whose coordinator is gone."""
        async with self.http.stream("POST", COMPLETIONS, json=STREAM) as response:
            text = (await response.aread()).decode()
        if '"error"' not in text:
            raise AssertionError(f"a lost stream ends without an error: {text[-300:]}")

    async def lose_coordinator(self) -> None:
        """Cut the connection for longer than the gateway waits, once the streams run."""
        await asyncio.sleep(0.5)
        target, self.proxy.target = self.proxy.target, unused_address()
        self.proxy.cut()
        await asyncio.sleep(1.0)
        self.proxy.target = target

    async def until_ready(self) -> None:
        async with asyncio.timeout(START_TIMEOUT_S):
            while (await self.http.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to end. `beside` runs with each round of requests; `share` of the number is sent."""

    name: str
    run: Callable[[Gateway], Awaitable[None]]
    beside: Callable[[Gateway], Awaitable[None]] | None = None
    fills_limit: bool = False
    share: float = 1.0


_UNKNOWN = json.dumps({**LONG, "model": "x"}).encode()
_SHORT = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
_PATTERN = json.dumps({"prompt": PROMPT, "max_tokens": 1, "guided_regex": f"({_NUMBER}"}).encode()
_LARGE = {f"property_{index}": {"type": "integer"} for index in range(2400)}
_WRONG_SCHEMA = _with_schema(
    {_NUMBER: {"type": "nothing", "examples": [{name: _LARGE[name]} for name in _LARGE]}}
)
_SLOW_SCHEMA = _with_schema({_NUMBER: {}, **_LARGE})

KINDS = (
    Kind("refused by the gateway", lambda gateway: gateway.refused(404, COMPLETIONS, _UNKNOWN)),
    Kind(
        "regular expression refused, prompt of 1,994 ids",
        lambda gateway: gateway.refused(400, COMPLETIONS, _PATTERN),
    ),
    Kind("wrong schema of 90 KB", lambda gateway: gateway.refused(400, CHAT, _WRONG_SCHEMA)),
    Kind(  # one at a time, in one to four seconds each
        "schema of 90 KB too large to compile",
        lambda gateway: gateway.refused(400, CHAT, _SLOW_SCHEMA),
        share=0.02,
    ),
    Kind("client left", Gateway.left, share=0.5),  # the coordinator keeps 1,024 of them
    Kind(  # 1.5 s for each round, and a new connection to the coordinator
        "coordinator lost", Gateway.lost, beside=Gateway.lose_coordinator, share=0.1
    ),
    Kind(
        "429, prompt of 1,994 ids",
        lambda gateway: gateway.refused(429, COMPLETIONS, _SHORT),
        fills_limit=True,
    ),
)


@dataclass(slots=True)
class Growth:
    """Resident memory of a process around the requests of one kind."""

    kind: str
    process: str
    num_requests: int
    seconds: float
    before_bytes: int
    after_bytes: int

    @property
    def most_bytes(self) -> float:
        """A coordinator remembers refused grammars, up to a limit that more requests would reach."""
        if self.process == GATEWAY:
            return MOST_GROWTH_BYTES
        return MOST_GROWTH_BYTES + min(MAX_REMEMBERED_BYTES, ENTRY_BYTES * self.num_requests)

    @property
    def has_passed(self) -> bool:
        return self.after_bytes - self.before_bytes <= self.most_bytes

    def line(self) -> str:
        growth = (self.after_bytes - self.before_bytes) / MB
        return (
            f"{self.kind}: {self.num_requests} requests in {self.seconds:.0f} s, "
            f"{self.process} {self.before_bytes / MB:.1f} -> "
            f"{self.after_bytes / MB:.1f} MB, {growth:+.2f} MB (at most {self.most_bytes / MB:+.1f} MB): "
            f"{'PASS' if self.has_passed else 'FAIL'}"
        )


@dataclass(slots=True)
class RefusalReport:
    """Growth by kind and process."""

    growths: list[Growth] = field(default_factory=list)

    @property
    def has_passed(self) -> bool:
        return all(growth.has_passed for growth in self.growths)


async def run_refusals(number: int, *, logs: Path | None, say: Callable[[str], None]) -> RefusalReport:
    """Send `number` requests of each kind through one gateway."""
    report = RefusalReport()
    with run_directory("churn", logs) as directory:
        for fills_limit in (True, False):
            async with _serving(
                directory / f"limit-{fills_limit}".lower(), fills_limit=fills_limit
            ) as gateway:
                for kind in (kind for kind in KINDS if kind.fills_limit is fills_limit):
                    for growth in await _measure(gateway, kind, round(number * kind.share)):
                        report.growths.append(growth)
                        say(growth.line())
    return report


@asynccontextmanager
async def _serving(logs: Path, *, fills_limit: bool) -> AsyncIterator[Gateway]:
    """A mock stage that takes its time, so that streams run until they are ended.

    With `fills_limit`, a client may have one request, and that takes longer than all others together.
    """
    config = LocalClusterConfig(
        num_workers=1,
        mocks=("step=5s" if fills_limit else "step=20ms",),
        model=MODEL_DIRECTORY,
        coordinator_arguments=(
            "--trace-store",
            "64",
            *(("--max-client-requests", "1") if fills_limit else ()),
        ),
        environment=ENVIRONMENT,
        log_directory=logs,
    )
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(LocalCluster(config))
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        proxy = await stack.enter_async_context(ByteProxy(cluster.address))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "stageline", "gateway", "--log-level", "error"),
            *("--coordinator", proxy.address, "--listen", "127.0.0.1:0", "--coordinator-timeout", "0.5"),
            stdout=asyncio.subprocess.PIPE,
        )
        stack.push_async_callback(_kill, process)
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().rpartition(" ")[2].strip()
        http = await stack.enter_async_context(AsyncClient(base_url=f"http://{address}", timeout=TIMEOUT_S))
        pids = {GATEWAY: process.pid, "coordinator": cluster.coordinator.pid}
        gateway = Gateway(http, proxy, {name: psutil.Process(pid) for name, pid in pids.items()})
        await gateway.until_ready()
        yield gateway


async def _kill(process: asyncio.subprocess.Process) -> None:
    process.kill()
    await process.wait()


async def _measure(gateway: Gateway, kind: Kind, number: int) -> list[Growth]:
    began_s = time.monotonic()
    async with AsyncExitStack() as running:
        if kind.fills_limit:
            body = {**STREAM, "max_tokens": 1500}
            await running.enter_async_context(gateway.http.stream("POST", COMPLETIONS, json=body))
        resident = await _send(gateway, kind, number)
    seconds = time.monotonic() - began_s
    return [Growth(kind.name, name, number, seconds, *_compared(each)) for name, each in resident.items()]


def _compared(resident: Sequence[int]) -> Iterator[int]:
    for begin, end in WINDOWS:
        yield round(median(resident[int(begin * len(resident)) : max(1, int(end * len(resident)))]))


async def _send(gateway: Gateway, kind: Kind, number: int) -> dict[str, list[int]]:
    """Return the resident bytes of each process after each round."""
    resident: dict[str, list[int]] = {name: [] for name in gateway.processes}
    for begin in range(0, number, AT_ONCE):
        runs = [kind.run(gateway) for _ in range(min(AT_ONCE, number - begin))]
        if kind.beside is not None:
            runs.append(kind.beside(gateway))
        await asyncio.gather(*runs)
        await gateway.until_ready()
        for name, process in gateway.processes.items():
            resident[name].append(process.memory_info().rss)
    return resident
