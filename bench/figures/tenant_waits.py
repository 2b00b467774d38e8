"""Waits of a tenant while another one floods what both share."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from httpx2 import AsyncClient

from bench.harness.figure import Better, Figure, NotMeasured
from bench.harness.gateways import running_gateways
from bench.harness.group import Setting
from bench.harness.spread import percentile
from builtin_model import MODEL_DIRECTORY
from deploy import LocalCluster, LocalClusterConfig
from stageline_rpc.v1 import inference_pb2, inference_pb2_grpc
from web.api_keys import changed_keys, new_key
from wire.channels import TENANT_KEY
from wire.transport import PLAIN

ATTACKS = (
    *("one schema", "schemas", "patterns"),
    *("texts", "texts by gRPC", "token texts", "conversations"),
    *("prompts", "outputs", "answers", "kept responses"),
)
CONNECTIONS = 24
QUIET, FLOOD = "quiet", "flood"
ALLOWED_RATIO, ALLOWED_S = 2.0, 0.2
"""The goal: at most twice the wait of a quiet system, and 0.2 s more."""
START_TIMEOUT_S = 120.0
SHARE = 0.9
"""Of the requests, for the percentile beside the longest wait."""
WARM_UP_S = 2.0

Probe = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _World:
    gateway: str
    coordinator: str
    keys: Mapping[str, str]


async def measure(setting: Setting) -> list[Figure]:
    """Probe as one tenant, without and with each attack of another one."""
    rounds, attacks = (4, ATTACKS[:1]) if setting.is_quick else (25, ATTACKS)
    figures = []
    async with _world() as world, _probes(world) as probes:
        quiet = await _waits(probes, 2 * rounds)
        for name, waits_s in quiet.items():
            setting.say(f"nothing: {name} {statistics.median(waits_s):.3f} s, most {max(waits_s):.3f} s")
        for attack in attacks:
            async with _attacker(world, attack):
                await asyncio.sleep(WARM_UP_S)
                attacked = await _waits(probes, rounds)
            for name, waits_s in attacked.items():
                figure = _figure(attack, name, quiet[name], waits_s)
                setting.say(f"{attack}: {name} {statistics.median(waits_s):.3f} s, most {max(waits_s):.3f} s")
                figures.append(figure)
    return figures


@asynccontextmanager
async def _world() -> AsyncIterator[_World]:
    """One worker of the built-in model, and a gateway with keys of two tenants."""
    config = LocalClusterConfig(num_workers=1, model=MODEL_DIRECTORY, num_threads=1)
    with tempfile.TemporaryDirectory(prefix="stageline-bench-") as folder:
        path, keys = Path(folder) / "keys.toml", {}
        with changed_keys(path) as known:
            for tenant in (QUIET, FLOOD):
                keys[tenant], key = new_key(tenant=tenant)
                known[key.id] = key
        async with LocalCluster(config) as cluster:
            await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
            arguments = ("--keys-file", str(path))
            async with running_gateways(cluster.address, 1, arguments=arguments) as [gateway]:
                yield _World(gateway.address, cluster.address, keys)


@asynccontextmanager
async def _probes(world: _World) -> AsyncIterator[dict[str, Probe]]:
    """Requests of one token of the quiet tenant, each with another text and another schema."""
    numbers = itertools.count()
    headers = {"authorization": f"Bearer {world.keys[QUIET]}"}
    async with (
        AsyncClient(base_url=f"http://{world.gateway}", timeout=START_TIMEOUT_S, headers=headers) as http,
        PLAIN.channel(world.coordinator) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def post(**fields: object) -> None:
            body = {"messages": [{"role": "user", "content": f"hi {next(numbers)}"}], "max_tokens": 1}
            response = await http.post("/v1/chat/completions", json={**body, **fields})
            if response.status_code != 200:
                raise NotMeasured(f"a probe is refused: {response.text[:200]}")

        async def with_schema() -> None:
            properties = {f"a{next(numbers)}": {"type": "integer"}}
            schema = {"type": "object", "properties": properties}
            await post(
                response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            )

        async def text() -> None:
            request = inference_pb2.GenerateRequest(text=f"once upon {next(numbers)}", max_tokens=1)
            async for _ in stub.Generate(request, metadata=((TENANT_KEY, QUIET),), timeout=START_TIMEOUT_S):
                pass

        yield {"chat": post, "schema": with_schema, "text by gRPC": text}


async def _waits(probes: Mapping[str, Probe], rounds: int) -> dict[str, list[float]]:
    waits: dict[str, list[float]] = {name: [] for name in probes}
    for _ in range(rounds):
        for name, probe in probes.items():
            began_s = time.perf_counter()
            await probe()
            waits[name].append(time.perf_counter() - began_s)
    return waits


@asynccontextmanager
async def _attacker(world: _World, attack: str) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.harness.tenant_attacker", attack, str(CONNECTIONS)),
        *(world.gateway, world.coordinator, world.keys[FLOOD]),
        stdout=PIPE,
    )
    assert process.stdout is not None
    try:
        await process.stdout.readline()
        yield
        if process.returncode is not None:
            raise NotMeasured(f"the attack with {attack} ended by itself")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _figure(attack: str, probe: str, quiet_s: list[float], attacked_s: list[float]) -> Figure:
    usual_s = statistics.median(quiet_s)
    return Figure(
        name=f"wait of a {probe} while another tenant floods with {attack} : twice the usual wait + 0.2 s",
        measured=max(attacked_s),
        bound=ALLOWED_RATIO * usual_s + ALLOWED_S,
        unit="s",
        better=Better.LOWER,
        target=1.0,
        how=f"longest of {len(attacked_s)} requests, one after the other, beside {CONNECTIONS} connections",
        details={
            "usual_s": usual_s,
            "median_s": statistics.median(attacked_s),
            "percentile_s": percentile(attacked_s, SHARE),
            "most_quiet_s": max(quiet_s),
            "times_the_usual": statistics.median(attacked_s) / usual_s,
        },
    )
