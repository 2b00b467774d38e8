"""Three hosts with unequal links: the coordinator chooses the order with the shortest steps of all."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path

import pytest

from tests.e2e.commands import ENVIRONMENT, STAGELINE, Shell, until_logged
from tests.e2e.namespaces import NamedHost, named_hosts, run_ip
from tests.fake_processes import ROOT

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.nightly]

HOSTS = ("gpu-a", "gpu-b", "gpu-c")
LINKS = {("gpu-a", "gpu-b"): (0.012, 8e6), ("gpu-a", "gpu-c"): (0.010, 8e6), ("gpu-b", "gpu-c"): (0.002, 5e5)}
"""Delay of one way in seconds and bytes per second: the shortest round trip has the lowest rate."""
TO_COORDINATOR = (0.0, 1e9)
RPC_PORT, PAYLOAD_PORT = 7480, 7484
MIN_RATIO = 1.3
"""Of a step in the next best order to one in the best: on links they take 78 and 30 ms, with 32 KiB a hop."""
MODEL = ("--mock-model", "layers=3,hidden=16384", "--stages", "3", "--max-step-sequences", "1")
GAPS = """
import asyncio, statistics, sys, time
from stageline import Client

async def main():
    async with Client(sys.argv[1]) as client:
        times = [time.monotonic() async for _ in client.generate([1, 2, 3], max_tokens=24)]
    print(statistics.median(b - a for a, b in zip(times[4:], times[5:])))

asyncio.run(main())
"""


def link_address(name: str) -> str:
    """At which the others reach this host, over their relays."""
    return f"10.214.0.{HOSTS.index(name) + 1}"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[dict[str, NamedHost]]:
    """The three, and the coordinator's. Each has the link addresses of the others, with relays there."""
    with named_hosts(["head", *HOSTS], tmp_path) as hosts, ExitStack() as relays:
        for name in HOSTS:
            for address in map(link_address, HOSTS):
                run_ip("-n", hosts[name].namespace, "address", "add", f"{address}/32", "dev", "lo")
            route = ("route", "add", f"{link_address(name)}/32", "via", hosts[name].address)
            run_ip("-n", hosts["head"].namespace, *route)
            relays.enter_context(_relays_of(hosts, name))
        yield hosts


def _relays_of(hosts: Mapping[str, NamedHost], name: str) -> subprocess.Popen[str]:
    links = []
    for other in HOSTS:
        delay_s, rate = TO_COORDINATOR if other == name else LINKS[min(name, other), max(name, other)]
        for port in (RPC_PORT, PAYLOAD_PORT):
            target = f"{hosts[other].address}:{port}"
            links.append(f"{link_address(other)}:{port},{target},{delay_s},{rate}")
    command = [*hosts[name].prefix, sys.executable, "-m", "tests.faults.slow_links", *links]
    return Relays(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, text=True)


class Relays(subprocess.Popen[str]):
    """The relays of a host, which end with the context."""

    def __enter__(self) -> Relays:
        assert self.stdout is not None
        assert self.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()
        self.communicate()


async def run_on(host: NamedHost, *command: str) -> str:
    finished = await asyncio.to_thread(
        subprocess.run,
        [*host.prefix, *command],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return finished.stdout


async def step_time(
    hosts: Mapping[str, NamedHost], order: Sequence[str], folder: Path, *flags: str
) -> tuple[float, list[str]]:
    """Time of a token in seconds, and the hosts of the stages, with workers w1, w2, w3 on `order`."""
    folder.mkdir()
    address = f"{hosts['head'].address}:7480"
    async with Shell(folder) as shell:
        serve = ("coordinator", "--listen", address, "--insecure", "--no-http", *MODEL, *flags)
        coordinator = await shell.start("coordinator", *serve, prefix=hosts["head"].prefix)
        for number, name in enumerate(order, 1):
            join = ("worker", "--coordinator", address, "--name", f"w{number}", "--insecure")
            listen = ("--listen", f"{hosts[name].address}:{RPC_PORT}")
            listen += ("--advertise", f"{link_address(name)}:{RPC_PORT}")
            listen += ("--payload-listen", f"{hosts[name].address}:{PAYLOAD_PORT}")
            listen += ("--payload-advertise", f"{link_address(name)}:{PAYLOAD_PORT}")
            mock = ("--mock", "step=1ms")
            await shell.start(f"w{number}", *join, *listen, *mock, prefix=hosts[name].prefix)
        await until_logged(coordinator, "serving: epoch")
        ask = ("status", "--json", "--coordinator", address)
        status: dict[str, list[dict[str, str]]] = {}
        async with asyncio.timeout(60):
            while _num_measured(status) < 2:  # a transfer would delay steps
                status = json.loads(await run_on(hosts["head"], *STAGELINE, *ask))
        gap = float(await run_on(hosts["head"], sys.executable, "-c", GAPS, address))
    by_address = {link_address(name): name for name in HOSTS}
    return gap, [by_address[worker["address"].rpartition(":")[0]] for worker in status["workers"]]


def _num_measured(status: Mapping[str, list[dict[str, str]]]) -> int:
    """Links between workers."""
    return sum(bool(link["from_worker"] and link["to_worker"]) for link in status.get("links", ()))


async def test_the_order_of_workers_is_the_best_of_all_by_measured_steps(
    hosts: dict[str, NamedHost], tmp_path: Path
) -> None:
    gaps: dict[tuple[str, ...], float] = {}
    for number, order in enumerate(permutations(HOSTS)):
        gaps[order], stages = await step_time(hosts, order, tmp_path / f"run{number}", "--no-link-order")
        assert stages == list(order), "by name"
    gap, chosen = await step_time(hosts, HOSTS, tmp_path / "chosen")
    print(gap, chosen, gaps)
    assert len(gaps) == 6, "every order was measured"
    best = sorted(gaps, key=gaps.__getitem__)[:2]
    assert tuple(chosen) in best, (chosen, gaps)
    assert best[0] == best[1][::-1], "one order, and its reverse"
    others = [measured for order, measured in gaps.items() if order not in best]
    assert max(gap, gaps[best[1]]) * MIN_RATIO < min(others), "no noise, and as fast when it was chosen"
    assert chosen[1] == "gpu-a", "the shortest round trip has too low a rate"
