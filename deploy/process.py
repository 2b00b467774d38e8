"""One process of a local cluster and its restart policy."""

import asyncio
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from coordinator.config import CoordinatorConfig
from deploy import ClusterFailed, parent_death_signal
from gateway.config import GatewayConfig
from stage_worker.config import WorkerConfig
from telemetry.service_manager import VARIABLES
from wire.exit_codes import ExitCode
from wire.flags import variables_of

MAX_RESTARTS = 5
WINDOW_S = 600.0
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0


class RestartPolicy:
    """Restarts of one worker: at most `MAX_RESTARTS` within `WINDOW_S`, with exponential backoff."""

    def __init__(self) -> None:
        self._restarts_s: deque[float] = deque()

    @staticmethod
    def is_unexpected(exit_code: int) -> bool:
        """Whether a restart may help: after a device failure or a signal, not after a requested exit,
        a failure or wrong settings.
        """
        return exit_code == ExitCode.DEVICE_FAILED or exit_code in _KILLED

    def next_delay_s(self, now_s: float) -> float | None:
        """The delay before this restart, which is counted; None after too many."""
        while self._restarts_s and now_s - self._restarts_s[0] > WINDOW_S:
            self._restarts_s.popleft()
        if len(self._restarts_s) >= MAX_RESTARTS:
            return None
        delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** len(self._restarts_s))
        self._restarts_s.append(now_s)
        return delay_s


_KILLED = frozenset(-number for number in signal.Signals)


_LISTENING = re.compile(r"^stageline (?:coordinator|gateway|worker \S+) listening on (\S+)\n", re.MULTILINE)
_DASHBOARD = re.compile(r"^dashboard (https?://\S+)\n", re.MULTILINE)
_PROGRAM = "stageline: "
_ERROR_LINE = f"{_PROGRAM}error["
_POLL_INTERVAL_S = 0.03
# gRPC's core would log every closed connection.
_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "GRPC_VERBOSITY": "NONE"}


def _inherited() -> dict[str, str]:
    """This process's environment without variables of flags, as the command line has all settings, and of
    the service manager, which supervises this process.
    """
    variables = {
        name for config in (CoordinatorConfig, WorkerConfig, GatewayConfig) for name in variables_of(config)
    } | set(VARIABLES)
    return {name: value for name, value in os.environ.items() if name not in variables}


def process_environment(added: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that this one starts."""
    return {**_ENVIRONMENT, **_inherited(), **added}


def describe_exit_code(code: int) -> str:
    """How a process exited, such as "exit code 1" or "killed by SIGKILL"."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _open_log(path: Path) -> BinaryIO:
    """Open for appending; a new file has mode 0600."""
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))


class LocalProcess:
    """A process, running or exited. Its standard output and error are appended to `log`."""

    def __init__(self, name: str, log: Path, log_start: int, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.log = log
        self._log_start = log_start
        self._process = process

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str]
    ) -> "LocalProcess":
        """Start `command`, which begins with an absolute path. The kernel kills it when this process ends."""
        command_line = [sys.executable, "-I", "-S", parent_death_signal.__file__, str(os.getpid()), *command]
        with _open_log(log) as output:
            log_start = output.tell()
            process = await asyncio.create_subprocess_exec(
                *command_line,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=process_environment(environment),
                # A Ctrl-C in the terminal is for the launcher, which then ends its processes in order.
                start_new_session=True,
            )
        return cls(name, log, log_start, process)

    @property
    def pid(self) -> int:
        """Process id, which another process may get after this one exited."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.returncode is None

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal; None while running."""
        return self._process.returncode

    @property
    def has_left(self) -> bool:
        """The process exited with DONE, without a signal."""
        return self._process.returncode == ExitCode.DONE

    async def wait(self) -> None:
        await self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process exited."""
        if self.is_running:
            self._process.send_signal(number)

    def describe_exit(self) -> str:
        """How it exited; "still running" before."""
        code = self._process.returncode
        return "still running" if code is None else describe_exit_code(code)

    def read_log(self) -> str:
        """The output of this process so far."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def last_lines(self, num_lines: int = 12) -> list[str]:
        return self.read_log().splitlines()[-num_lines:]

    def failure(self) -> ClusterFailed:
        """An error with the exit code and the end of the log: its error line alone after FAILED and USAGE."""
        last_lines, how = self.last_lines(), self.describe_exit()
        is_explained = bool(last_lines) and last_lines[-1].startswith(_ERROR_LINE)
        if is_explained and self.exit_code in (ExitCode.FAILED, ExitCode.USAGE):
            error = last_lines[-1].removeprefix(_PROGRAM)
            return ClusterFailed(f"{self.name} (pid {self.pid}) ended: {how}, {error}; its log is {self.log}")
        ended = f"{self.name} (pid {self.pid}) ended: {how}; end of log {self.log}:"
        return ClusterFailed(ended, log_lines=last_lines or ["(nothing logged)"])

    def dashboard_url(self) -> str | None:
        """From the line `dashboard http://...`, which is printed before the process listens."""
        found = _DASHBOARD.search(self.read_log())
        return None if found is None else found[1]

    async def listening_address(self, *, timeout_s: float) -> str:
        """HOST:PORT from the line `stageline ... listening on HOST:PORT`. Raises ClusterFailed."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if match := _LISTENING.search(self.read_log()):
                        return match[1]
                    if not self.is_running:
                        raise self.failure()
                    await asyncio.sleep(_POLL_INTERVAL_S)
        except TimeoutError:
            message = f"{self.name} is not listening after {timeout_s:g} s; its log is {self.log}"
            raise ClusterFailed(message) from None
