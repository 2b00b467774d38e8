"""A cluster of real processes, started by the product's launcher, with fault injection."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import psutil

from deploy import LocalCluster, LocalClusterConfig
from deploy.local import COORDINATOR
from deploy.local_config import worker_name
from stageline_rpc.v1 import cluster_pb2
from tests.e2e.clusters import START_TIMEOUT_S, is_serving, wait_for_status
from tests.e2e.leftovers import is_free, listening_ports
from tests.fake_processes import is_running
from tests.faults.byte_proxy import ByteProxy, Connect
from tests.faults.lines import WorkerLines

EXIT_TIMEOUT_S = 30.0


class FaultyCluster:
    """Starts the processes, serves while entered, and checks for leftovers on exit.

    With `has_proxies` every worker has byte proxies, with `has_frame_proxies` also frame proxies. Processes
    are killed, frozen and restarted by name: "coordinator", "worker-0", "worker-1", ...
    """

    def __init__(
        self,
        config: LocalClusterConfig,
        *,
        seed: int = 0,
        has_proxies: bool = False,
        has_frame_proxies: bool = False,
        connect: Connect | None = None,
    ) -> None:
        """`connect` dials a coordinator on another host (default: the tests' own network)."""
        self._gate = None if connect is None else ByteProxy(connect=connect)
        self._stack = AsyncExitStack()
        self._config = config
        self._pids: set[int] = set()
        self.lines: dict[str, WorkerLines] = {}
        if has_proxies or has_frame_proxies:
            self.lines = {
                worker_name(worker): WorkerLines(
                    seed=seed * 1009 + worker, has_frame_proxies=has_frame_proxies
                )
                for worker in range(config.num_workers)
            }

    async def __aenter__(self) -> Self:
        try:
            for lines in self.lines.values():
                await self._stack.enter_async_context(lines)
            self.cluster = LocalCluster(self._with_lines())
            await self._stack.enter_async_context(self.cluster)
            for name, lines in self.lines.items():
                lines.out.target = self.cluster.address
                await self._connect(name)
            if self._gate is None:
                await self.cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
            else:
                self._gate.target = self.cluster.address
                await self._stack.enter_async_context(self._gate)
            await self.until(self.has_all_workers, timeout_s=START_TIMEOUT_S)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        running = [name for name in self.names if self.cluster.process(name).is_running]
        for name in running:
            self._note(name)
        ports = _ports_of([self.cluster.process(name).pid for name in running])
        await self._stack.__aexit__(exception_type, exception, traceback)
        if exception is None:
            assert [pid for pid in self._pids if is_running(pid)] == []
            assert [port for port in ports if not is_free(f"127.0.0.1:{port}")] == []

    @property
    def address(self) -> str:
        """Address of the coordinator for clients."""
        return self.cluster.address if self._gate is None else self._gate.address

    @property
    def names(self) -> list[str]:
        """Names of all processes."""
        return [COORDINATOR, *self.worker_names]

    @property
    def worker_names(self) -> list[str]:
        return [worker_name(worker) for worker in range(self._config.num_workers)]

    async def until(
        self,
        condition: Callable[[cluster_pb2.GetStatusResponse], bool] = is_serving,
        *,
        timeout_s: float = 60.0,
    ) -> cluster_pb2.GetStatusResponse:
        """Waits for a status that meets the condition and returns it."""
        return await wait_for_status(self.address, condition, timeout_s=timeout_s)

    async def places(self) -> dict[str, str]:
        """Worker by role FIRST, MIDDLE, LAST or ONLY; the first of several MIDDLE stages."""
        status = await self.until()
        by_stage = sorted(
            (worker for worker in status.workers if worker.HasField("stage")), key=lambda w: -w.stage
        )
        return {cluster_pb2.StageRole.Name(w.role).removeprefix("STAGE_ROLE_"): w.name for w in by_stage}

    async def kill(self, *names: str) -> None:
        """Sends SIGKILL to all; returns when they have exited."""
        for name in names:
            self._note(name)
            self.cluster.kill(name, signal.SIGKILL)
        await asyncio.gather(*(self._ended(name) for name in names))

    async def terminate(self, name: str, *, timeout_s: float = EXIT_TIMEOUT_S) -> str:
        """Sends SIGTERM; returns the exit, such as "exit code 0"."""
        self._note(name)
        self.cluster.kill(name, signal.SIGTERM)
        return await self._ended(name, timeout_s=timeout_s)

    def freeze(self, name: str) -> None:
        """Sends SIGSTOP: the process stops computing, its connections stay open."""
        self.cluster.kill(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        self.cluster.kill(name, signal.SIGCONT)

    async def restart(self, *names: str) -> None:
        """Restarts processes immediately with the same command line; running ones are killed first."""
        for name in names:
            if (lines := self.lines.get(name)) is not None:
                lines.into.target = ""
        for name in names:
            await self.cluster.restart(name)
        for name in names:
            await self._connect(name)

    def heal(self) -> None:
        """Ends all network faults; processes are unchanged."""
        for lines in self.lines.values():
            lines.heal()

    def has_all_workers(self, status: cluster_pb2.GetStatusResponse) -> bool:
        """Whether it serves and every worker has joined and is neither lost nor loading."""
        settled = (cluster_pb2.WORKER_STATE_READY, cluster_pb2.WORKER_STATE_SPARE)
        states = [worker.state for worker in status.workers]
        return (
            is_serving(status)
            and len(states) == self._config.num_workers
            and all(state in settled for state in states)
        )

    def _with_lines(self) -> LocalClusterConfig:
        if not self.lines:
            return self._config
        arguments = self._config.worker_arguments or ((),) * self._config.num_workers
        return dataclasses.replace(
            self._config,
            worker_arguments=tuple(
                (*own, *lines.worker_arguments())
                for own, lines in zip(arguments, self.lines.values(), strict=True)
            ),
        )

    async def _connect(self, name: str) -> None:
        if (lines := self.lines.get(name)) is not None:
            process = self.cluster.process(name)
            lines.into.target = await process.listening_address(timeout_s=START_TIMEOUT_S)

    async def _ended(self, name: str, *, timeout_s: float = EXIT_TIMEOUT_S) -> str:
        process = self.cluster.process(name)
        async with asyncio.timeout(timeout_s):
            await process.wait()
        return process.describe_exit()

    def _note(self, name: str) -> None:
        """Records resources to check for leftovers."""
        self._pids.add(self.cluster.process(name).pid)


def _ports_of(pids: Iterable[int]) -> list[int]:
    try:
        return listening_ports(list(pids))
    except psutil.NoSuchProcess:
        return []
