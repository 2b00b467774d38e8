"""A cluster as a job of a real Slurm on two nodes, which can be lost, as docs/deploy/slurm.md says."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.deploy.pages import commands_of, file_of
from tests.deploy.slurm_cluster import SlurmCluster, slurm_cluster
from tests.deploy.streams import NUM_STREAMS

pytestmark = [pytest.mark.deploy, pytest.mark.asyncio]

START_TIMEOUT_S = 240.0
COORDINATOR = "--coordinator n0:7480"
GATEWAY_READY = "curl -sf http://n0:7482/readyz > /dev/null && echo ready"
STREAMS = f"{sys.executable} -m tests.deploy.streams http://n0:7482"


@pytest_asyncio.fixture
async def slurm(tmp_path: Path) -> AsyncIterator[SlurmCluster]:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "stageline").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m stageline "$@"\n')
    (programs / "stageline").chmod(0o755)
    async with slurm_cluster(tmp_path) as cluster:
        (cluster.head.host.home / "cluster.yaml").write_text(file_of("slurm"))
        yield cluster


async def _submit(slurm: SlurmCluster, text: str) -> str:
    """The id of a job that serves."""
    (slurm.head.host.home / "cluster.yaml").write_text(text)
    submitted = await slurm.run("stageline deploy run slurm -f cluster.yaml")
    wait = f"stageline status --wait serving --timeout {START_TIMEOUT_S:g} {COORDINATOR}"
    await slurm.run(wait, timeout_s=START_TIMEOUT_S + 60)
    await slurm.until(GATEWAY_READY, "ready")
    return submitted.split()[1]


async def _until_workers(slurm: SlurmCluster, names: set[str], *, timeout_s: float = 120.0) -> None:
    """Wait until these workers, and no others, have the layers."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        code, text = await slurm.type(f"stageline status --json {COORDINATOR}")
        status: dict[str, Any] = json.loads(text) if code == 0 else {}
        found = {each["name"] for each in status.get("workers", ()) if each["stage"] is not None}
        if found == names and status["state"] == "CLUSTER_STATE_SERVING":
            return
        if asyncio.get_running_loop().time() > deadline:
            pytest.fail(f"{found}, not {names} after {timeout_s:g} s: {text}\n{slurm.logs()}")
        await asyncio.sleep(0.5)


@asynccontextmanager
async def _streams(slurm: SlurmCluster) -> AsyncIterator[Path]:
    """Requests that never cease, and the file of their answers, which must be complete and equal."""
    home = slurm.head.host.home
    answers, end = home / "answers", home / "end"
    running = asyncio.create_task(
        slurm.run(f"{STREAMS} {end} > {answers} 2> {home}/streams.log", timeout_s=900)
    )
    try:
        await _until_more_answers(answers)
        yield answers
    finally:
        end.touch()
        await running
    texts = {json.loads(line)["text"] for line in answers.read_text().splitlines()}
    assert len(texts) == 1, texts


async def _until_more_answers(answers: Path, *, timeout_s: float = 240.0) -> None:
    """Wait for requests that began after this call."""

    def count() -> int:
        return answers.read_text().count("\n") if answers.exists() else 0

    wanted = count() + 2 * NUM_STREAMS
    async with asyncio.timeout(timeout_s):
        while count() < wanted:
            await asyncio.sleep(0.2)


async def _workers_on(slurm: SlurmCluster, node: str) -> dict[str, str]:
    """The step of each worker on a node."""
    shown = await slurm.run("stageline deploy status slurm -f cluster.yaml")
    lines = [line.split() for line in shown.splitlines()[1:]]
    steps = [line for line in lines if len(line) == 3]
    return {name: step for step, name, where in steps if where == node and name != "batch"}


async def test_the_page_word_for_word(slurm: SlurmCluster) -> None:
    run, status, wait, ask, drain, stop = commands_of("slurm")
    assert await slurm.run(run.line) == f"{run.output[0]}\n"
    await slurm.until(f"{status.line} | wc -l", str(len(status.output)))
    shown = (await slurm.run(status.line)).splitlines()
    assert shown[0] == status.output[0]
    assert _places(shown) == _places(list(status.output))
    await slurm.run(wait.line, timeout_s=START_TIMEOUT_S)
    await slurm.until(GATEWAY_READY, "ready")
    answer = json.loads((await slurm.run(ask.line.replace("curl ", "curl -s ", 1))).strip())
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 20)
    workers = {"w0", "w1", "w2", "w3"}
    drained = next(line.split()[1] for line in shown if line.split()[0] == drain.line.split()[-1])
    await _signal(slurm, drain.line)
    await _until_workers(slurm, workers - {drained})
    assert await slurm.run(stop.line, timeout_s=120) == f"{stop.output[0]}\n"
    assert sorted((await slurm.run("srun -N2 hostname")).split()) == ["n0", "n1"], "the nodes are free again"


async def _gpus_on(slurm: SlurmCluster, node: str) -> set[str]:
    """What processes on a node may see of its GPUs."""
    search = "cat /proc/[0-9]*/environ | tr '\\0' '\\n' | sed -n s/^CUDA_VISIBLE_DEVICES=//p"
    command = slurm.nodes[node].command("sh", "-c", search)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return set(output.decode().split())


async def _signal(slurm: SlurmCluster, line: str) -> None:
    """Send a signal to a step. Slurm 22.05 delivers it to another node, and then says that it did not."""
    code, output = await slurm.type(line)
    assert code == 0 or output.endswith(": Invalid job id specified\n"), output


def _places(lines: list[str]) -> tuple[set[str], list[str]]:
    """Names of the steps, and how many each node has: which worker is where is Slurm's choice."""
    steps = [line.split() for line in lines[1:]]
    return {name for _, name, _ in steps}, sorted(node for *_, node in steps)


async def test_no_request_fails_when_a_step_drains_a_node_is_lost_and_comes_back(slurm: SlurmCluster) -> None:
    text = file_of("slurm").replace("2GiB}}", "2GiB}, flags: {threads: 1}}")
    job = await _submit(slurm, f"dtype: f32\n{text.replace('cpus: 2', 'cpus: 2, gpus: 1')}")
    near, far = await _workers_on(slurm, "n0"), await _workers_on(slurm, "n1")
    assert (len(near), len(far)) == (2, 2)
    assert {"0", "1"} <= await _gpus_on(slurm, "n0"), "one each for the steps, both for the job"
    staying, leaving = sorted(near)
    async with _streams(slurm) as answers:
        await _signal(slurm, f"scancel --signal=TERM {near[leaving]}")
        await _until_workers(slurm, {staying, *far})
        await _until_more_answers(answers)

        slurm.nodes["n1"].lose_power()
        await _until_more_answers(answers)
        await slurm.until(f"squeue -h -j {job} -o %N", "n0")
        await slurm.until(f"squeue -h -n stories-{job} -o %T | sort -u", "PENDING")

        slurm.nodes["n1"].boot()
        await _until_workers(slurm, {staying, *far}, timeout_s=START_TIMEOUT_S)
        await _until_more_answers(answers)
    shown = await slurm.run("stageline deploy status slurm -f cluster.yaml")
    assert shown.count(" outside RUNNING n1") == 1, "the other has the place of the drained worker"
    assert leaving not in await _workers_on(slurm, "n0"), "it stays away"
    await slurm.run("stageline deploy stop slurm -f cluster.yaml", timeout_s=180)
    await slurm.until("squeue -h", "")


async def test_a_stopped_job_finishes_its_requests_and_leaves_nothing(slurm: SlurmCluster) -> None:
    job = await _submit(slurm, file_of("slurm"))
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True})
    url = "http://n0:7482/v1/completions"
    ask = f"curl -s {url} -H 'content-type: application/json' -d '{body}'"
    asked = asyncio.create_task(slurm.run(ask, timeout_s=240))
    decoding = f"stageline status --json {COORDINATOR}"
    async with asyncio.timeout(120):
        while json.loads(await slurm.run(decoding))["requests"].get("decode", 0) == 0:
            assert not asked.done(), "the request must still run when the job is stopped"
    await slurm.run(f"scancel -b -s TERM {job}")
    answer = json.loads(await asked)
    assert answer["usage"]["completion_tokens"] == 400
    await slurm.until("squeue -h", "")
    assert "JobState=COMPLETED" in await slurm.run(f"scontrol show job {job}")
    for node in slurm.nodes.values():
        search = node.command("pgrep", "-f", "stageline (coordinator|worker|gateway)")
        assert await (await asyncio.create_subprocess_exec(*search)).wait() == 1, "nothing is left"
