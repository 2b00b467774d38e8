"""Everything but workers runs where torch and transformers are not installed, and never asks for them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from httpx2 import AsyncClient

from builtin_model import MODEL_DIRECTORY
from deploy import LocalCluster, LocalClusterConfig
from stageline import Client
from tests.e2e.clusters import START_TIMEOUT_S
from tests.e2e.commands import ENVIRONMENT, Finished, Shell, run_stageline

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "Once upon a time"
# A module that is None cannot be imported. Each import is recorded, as a failed one may be caught.
HIDE = """\
import builtins, sys
HIDDEN = ("torch", "transformers")
sys.modules.update(dict.fromkeys(HIDDEN))
original = builtins.__import__
def record(name, *arguments, **keywords):
    if name.split(".")[0] in HIDDEN:
        with open({asked!r}, "a") as file:
            print(*sys.argv, file=file)
    return original(name, *arguments, **keywords)
builtins.__import__ = record
"""
CLIENT = """\
import asyncio, sys
from stageline import Client
async def main():
    async with Client(sys.argv[1]) as client:
        print((await client.complete(sys.argv[2], max_tokens=4))[0].text)
asyncio.run(main())
"""


@dataclass(frozen=True, slots=True)
class Host:
    """A cluster of mock stages on a machine without torch."""

    cluster: LocalCluster
    environment: Mapping[str, str]
    asked: Path

    async def run(self, *arguments: str, stdin: str = "") -> Finished:
        return await run_stageline(*arguments, stdin=stdin, **self.environment)

    def assert_nobody_asked(self) -> None:
        assert not self.asked.exists(), self.asked.read_text()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Host]:
    folder = tmp_path_factory.mktemp("bare")
    asked = folder / "asked"
    (folder / "sitecustomize.py").write_text(HIDE.format(asked=str(asked)))
    path = os.pathsep.join([str(folder), ENVIRONMENT["PYTHONPATH"]])
    environment = {**ENVIRONMENT, "PYTHONPATH": path}
    config = LocalClusterConfig(
        num_workers=2, mocks=("step=1ms",), environment=environment, log_directory=folder / "logs"
    )
    async with LocalCluster(config) as cluster:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        yield Host(cluster, environment, asked)


async def test_commands_of_clients_run(host: Host) -> None:
    at = ("--coordinator", host.cluster.address)
    generated = await host.run("generate", PROMPT, *at, "--max-tokens", "4", "--seed", "3")
    assert generated.code == 0, generated.stderr
    assert generated.stdout.strip()
    status = await host.run("status", *at)
    assert "serving" in status.stdout
    chat = await host.run("chat", *at, "--max-tokens", "4", stdin="Hello\n")
    assert chat.code == 0, chat.stderr
    plan = await host.run("plan", "--workers", "8GiB,8GiB")
    assert "12 layers on 2 stages" in plan.stdout
    check = await host.run("plan", "--check", str(MODEL_DIRECTORY))
    assert "Tokenizer: 1536 ids, a chat template" in check.stdout
    host.assert_nobody_asked()


async def test_a_gateway_serves_texts_and_conversations(host: Host, tmp_path: Path) -> None:
    prefix = ("/usr/bin/env", f"PYTHONPATH={host.environment['PYTHONPATH']}")
    async with Shell(tmp_path) as shell:
        gateway = await shell.start(
            "gw", "gateway", "--coordinator", host.cluster.address, "--listen", "127.0.0.1:0", prefix=prefix
        )
        url = f"http://{await gateway.listening_address(timeout_s=START_TIMEOUT_S)}"
        async with AsyncClient(base_url=url, timeout=60) as http, Client(host.cluster.address) as client:
            body = {"prompt": PROMPT, "max_tokens": 4, "seed": 3, "temperature": 1}
            served = await http.post("/v1/completions", json=body)
            expected = await client.complete(PROMPT, max_tokens=4, seed=3, temperature=1.0)
            assert served.json()["choices"][0]["text"] == expected[0].text
            message = {"role": "user", "content": "Hello"}
            served = await http.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 4})
            assert served.json()["usage"]["completion_tokens"] == 4, served.text
    host.assert_nobody_asked()


async def test_the_python_client_runs(host: Host) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", CLIENT, host.cluster.address, PROMPT),
        env={**os.environ, **host.environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()
    assert stdout.strip()
    host.assert_nobody_asked()


async def test_what_computes_names_torch_in_one_line(host: Host, tmp_path: Path) -> None:
    for device in ("cpu", "auto", "cuda:all"):
        worker = await host.run("worker", "--coordinator", host.cluster.address, "--device", device)
        assert worker.the_error().startswith(
            "stageline: error[LIBRARY_MISSING]: a worker needs torch, which is not installed: "
        )
        assert worker.code == 1
    (tmp_path / "model").symlink_to(MODEL_DIRECTORY)
    index = await host.run("weights", "index", str(tmp_path / "model"), "--output", str(tmp_path / "m.json"))
    assert "a reference of the self-check (`--reference none` writes" in index.stderr
    assert "error[LIBRARY_MISSING]" in index.stderr
