"""A cluster of processes whose coordinator logs its steps, and the load on it."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from bench.harness import loop_probe
from bench.harness.certified import BenchAuthority
from bench.harness.figure import NotMeasured
from bench.harness.loop_probe import LoopLag, read_lags
from bench.harness.step_log import FILE_VARIABLE, LoggedStep, read_steps
from bench.harness.streams import Stream
from certificates.identity import Role
from deploy import LocalCluster, LocalClusterConfig
from deploy.local_config import worker_name
from stageline.client.client import Client
from stageline.client.request import Detach
from stageline_rpc.v1 import cluster_pb2

START_TIMEOUT_S = 120.0
KEPT_S = 1.0
IDLE_POLL_S = 0.1
FIRST_TOKEN_ID = 3
"""Prompts omit the ids that checkpoints often reserve for begin and end."""

_REPOSITORY = Path(__file__).resolve().parents[2]
_TRACED_COMMAND = (sys.executable, "-P", "-m", "bench.harness.traced")


class BenchCluster:
    """A running cluster with one client.

    Prompts are new random token ids for every request, so that nothing is found in the cache; or texts of
    random `words`, if there are any.
    """

    def __init__(
        self,
        config: LocalClusterConfig,
        *,
        vocab_size: int,
        words: Sequence[str] = (),
        probes_loop: bool = False,
        has_tls: bool = False,
        command: tuple[str, ...] = _TRACED_COMMAND,
    ) -> None:
        """`probes_loop`: the coordinator logs how late its event loop is, for `lags`.

        `command` is the `stageline` command with a coordinator that logs its steps.
        """
        self._has_tls = has_tls
        self._command = command
        self._config = config
        self._vocab_size = vocab_size
        self._words = words
        self._probes_loop = probes_loop
        self._random = random.Random(0)
        self._exit = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stageline-bench-")))
            self._steps_file = folder / "steps.jsonl"
            self._lags_file = folder / "lags"
            path = [str(_REPOSITORY), str(_REPOSITORY / "proto"), os.environ.get("PYTHONPATH", "")]
            environment = {
                **self._config.environment,
                FILE_VARIABLE: str(self._steps_file),
                "PYTHONPATH": os.pathsep.join(filter(None, path)),
            }
            if self._probes_loop:
                environment[loop_probe.FILE_VARIABLE] = str(self._lags_file)
            config = replace(self._config, environment=environment, command=self._command)
            if self._has_tls:
                authority = BenchAuthority(folder)
                config = _certified(config, authority)
            self.processes = await stack.enter_async_context(LocalCluster(config))
            own = authority.issue(Role.OPERATOR, "bench") if self._has_tls else None
            self.client = await stack.enter_async_context(Client(self.processes.address, tls_dir=own))
            if self._has_tls:
                await self.processes.while_running(self._until_serving())
            else:
                await self.processes.wait_until_serving(timeout_s=START_TIMEOUT_S)
            self._exit = stack.pop_all()
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._exit.__aexit__(exception_type, exception, traceback)

    async def _until_serving(self) -> None:
        """With certificates, which the cluster's own wait does not have."""
        end_s = time.monotonic() + START_TIMEOUT_S
        while (status := await self.status()).state != cluster_pb2.CLUSTER_STATE_SERVING:
            if time.monotonic() > end_s:
                raise NotMeasured(f"not serving after {START_TIMEOUT_S:g} s: {status.detail}")
            await asyncio.sleep(IDLE_POLL_S)

    def steps(self, begin_s: float = 0.0) -> list[LoggedStep]:
        """Steps sent since `begin_s` and answered."""
        return [step for step in read_steps(self._steps_file) if step.sent_s >= begin_s]

    def lags(self, begin_s: float, end_s: float) -> list[LoopLag]:
        """Lags of the coordinator's event loop that were due in [begin_s, end_s)."""
        return [lag for lag in read_lags(self._lags_file) if begin_s <= lag.due_s < end_s]

    def prompt(self, num_tokens: int) -> list[int] | str:
        """Token ids, or a text of as many words."""
        if self._words:
            return " ".join(self._random.choices(self._words, k=num_tokens))
        return self._random.choices(range(FIRST_TOKEN_ID, self._vocab_size), k=num_tokens)

    async def generate(self, prompt_tokens: int, max_tokens: int, *, into: Stream | None = None) -> Stream:
        """Run one request to its end; `into` grows meanwhile."""
        prompt = self.prompt(prompt_tokens)
        stream = into or Stream(0.0)
        stream.sent_s = time.monotonic()
        outputs = self.client.generate(prompt, max_tokens=max_tokens, ignore_eos=True)
        async with aclosing(outputs):
            async for output in outputs:
                stream.arrivals_s += [time.monotonic()] * len(output.token_ids)
        return stream

    async def generate_all(self, num_streams: int, prompt_tokens: int, max_tokens: int) -> list[Stream]:
        """Run requests concurrently to their ends. Raises ClusterFailed if a process exits before."""

        async def run() -> list[Stream]:
            calls = [self.generate(prompt_tokens, max_tokens) for _ in range(num_streams)]
            return await asyncio.gather(*calls)

        return await self.processes.while_running(run())

    async def run_unread(self, num_streams: int, prompt_tokens: int, max_tokens: int) -> None:
        """Run requests without readers, so that the coordinator streams no tokens."""
        for _ in range(num_streams):
            outputs = self.client.generate(
                self.prompt(prompt_tokens),
                max_tokens=max_tokens,
                ignore_eos=True,
                on_disconnect=Detach(keep_s=KEPT_S),
            )
            async with aclosing(outputs):
                await anext(outputs)
        await self.processes.while_running(self._until_idle())

    async def _until_idle(self) -> None:
        while (counts := (await self.status()).requests).prefill + counts.decode + counts.waiting:
            await asyncio.sleep(IDLE_POLL_S)

    async def status(self) -> cluster_pb2.GetStatusResponse:
        return await self.client.status()

    def cpu_s(self) -> float:
        """Processor time of all processes so far."""
        processes = (self.processes.coordinator, *self.processes.workers)
        times = [psutil.Process(process.pid).cpu_times() for process in processes]
        return sum(cpu_times.user + cpu_times.system for cpu_times in times)

    def resident_bytes(self) -> list[int]:
        """Resident memory of each worker."""
        return [psutil.Process(worker.pid).memory_info().rss for worker in self.processes.workers]


def _certified(config: LocalClusterConfig, authority: BenchAuthority) -> LocalClusterConfig:
    """Give each process a certificate of its own."""
    head = ("--tls-dir", str(authority.issue(Role.COORDINATOR, "head")))
    workers = range(config.num_workers)
    directories = [authority.issue(Role.WORKER, worker_name(worker)) for worker in workers]
    before = config.worker_arguments or ((),) * config.num_workers
    return replace(
        config,
        coordinator_arguments=(*config.coordinator_arguments, *head),
        worker_arguments=tuple(
            (*arguments, "--tls-dir", str(directory))
            for arguments, directory in zip(before, directories, strict=True)
        ),
    )
