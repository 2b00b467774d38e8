from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import psutil
import pytest

from bench.harness.figure import NotMeasured
from bench.harness.vllm_server import VllmServer

SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
port = int(sys.argv[sys.argv.index("--port") + 1])
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""


def python(folder: Path, program: str) -> Path:
    """An executable that runs `program` for any module."""
    file = folder / "python"
    file.write_text(f"#!{sys.executable}\nimport sys\nsys.argv[1:3] = []\n{program}")
    file.chmod(0o700)
    return file


async def until_stopped(processes: list[psutil.Process], *, expected: bool) -> None:
    """Signals take effect a moment after they were sent."""
    async with asyncio.timeout(10):
        while {process.status() == psutil.STATUS_STOPPED for process in processes} != {expected}:
            await asyncio.sleep(0.01)


async def test_all_processes_are_stopped_between_turns_and_ended_at_the_end(tmp_path: Path) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    async with VllmServer(python(tmp_path, SERVER), tmp_path, log=tmp_path / "log") as server:
        started = [
            process
            for process in psutil.Process().children(recursive=True)
            if process.pid not in before and os.getpgid(process.pid) != os.getpgid(0)
        ]
        assert len(started) >= 2
        with server.running():
            await until_stopped(started, expected=False)
        await until_stopped(started, expected=True)
    assert not any(process.is_running() for process in started)


async def test_a_server_that_exits_is_not_measured_and_shows_its_log(tmp_path: Path) -> None:
    program = python(tmp_path, 'print("no such model", flush=True); sys.exit(3)')
    with pytest.raises(NotMeasured, match="vLLM exited: no such model"):
        async with VllmServer(program, tmp_path, log=tmp_path / "log"):
            pass
