"""A cluster whose processes are restarted after any exit, as a supervisor such as systemd would."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from deploy import ClusterFailed, LocalClusterConfig
from deploy.process import LocalProcess
from tests.e2e.clusters import START_TIMEOUT_S
from tests.faults.cluster import FaultyCluster

RESTARTS_WITHIN_S = (0.1, 1.0)


@dataclass(frozen=True, slots=True)
class Restart:
    """When a process ended, when the next one was started and when it listened, in seconds of the loop's
    clock.
    """

    name: str
    ended_s: float
    started_s: float
    listening_s: float


class StormCluster(FaultyCluster):
    """Byte proxies around every worker; each process that ends starts again after a random short delay."""

    def __init__(self, config: LocalClusterConfig, *, seed: int) -> None:
        super().__init__(config, seed=seed, has_proxies=True)
        self._generator = random.Random(f"{seed} restarts")
        self._restarting: set[asyncio.Task[None]] = set()
        self._supervisor: asyncio.Task[None] | None = None
        self.started_s: dict[str, float] = {}
        self.restarts: list[Restart] = []

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._supervisor = asyncio.create_task(self._supervise())
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        tasks = [*self._restarting, *([self._supervisor] if self._supervisor else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().__aexit__(exception_type, exception, traceback)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to the present process of this name, which may have ended already."""
        self._note(name)
        self.cluster.kill(name, number)

    async def _supervise(self) -> None:
        while True:
            process = await self.cluster.next_exit()
            task = asyncio.create_task(self._start_again(process))
            self._restarting.add(task)
            task.add_done_callback(self._restarting.discard)

    async def _start_again(self, process: LocalProcess) -> None:
        now, name = asyncio.get_running_loop().time, process.name
        ended_s = now()
        await asyncio.sleep(self._generator.uniform(*RESTARTS_WITHIN_S))
        started_s = self.started_s[name] = now()
        # A process killed before it listens exits again and is restarted again.
        with contextlib.suppress(ClusterFailed):
            await self.restart(name)
            await self.cluster.process(name).listening_address(timeout_s=START_TIMEOUT_S)
            self.restarts.append(Restart(name, ended_s, started_s, now()))
