"""Faults of workers on a GPU beside running streams: memory, a poisoned context, kill -9."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

from bench.gpu import targets
from bench.gpu.faulty import ASSERT, FAULT_VARIABLE, MEMORY, done_file
from bench.gpu.phase import Recorder, needs_cuda
from bench.gpu.phases.cluster import FULL, MOST_NEW_TOKENS, QUICK, Plan, cluster_of
from bench.harness.cluster import BenchCluster
from bench.harness.figure import Better, NotMeasured
from bench.harness.streams import Stream
from wire.exit_codes import ExitCode

COMMAND = (sys.executable, "-P", "-m", "bench.gpu.faulty")
NUM_STREAMS = 4
TOKENS_BEFORE = 4
POLL_S = 0.005
WAIT_S = 60.0
VICTIM = "worker-1"
Fault = Callable[[], Awaitable[None]]


async def measure(recorder: Recorder) -> None:
    """Each fault in the same cluster of two workers; every stream must end with all of its tokens."""
    order = recorder.order
    plan = QUICK if order.is_quick else FULL
    file = order.work / "fault"
    cluster = cluster_of(order, plan, num_workers=2, command=COMMAND, environment={FAULT_VARIABLE: str(file)})
    async with cluster:
        faults = _Faults(recorder, cluster, plan, file)
        await faults.out_of_memory()
        await faults.kill()
        if order.is_cuda:
            await faults.poison()
        else:
            reason = needs_cuda(order)
            recorder.not_measured(targets.POISON_NAME, "s", reason, better=Better.LOWER)


class _Faults:
    """Faults of one cluster, and the pauses of its streams."""

    def __init__(self, recorder: Recorder, cluster: BenchCluster, plan: Plan, file: Path) -> None:
        self._recorder = recorder
        self._cluster = cluster
        self._plan = plan
        self._file = file

    async def out_of_memory(self) -> None:
        """The step fails, the worker stays."""
        pids = [worker.pid for worker in self._cluster.processes.workers]
        pause_s = await self._pause_s(lambda: self._inject(MEMORY))
        if [worker.pid for worker in self._cluster.processes.workers] != pids:
            raise NotMeasured("a worker ended because its device was out of memory")
        self._recorder.figure("pause after out of memory", pause_s, "s", better=Better.LOWER)

    async def kill(self) -> None:
        """The worker is started again at once."""

        async def kill_and_restart() -> None:
            self._cluster.processes.kill(VICTIM)
            await self._ended()
            await self._cluster.processes.restart(VICTIM)

        pause_s = await self._pause_s(kill_and_restart)
        self._recorder.figure("pause after kill -9 and restart", pause_s, "s", better=Better.LOWER)

    async def poison(self) -> None:
        """The worker ends by itself, with the exit code of a failed device, and is started again."""
        took_s = float("nan")

        async def fail_and_restart() -> None:
            nonlocal took_s
            await self._inject(ASSERT)
            name, exit_code = await self._ended()
            took_s = time.monotonic() - float(done_file(self._file).read_text())
            if exit_code != ExitCode.DEVICE_FAILED:
                raise NotMeasured(f"{name} ended with exit code {exit_code} after a device-side assert")
            await self._cluster.processes.restart(name)

        pause_s = await self._pause_s(fail_and_restart)
        self._recorder.figure(targets.POISON_NAME, took_s, "s", better=Better.LOWER)
        self._recorder.figure("pause after a device-side assert", pause_s, "s", better=Better.LOWER)

    async def _inject(self, fault: str) -> None:
        done_file(self._file).unlink(missing_ok=True)
        waiting = self._file.with_name("fault.new")
        waiting.write_text(fault)
        waiting.rename(self._file)
        async with asyncio.timeout(WAIT_S):
            while not done_file(self._file).exists():
                await asyncio.sleep(POLL_S)

    async def _ended(self) -> tuple[str, int | None]:
        async with asyncio.timeout(WAIT_S):
            process = await self._cluster.processes.next_exit()
        return process.name, process.exit_code

    async def _pause_s(self, fault: Fault) -> float:
        """The longest gap of a stream that was running at the fault. Raises NotMeasured for lost tokens."""
        streams = [Stream(0.0) for _ in range(NUM_STREAMS)]
        prompt_tokens = self._plan.prompt_tokens
        calls = [
            asyncio.create_task(self._cluster.generate(prompt_tokens, MOST_NEW_TOKENS, into=stream))
            for stream in streams
        ]
        try:
            async with asyncio.timeout(WAIT_S):
                while min(len(stream.arrivals_s) for stream in streams) < TOKENS_BEFORE:
                    await asyncio.sleep(POLL_S)
            began_s = time.monotonic()
            await fault()
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        counts = [len(stream.arrivals_s) for stream in streams]
        if counts != [MOST_NEW_TOKENS] * NUM_STREAMS:
            raise NotMeasured(f"streams ended with {counts} tokens instead of {MOST_NEW_TOKENS} each")
        gaps = [
            after - before
            for stream in streams
            for before, after in pairwise(stream.arrivals_s)
            if after >= began_s
        ]
        if not gaps:
            raise NotMeasured("all streams had ended before the fault")
        return max(gaps)
