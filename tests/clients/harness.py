"""Servers for clients of other projects, and the programs that use those clients.

Each client is installed in an environment of its own, `.venv/clients-NAME`, and used by a program of
`tests/clients/programs` that runs there.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from deploy import LocalCluster, LocalClusterConfig
from stageline import Client
from tests.clients.scripted import write_scripted_checkpoint
from tests.e2e.clusters import START_TIMEOUT_S
from tests.e2e.commands import ENVIRONMENT, Shell
from tests.fake_processes import ROOT
from weights.location import model_location

PROGRAMS = ROOT / "tests" / "clients" / "programs"
CHAT_TEMPLATE = ROOT / "tests" / "clients" / "chat_template.jinja"
PROGRAM_TIMEOUT_S = 300.0

MARKS = [pytest.mark.clients, pytest.mark.asyncio(loop_scope="session")]
"""Marks of the tests that use the shared servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running cluster behind two gateways; their URLs end with a slash."""

    coordinator: str
    url: str
    other_url: str
    model: str


@asynccontextmanager
async def serve(logs: Path, config: LocalClusterConfig, *flags: str) -> AsyncIterator[Served]:
    """Run a cluster and two gateways with `flags`."""
    async with LocalCluster(config) as cluster, Shell(logs) as shell:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        gateways = [
            await shell.start(
                name, "gateway", "--coordinator", cluster.address, "--listen", "127.0.0.1:0", *flags
            )
            for name in ("gateway", "other-gateway")
        ]
        url, other_url = [f"http://{await each.listening_address(timeout_s=60)}/" for each in gateways]
        async with Client(cluster.address) as client:
            model = (await client.model()).name
        yield Served(coordinator=cluster.address, url=url, other_url=other_url, model=model)
        assert not any("Traceback" in gateway.read_log() for gateway in gateways)


@asynccontextmanager
async def serve_builtin_model(logs: Path, *coordinator_arguments: str) -> AsyncIterator[Served]:
    config = LocalClusterConfig(
        num_workers=2,
        environment=ENVIRONMENT,
        log_directory=logs,
        coordinator_arguments=coordinator_arguments,
    )
    async with serve(logs, config, "--chat-template", str(CHAT_TEMPLATE)) as served:
        yield served


SCRIPTED_NAMES = ("scripted", "gpt-5", "claude-sonnet-4-5")
"""Names of the scripted model; some clients know the limits of models by their names."""
SCRIPTED_MEMORY_BYTES = 2**30


@asynccontextmanager
async def serve_scripted_model(directory: Path) -> AsyncIterator[Served]:
    config = LocalClusterConfig(
        num_workers=2,
        model=model_location(str(write_scripted_checkpoint(directory / "checkpoint"))),
        memory_bytes=SCRIPTED_MEMORY_BYTES,
        environment=ENVIRONMENT,
        log_directory=directory,
    )
    flags = ("--tool-parser", "hermes", "--reasoning-parser", "deepseek_r1")
    names = ("--served-model-name", ",".join(SCRIPTED_NAMES))
    async with serve(directory, config, *flags, *names) as served:
        yield replace(served, model=SCRIPTED_NAMES[0])


def environment_of(client: str) -> Path:
    return ROOT / ".venv" / f"clients-{client}"


def command_of(client: str, name: str) -> Path:
    """A command in the environment of a client."""
    return environment_of(client) / "bin" / name


async def run(*command: str | Path, directory: Path | None = None, **environment: str) -> str:
    """Run a program in a directory. It must succeed; return its output."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": "", **environment},
    )
    try:
        async with asyncio.timeout(PROGRAM_TIMEOUT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    text = output.decode(errors="replace")
    assert process.returncode == 0, f"{command[0]} ended with {process.returncode}:\n{text}"
    return text


async def run_node(client: str, program: str, directory: Path, *arguments: str | Path) -> str:
    """Run a program for Node with the modules of a client's environment."""
    copy = directory / program  # modules are found from the program's own folder upwards
    copy.write_bytes((PROGRAMS / program).read_bytes())
    (directory / "node_modules").symlink_to(environment_of(client) / "node_modules")
    return await run("node", copy, *arguments)


async def check_client(client: str, program: str, served: Served, directory: Path, **facts: Any) -> None:
    """Run the checks of a Python client; `facts` are what the program reads beside the URL and the model."""
    written = write_facts(directory, {"model": served.model, **facts})
    output = await run(command_of(client, "python"), PROGRAMS / program, served.url, written)
    print(output)


def write_facts(directory: Path, facts: Mapping[str, Any]) -> Path:
    file = directory / "facts.json"
    file.write_text(json.dumps(facts))
    return file
