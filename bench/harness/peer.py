"""A child process that measures a bound; questions and answers are lines of JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, Self

from bench.harness.figure import NotMeasured
from deploy import parent_death_signal

_GRACE_S = 5.0
NOTHING: Mapping[str, str] = MappingProxyType({})


class Peer:
    """`python -m MODULE ARGUMENTS...`; answers each question with one line. Ends with this process."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        num_threads: int = 1,
        environment: Mapping[str, str] = NOTHING,
        command: Sequence[str] = (),
    ) -> None:
        """`command` replaces this Python and the module, whose name stays the one in errors."""
        self._module = module
        self._command = [*(command or (sys.executable, "-m", module)), *arguments]
        self._environment = {"OMP_NUM_THREADS": str(num_threads), **environment}
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", parent_death_signal.__file__, str(os.getpid())),
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **self._environment},
        )
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        process = self._process
        assert process is not None and process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_GRACE_S if exception is None else 0):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def ask(self, question: Mapping[str, Any], *, timeout_s: float = 60.0) -> dict[str, Any]:
        """Ask a question. Raises NotMeasured if the process has exited or does not answer."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(json.dumps(question).encode() + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
        except (TimeoutError, OSError, RuntimeError) as error:
            # uvloop raises RuntimeError for the pipe of a process that has exited
            raise NotMeasured(f"{self._module} does not answer {question}: {error!r}") from error
        if not line:
            raise NotMeasured(f"{self._module} ended during question {question}")
        answer: dict[str, Any] = json.loads(line)
        return answer
