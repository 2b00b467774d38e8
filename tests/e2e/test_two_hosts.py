"""A cluster across two hosts needs --coordinator, --listen and --advertise, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.clusters import NUM_NEW_TOKENS, STEP_FLAGS, Reference
from tests.e2e.commands import ENVIRONMENT, STAGELINE, Shell, until_logged
from tests.e2e.namespaces import Host, two_hosts

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.full]

START_TIMEOUT_S = 120.0


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as hosts:
        yield hosts


async def test_a_cluster_across_two_hosts_generates(
    hosts: tuple[Host, Host], llama: Reference, tmp_path: Path
) -> None:
    here, there = hosts
    address = f"{here.address}:7480"
    async with Shell(tmp_path) as shell:
        # On every interface: remote workers must not receive the listen address.
        serve = ("coordinator", "--listen", "0.0.0.0:7480", "--insecure", "--stages", "3")
        model = ("--model", str(llama.directory))
        coordinator = await shell.start("coordinator", *serve, *model, *STEP_FLAGS, prefix=here.prefix)
        for host, name, listen in (
            (here, "a", ("--listen", f"{here.address}:0")),
            (there, "b", ("--listen", "0.0.0.0:7481", "--advertise", f"{there.address}:7481")),
            (there, "c", ()),
        ):
            join = ("worker", "--coordinator", address, "--name", name, "--insecure", *listen)
            await shell.start(name, *join, "--memory", "256MiB", "--threads", "1", prefix=host.prefix)
        await until_logged(coordinator, "serving: epoch", timeout_s=START_TIMEOUT_S)
        status = json.loads(await _run_on(there, "status", "--json", "--coordinator", address))
        reached_at = {worker["name"]: worker["address"].rpartition(":")[0] for worker in status["workers"]}
        assert reached_at == {"a": here.address, "b": there.address, "c": there.address}
        for client in hosts:
            ids = ",".join(map(str, llama.prompts[4]))
            generate = ("generate", "--token-ids", ids, "--max-tokens", str(NUM_NEW_TOKENS))
            output = await _run_on(client, *generate, "--coordinator", address)
            assert [int(token) for token in output.split(",")] == llama.expected[4]
    for host in hosts:
        assert await _pids_on(host) == []


async def _run_on(host: Host, *arguments: str) -> str:
    finished = await asyncio.to_thread(
        subprocess.run,
        [*host.prefix, *STAGELINE, *arguments],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return finished.stdout


async def _pids_on(host: Host) -> list[str]:
    command = ["ip", "netns", "pids", host.namespace]
    return (await asyncio.to_thread(subprocess.check_output, command, text=True)).split()
