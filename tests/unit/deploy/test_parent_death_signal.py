"""No process outlives its launcher."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from deploy import parent_death_signal
from tests.fake_processes import FAKE_ENVIRONMENT, is_running, wait_until

LAUNCHER = """
import asyncio
from deploy import LocalCluster, LocalClusterConfig
from tests.fake_processes import FAKE_COMMAND, FAKE_ENVIRONMENT

async def main():
    environment = {**FAKE_ENVIRONMENT, "FAKE_HANGS": "1"}
    async with LocalCluster(LocalClusterConfig(command=FAKE_COMMAND, environment=environment)) as cluster:
        await cluster.wait_until_serving(timeout_s=20)
        print(cluster.coordinator.pid, *(worker.pid for worker in cluster.workers), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_processes_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    # A killed launcher cannot remove its logs.
    environment = {**os.environ, **FAKE_ENVIRONMENT, "TMPDIR": str(tmp_path)}
    launcher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LAUNCHER, stdout=subprocess.PIPE, env=environment
    )
    assert launcher.stdout is not None
    pids = [int(pid) for pid in (await launcher.stdout.readline()).split()]
    assert len(pids) == 4
    assert all(is_running(pid) for pid in pids)

    launcher.send_signal(signal.SIGKILL)
    await launcher.wait()
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def test_a_command_without_its_launcher_is_not_run() -> None:
    ended = subprocess.run(
        [sys.executable, parent_death_signal.__file__, "1", "/bin/echo", "hello"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "launcher 1 has exited" in ended.stderr


def test_the_command_keeps_the_process_id_and_the_environment() -> None:
    command = [
        sys.executable,
        parent_death_signal.__file__,
        str(os.getpid()),
        "/bin/sh",
        "-c",
        "echo $$ $WORD",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"WORD": "kept"}) as process:
        output, _ = process.communicate(timeout=60)
    assert output.split() == [str(process.pid), "kept"]
