"""A command in a pseudo terminal: screen and keyboard."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import gettempdir

from tests.e2e.commands import ENVIRONMENT, STAGELINE

CTRL_C = "\x03"
CTRL_D = "\x04"

_ROWS, _COLUMNS = 40, 80
# Makes the terminal the controlling one, so that Ctrl-C reaches the command as a signal.
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")


class Terminal:
    """Runs `stageline ARGUMENTS` or another command in a pseudo terminal; killed at exit if it still runs."""

    def __init__(
        self,
        *arguments: str,
        command: Sequence[str] = STAGELINE,
        environment: Mapping[str, str] | None = None,
        temporary: Path | None = None,
    ) -> None:
        """`temporary`: directory for the command's temporary files."""
        self._arguments = (*command, *arguments)
        self._environment = {
            **os.environ,
            **ENVIRONMENT,
            "TERM": "xterm",
            "TMPDIR": str(temporary or gettempdir()),
            **(environment or {}),
        }
        self._environment.pop("COLUMNS")
        self._text = ""
        self._read_up_to = 0
        self._news = asyncio.Event()

    async def __aenter__(self) -> Terminal:
        self._fd, terminal = os.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
        os.set_blocking(self._fd, False)
        self._process = self._start(terminal)
        os.close(terminal)
        asyncio.get_running_loop().add_reader(self._fd, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.send_signal(signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def text(self) -> str:
        """Everything shown, without colours and cursor movements."""
        return _CONTROL.sub("", self._text)

    def type(self, text: str) -> None:
        """Send keys."""
        os.write(self._fd, text.encode())

    def send_signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    async def expect(self, pattern: str, *, timeout_s: float = 60.0) -> re.Match[str]:
        """Wait for the next match of `pattern`, within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while (match := re.compile(pattern).search(self.text, self._read_up_to)) is None:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"no {pattern!r} within {timeout_s:g} s in\n{self.text}") from None
        self._read_up_to = match.end()
        return match

    async def exit_code(self, *, timeout_s: float = 60.0) -> int:
        """Wait for the exit code, within `timeout_s`."""
        try:
            return await asyncio.to_thread(self._process.wait, timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s:g} s:\n{self.text}") from None

    def _start(self, terminal: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _TAKE_TERMINAL, *self._arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=self._environment,
        )

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        except OSError:  # EIO: no process has the terminal open
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._fd)
        self._text += data.decode(errors="replace")
        self._news.set()
