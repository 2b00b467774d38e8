"""docs/deploy/ray.md word for word, on a Ray cluster of two nodes and a head: a node is lost under load."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from stageline import Client
from tests.e2e.clusters import VOCAB_SIZE, is_serving, wait_for_status
from tests.e2e.commands import ENVIRONMENT, Finished, run_stageline
from tests.e2e.recovery_setup import make_steady_model
from tests.faults.load import ConstantLoad
from tests.faults.streams import Ask, mixed_asks, undisturbed
from tests.ports import unused_address
from tests.repository import REPOSITORY

pytestmark = pytest.mark.deploy
PAGE = (REPOSITORY / "docs" / "deploy" / "ray.md").read_text()
COMMANDS = re.findall(r"^(stageline .*)$", PAGE, re.MULTILINE)
STOP = "stageline deploy stop ray -f cluster.yaml"
STATUS = "stageline deploy status ray -f cluster.yaml"
TIMEOUT_S = 300.0
RAY: dict[str, str] = {
    # Processes of Ray start Stageline from this tree.
    **ENVIRONMENT,
    "RAY_USAGE_STATS_ENABLED": "0",
    # Nodes on the loopback interface.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


@asynccontextmanager
async def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """A head without CPUs, and two nodes with two CPUs each."""
    pytest.importorskip("ray")
    for name, value in RAY.items():
        monkeypatch.setenv(name, value)
    # Names of sockets have a limit.
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", directory)
    Path(directory, "ray").mkdir()
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("ray_nodes.py")),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield RayNodes(started)
    finally:
        assert started.stdin is not None
        started.stdin.close()
        await started.wait()
        shutil.rmtree(directory, ignore_errors=True)


class RayNodes:
    """The process that has the nodes (tests/deploy/ray_nodes.py)."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def address(self) -> str:
        return await self._answer()

    async def remove(self, node_id: str) -> None:
        """Kill a node, by the beginning of its id."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{node_id}\n".encode())
        assert await self._answer() == f"removed {node_id}"

    async def _answer(self) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            line = await self._process.stdout.readline()
        assert line, "the process with the nodes has ended"
        return line.decode().strip()


def cluster_file(folder: Path, listen: str) -> None:
    """The file of the page, for two workers on CPUs of this machine and a small model."""
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    for before, after in (
        ("/models/m", str(make_steady_model(folder / "model"))),
        ("device: cuda, memory: 20GiB", "memory: 256MiB, flags: {threads: 1}"),
        ("{cpus: 8, gpus: 1}", "{cpus: 1}"),
    ):
        assert before in text
        text = text.replace(before, after)
    text += f'coordinator: {{listen: "{listen}", http: "off"}}\n'
    text += f'gateways: [{{name: gateway, listen: "{unused_address()}"}}]\n'
    (folder / "cluster.yaml").write_text(text)


async def test_a_lost_node_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ray_cluster(monkeypatch) as nodes:
        monkeypatch.setenv("RAY_ADDRESS", await nodes.address())
        monkeypatch.chdir(tmp_path)
        listen = unused_address()
        cluster_file(tmp_path, listen)
        assert COMMANDS[-1] == STATUS
        for line in COMMANDS:
            found = await command(line.replace("head:7480", listen))
            assert found.code == 0, found.stderr
        try:
            await outlives_a_node(nodes, listen)
            await drains_at_sigterm(listen)
        finally:
            assert f"`{STOP}`" in PAGE
            stopped = await command(STOP)
        assert (stopped.code, stopped.stdout) == (0, "cluster stories stopped\n")
        assert "cluster stories does not run on this Ray cluster" in (await command(STATUS)).stderr


async def outlives_a_node(nodes: RayNodes, listen: str) -> None:
    """Requests go on with the same tokens, and the worker starts on the other node."""
    cases = mixed_asks(8, lengths=(1, 60), max_tokens=40, vocab_size=VOCAB_SIZE, seed=45)
    before = await places()
    assert before["gpu-a"] != before["gpu-b"]
    async with Client(listen) as client:
        answers = dict(zip(cases, await undisturbed(client, cases), strict=True))

        def expected(case: Ask) -> Sequence[int]:
            return answers[case]

        async with ConstantLoad(client, cases, expected, num_streams=2) as load:
            await load.next_token(timeout_s=TIMEOUT_S)
            await nodes.remove(before["gpu-a"])
            await wait_for_status(listen, lambda status: not has_both(status), timeout_s=TIMEOUT_S)
            await load.next_token(timeout_s=TIMEOUT_S)
            await wait_for_status(listen, has_both, timeout_s=TIMEOUT_S)
            await load.next_token(timeout_s=TIMEOUT_S)
        assert load.problems == []
    assert await places() == {**before, "gpu-a": before["gpu-b"]}
    # What Ray prints of the lost node is not in the way of programs.
    assert json.loads((await command(f"{STATUS} --json")).stdout)["workers"]


async def drains_at_sigterm(listen: str) -> None:
    """SIGTERM to an actor drains its worker, and Ray starts the actor again."""
    (worker,) = [
        process
        for process in psutil.process_iter(["cmdline"])
        if {"--name", "gpu-b", listen} <= set(process.info["cmdline"] or ())
    ]
    log = await log_of("gpu-b", worker.pid)
    actor = worker.parent()
    assert actor is not None
    os.kill(actor.pid, signal.SIGTERM)
    status = await wait_for_status(
        listen,
        lambda status: has_both(status) and worker.pid not in {each.pid for each in status.workers},
        timeout_s=TIMEOUT_S,
    )
    assert status.requests.failed == 0
    assert "SIGTERM: draining" in log.read_text()


async def log_of(name: str, pid: int) -> Path:
    """The file to which a process logs."""
    file = Path(os.readlink(f"/proc/{pid}/fd/2"))
    assert f"worker {name}: joined" in file.read_text()
    return file


def has_both(status: Any) -> bool:
    return is_serving(status) and [worker.name for worker in status.workers if worker.HasField("stage")] == [
        "gpu-a",
        "gpu-b",
    ]


async def places() -> dict[str, str]:
    """Node ids of the processes, from the table of the status."""
    found = await command(STATUS)
    assert found.code == 0, found.stderr
    return dict(re.findall(r"^(\S+) +\S+ \((\w{8})\) +runs", found.stdout, re.MULTILINE))


async def command(line: str) -> Finished:
    """A command of the page."""
    return await run_stageline(*line.split()[1:], timeout_s=TIMEOUT_S)
