"""vLLM for CPU as a child process: two pipeline stages with one thread each, on a core of their own."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.harness.figure import NotMeasured
from deploy import parent_death_signal

START_TIMEOUT_S = 400.0
"""The first start compiles the model."""
_POLL_S = 0.5
_GRACE_S = 10.0
_LOG_END_BYTES = 600

_PR_SET_CHILD_SUBREAPER = 36
"""Source: prctl(2)."""

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class VllmServer:
    """`PYTHON -m vllm.entrypoints.openai.api_server` for a checkpoint without a tokenizer.

    After the first `running` its processes are stopped outside of it, so that they take no core from another
    engine.
    """

    def __init__(self, python: Path, model: Path, *, log: Path) -> None:
        _adopt_orphans()
        self._python, self._model, self._log = python, model, log
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", parent_death_signal.__file__, str(os.getpid())),
                *self._command(port),
                env={**os.environ, **_ENVIRONMENT},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            await self._until_healthy()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._end()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the processes run; afterwards they are stopped until the next time."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _command(self, port: int) -> list[str]:
        return [
            *(str(self._python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self._model), "--served-model-name", "model", "--skip-tokenizer-init"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--pipeline-parallel-size", "2", "--no-enable-prefix-caching"),
            *("--dtype", "bfloat16", "--max-model-len", "4096"),
        ]

    async def _until_healthy(self) -> None:
        assert self._process is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await asyncio.to_thread(_is_healthy, self.url):
                    if self._process.returncode is not None:
                        raise NotMeasured(f"vLLM exited: {self._log_end()}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise NotMeasured(f"vLLM not ready after {START_TIMEOUT_S:g} s: {self._log_end()}") from None

    def _log_end(self) -> str:
        return self._log.read_bytes()[-_LOG_END_BYTES:].decode(errors="replace").strip()

    async def _end(self) -> None:
        """End the whole process group: engine and workers are children of the server."""
        process = self._process
        assert process is not None
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGINT)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_GRACE_S):
                    await process.wait()
        finally:
            self._signal(signal.SIGKILL)
            await process.wait()
            _reap(process.pid)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that others are not charged for them. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap(group: int) -> None:
    """Wait for the killed children of this process in `group`."""
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-group, 0)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
