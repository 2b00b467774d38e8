"""Runs `stageline` command lines as processes, like a user's shell."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy import LocalProcess
from tests.error_lines import parse_error_line
from tests.fake_processes import ROOT
from tests.temporary import process_directory

STAGELINE = (sys.executable, "-P", "-m", "stageline")
ENVIRONMENT: Mapping[str, str] = {
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(ROOT), str(ROOT / "proto"), os.environ.get("PYTHONPATH", "")])
    ),
    # Tables are as wide as the terminal, which a pipe is not.
    "COLUMNS": "160",
    # Per-user files of the processes stay inside the tests.
    "XDG_CACHE_HOME": str(process_directory("cache")),
}


@dataclass(frozen=True, slots=True)
class Finished:
    """Exit code and output of a command."""

    code: int
    stdout: str
    stderr: str

    def the_error(self) -> str:
        """Standard error, which must be one line from Stageline without traceback."""
        assert "Traceback" not in self.stderr
        lines = self.stderr.splitlines()
        assert len(lines) == 1, self.stderr
        parse_error_line(lines[0])
        return lines[0]


async def run_stageline(
    *arguments: str, stdin: str = "", timeout_s: float = 60.0, **environment: str
) -> Finished:
    """Run one command; kill it and fail the test after `timeout_s`."""
    process = await asyncio.create_subprocess_exec(
        *STAGELINE,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT, **environment},
    )
    try:
        async with asyncio.timeout(timeout_s):
            stdout, stderr = await process.communicate(stdin.encode())
    except BaseException:
        process.send_signal(signal.SIGKILL)
        await process.wait()
        raise
    assert process.returncode is not None
    return Finished(process.returncode, stdout.decode(), stderr.decode())


class Shell:
    """Starts long-running commands in the background; kills the remaining ones at exit."""

    def __init__(self, log_directory: Path) -> None:
        self._log_directory = log_directory
        self._processes: list[LocalProcess] = []

    async def __aenter__(self) -> Shell:
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
        await asyncio.gather(*(process.wait() for process in self._processes))

    async def start(self, name: str, *arguments: str, prefix: tuple[str, ...] = ()) -> LocalProcess:
        """Start `prefix stageline ARGUMENTS`, logging to a file called `name`."""
        process = await LocalProcess.start(
            name,
            [*prefix, *STAGELINE, *arguments],
            log=self._log_directory / f"{name}.log",
            environment=ENVIRONMENT,
        )
        self._processes.append(process)
        return process

    async def coordinator(self, *arguments: str, name: str = "coordinator") -> tuple[LocalProcess, str]:
        """Start a coordinator, by default on a free port; return it with its address."""
        listen = () if "--listen" in arguments else ("--listen", "127.0.0.1:0")
        http = () if "--http" in arguments else ("--no-http",)
        process = await self.start(name, "coordinator", *listen, *http, *arguments)
        return process, await process.listening_address(timeout_s=60)


async def exit_code(process: LocalProcess, *, timeout_s: float = 15.0) -> str:
    """Wait for the end of the process; return it as text ("exit code 0")."""
    async with asyncio.timeout(timeout_s):
        await process.wait()
    return process.describe_exit()


async def until_logged(process: LocalProcess, text: str, *, timeout_s: float = 60.0) -> str:
    """Wait for a log line with `text`, within `timeout_s`; return it."""
    async with asyncio.timeout(timeout_s):
        while True:
            for line in process.read_log().splitlines():
                if text in line:
                    return line
            assert process.is_running, f"{process.failure()}\nwithout {text!r}"
            await asyncio.sleep(0.05)
