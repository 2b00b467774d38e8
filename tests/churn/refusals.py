"""Refused and failed requests of a gateway: memory after each kind of end stays flat."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from httpx2 import AsyncClient

from builtin_model import MODEL_DIRECTORY
from deploy import LocalCluster, LocalClusterConfig
from tests.churn.report import MB, MOST_GROWTH_BYTES
from tests.e2e.clusters import START_TIMEOUT_S
from tests.e2e.commands import ENVIRONMENT
from tests.faults.byte_proxy import ByteProxy
from tests.ports import unused_address
from tests.temporary import run_directory

AT_ONCE = 32
WINDOWS = ((0.2, 0.4), (0.8, 1.0))
"""Shares of the requests after which medians of memory are compared: caches fill before, and the allocator
gives back some megabytes now and then."""
TIMEOUT_S = 120.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = list(range(3, 1000)) * 2
LONG = {"prompt": PROMPT[:500], "max_tokens": 1400, "ignore_eos": True}
STREAM = {**LONG, "stream": True}


JSON = {"content-type": "application/json"}


def _with_schema(schema: dict[str, Any]) -> bytes:
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    }
    return json.dumps(body).encode()


_SCHEMA = {
    "type": "object",
    "properties": {f"property_{index}": {"type": "integer"} for index in range(3000)},
}


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway under test, between its clients and a proxy to the coordinator."""

    http: AsyncClient
    proxy: ByteProxy
    process: psutil.Process

    async def refused(self, status: int, path: str, body: bytes) -> None:
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
_PATTERN = json.dumps({"prompt": PROMPT, "max_tokens": 1, "guided_regex": "("}).encode()
_WITH_SCHEMA = _with_schema(_SCHEMA)

KINDS = (
    Kind("refused by the gateway", lambda gateway: gateway.refused(404, COMPLETIONS, _UNKNOWN)),
    Kind(
        "regular expression refused, prompt of 1,994 ids",
        lambda gateway: gateway.refused(400, COMPLETIONS, _PATTERN),
    ),
    Kind(
        "schema of 90 KB refused by the coordinator",
        lambda gateway: gateway.refused(400, CHAT, _WITH_SCHEMA),
    ),
    Kind("client left", Gateway.left, share=0.2),
    Kind("coordinator lost", Gateway.lost, beside=Gateway.lose_coordinator, share=0.1),
    Kind(
        "429, prompt of 1,994 ids",
        lambda gateway: gateway.refused(429, COMPLETIONS, _SHORT),
        fills_limit=True,
    ),
)


@dataclass(slots=True)
class Growth:
    """Resident memory of the gateway around the requests of one kind."""

    kind: str
    num_requests: int
    before_bytes: int
    after_bytes: int

    @property
    def has_passed(self) -> bool:
        return self.after_bytes - self.before_bytes <= MOST_GROWTH_BYTES

    def line(self) -> str:
        growth = (self.after_bytes - self.before_bytes) / MB
        return (
            f"{self.kind}: {self.num_requests} requests, {self.before_bytes / MB:.1f} -> "
            f"{self.after_bytes / MB:.1f} MB, {growth:+.2f} MB (at most {MOST_GROWTH_BYTES / MB:+.0f} MB): "
            f"{'PASS' if self.has_passed else 'FAIL'}"
        )


@dataclass(slots=True)
class RefusalReport:
    """Growth by kind."""

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
                    growth = await _measure(gateway, kind, round(number * kind.share))
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
        coordinator_arguments=("--max-client-requests", "1") if fills_limit else (),
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
        gateway = Gateway(http, proxy, psutil.Process(process.pid))
        await gateway.until_ready()
        yield gateway


async def _kill(process: asyncio.subprocess.Process) -> None:
    process.kill()
    await process.wait()


async def _measure(gateway: Gateway, kind: Kind, number: int) -> Growth:
    async with AsyncExitStack() as running:
        if kind.fills_limit:
            body = {**STREAM, "max_tokens": 1500}
            await running.enter_async_context(gateway.http.stream("POST", COMPLETIONS, json=body))
        resident = await _send(gateway, kind, number)
    before, after = (
        round(median(resident[int(begin * len(resident)) : max(1, int(end * len(resident)))]))
        for begin, end in WINDOWS
    )
    return Growth(kind.name, number, before, after)


async def _send(gateway: Gateway, kind: Kind, number: int) -> list[int]:
    """Return the gateway's resident bytes after each round."""
    resident: list[int] = []
    for begin in range(0, number, AT_ONCE):
        runs = [kind.run(gateway) for _ in range(min(AT_ONCE, number - begin))]
        if kind.beside is not None:
            runs.append(kind.beside(gateway))
        await asyncio.gather(*runs)
        await gateway.until_ready()
        resident.append(gateway.process.memory_info().rss)
    return resident
