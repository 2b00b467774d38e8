"""A coordinator, its workers and a gateway as processes on this machine."""

import asyncio
import shutil
import signal
import tempfile
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc.aio

from deploy import ClusterFailed
from deploy.commands import ProcessCommand, commands, coordinator_command
from deploy.local_config import LocalClusterConfig, LocalRun, dialled_address
from deploy.process import LocalProcess
from stageline_rpc.v1 import cluster_pb2, cluster_pb2_grpc
from wire.transport import PLAIN

COORDINATOR = "coordinator"
GATEWAY = "gateway"
GRACE_S = 5.0

_POLL_INTERVAL_S = 0.1
_STATUS_TIMEOUT_S = 2.0

_Result = TypeVar("_Result")


class LocalCluster:
    """Starts the processes on entry and stops all of them on exit, including hung ones.

        async with LocalCluster(LocalClusterConfig(num_workers=3)) as cluster:
            await cluster.wait_until_serving(timeout_s=120)
            ... cluster.address ...

    Enter it from the main thread: the kernel kills the processes when the thread that started them ends
    (`deploy.parent_death_signal`). There are no automatic restarts: `next_exit` returns a process that
    exited, `restart` restarts it.
    """

    def __init__(self, config: LocalClusterConfig | LocalRun) -> None:
        self._run = config.run() if isinstance(config, LocalClusterConfig) else config
        spec = self._run.spec
        self._coordinator = spec.coordinator.name
        self._workers = tuple(worker.name for worker in spec.workers)
        self.gateways = tuple(gateway.name for gateway in spec.gateways)
        """Names of the gateways."""
        self._commands: dict[str, ProcessCommand] = {}
        self._processes: dict[str, LocalProcess] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._exits: asyncio.Queue[LocalProcess] = asyncio.Queue()
        self._listening: dict[str, str] = {}
        """Addresses of coordinator and gateway, for their restarts."""
        self._has_failed = False
        self.log_directory = self._run.log_directory or Path()

    async def __aenter__(self) -> Self:
        if self._run.log_directory is None:
            self.log_directory = Path(tempfile.mkdtemp(prefix="stageline-"))
        self.log_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            await self._start_all()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Cancellation is a request to stop, not a failure: the logs are not kept.
        self._has_failed |= isinstance(exception, Exception)
        await self.stop()

    @property
    def address(self) -> str:
        """HOST:PORT of the coordinator, as seen from this machine."""
        assert self._coordinator in self._listening, "the cluster has not been started"
        return dialled_address(self._listening[self._coordinator])

    @property
    def dashboard_url(self) -> str | None:
        """URL of the dashboard, or None without one."""
        return self.coordinator.dashboard_url()

    @property
    def coordinator(self) -> LocalProcess:
        return self._processes[self._coordinator]

    @property
    def workers(self) -> list[LocalProcess]:
        """The current processes of the workers, in the order of the configuration."""
        return [self._processes[name] for name in self._workers]

    async def gateway_url(self, name: str = GATEWAY, *, timeout_s: float) -> str:
        """URL of a gateway once it serves. Raises ClusterFailed."""
        address = await self.process(name).listening_address(timeout_s=timeout_s)
        self._listening[name] = address
        return f"http://{dialled_address(address)}"

    def process(self, name: str) -> LocalProcess:
        """The current process of this name, such as "coordinator", "gateway" or "worker-0"."""
        return self._processes[name]

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        self.process(name).send_signal(number)

    def line(self, name: str) -> list[str]:
        """The arguments of `stageline` that started a process."""
        return list(self._commands[name].argv)

    async def restart(self, name: str) -> LocalProcess:
        """Restart a process, coordinator and gateway at their addresses; kill it first if it still runs."""
        await _end([self.process(name)], grace_s=0)
        command = self._commands[name]
        if name in self._listening:
            command = command.listening_on(self._listening[name])
        return await self._start(command)

    async def next_exit(self) -> LocalProcess:
        """The next process that exits, except by `stop`; each exit is returned once."""
        return await self._exits.get()

    async def while_running(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """The result of `work`. Cancels it and raises ClusterFailed when a process exits first."""
        working = asyncio.create_task(work)
        exiting = asyncio.create_task(self.next_exit())
        try:
            await asyncio.wait((working, exiting), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise exiting.result().failure()
        finally:
            for task in (working, exiting):
                task.cancel()
            await asyncio.wait((working, exiting))

    async def wait_until_serving(
        self,
        *,
        timeout_s: float,
        on_status: Callable[[cluster_pb2.GetStatusResponse], None] | None = None,
    ) -> cluster_pb2.GetStatusResponse:
        """The status once the cluster serves; `on_status` gets each status until then.

        Raises ClusterFailed when a process exits or a worker fails, or after `timeout_s`.
        """
        detail = "the coordinator does not respond"
        try:
            async with asyncio.timeout(timeout_s), PLAIN.channel(self.address) as channel:
                while True:
                    self._raise_if_ended()
                    status = await _get_status(channel)
                    if status is not None:
                        detail = status.detail or cluster_pb2.ClusterState.Name(status.state)
                        if on_status is not None:
                            on_status(status)
                        if status.state == cluster_pb2.CLUSTER_STATE_SERVING:
                            return status
                        _raise_if_hopeless(status)
                    await asyncio.sleep(_POLL_INTERVAL_S)
        except TimeoutError:
            self._has_failed = True
            raise ClusterFailed(
                f"not serving after {timeout_s:g} s: {detail}; logs are in {self.log_directory}"
            ) from None
        except ClusterFailed:
            self._has_failed = True
            raise

    async def stop(self, *, grace_s: float = GRACE_S) -> None:
        """Stop all processes: SIGINT without a drain, then SIGKILL after `grace_s`. Idempotent."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await _end(self._processes.values(), grace_s=grace_s)
        if self._run.log_directory is None and not self._has_failed:
            shutil.rmtree(self.log_directory, ignore_errors=True)

    def kill_all(self) -> None:
        """Send SIGKILL to all processes."""
        for process in self._processes.values():
            process.send_signal(signal.SIGKILL)

    async def _start_all(self) -> None:
        """Start the coordinator, then the others, which are told where it listens."""
        spec = self._run.spec
        coordinator = await self._start(coordinator_command(spec))
        try:
            listening = await coordinator.listening_address(timeout_s=60)
        except ClusterFailed:
            self._has_failed = True
            raise
        self._listening[coordinator.name] = listening
        spec = spec.serving_at(self.address, dashboard_url=self.dashboard_url)
        for command in commands(spec)[1:]:
            await self._start(command)

    async def _start(self, command: ProcessCommand) -> LocalProcess:
        name = command.name
        self._commands[name] = command
        process = await LocalProcess.start(
            name,
            [*self._run.command, *command.argv],
            log=self.log_directory / f"{name}.log",
            environment=command.environment,
        )
        self._processes[name] = process
        watcher = asyncio.create_task(self._watch(process), name=f"watch {name}")
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return process

    async def _watch(self, process: LocalProcess) -> None:
        await process.wait()
        self._has_failed = True
        self._exits.put_nowait(process)

    def _raise_if_ended(self) -> None:
        for process in self._processes.values():
            if not process.is_running:
                raise process.failure()


async def _get_status(channel: grpc.aio.Channel) -> cluster_pb2.GetStatusResponse | None:
    stub = cluster_pb2_grpc.ClusterStub(channel)
    try:
        return await stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=_STATUS_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return None
        raise ClusterFailed(f"the coordinator answers {error.code().name}: {error.details()}") from None


def _raise_if_hopeless(status: cluster_pb2.GetStatusResponse) -> None:
    if status.state == cluster_pb2.CLUSTER_STATE_BLOCKED:
        raise ClusterFailed(status.detail)
    for worker in status.workers:
        if worker.state == cluster_pb2.WORKER_STATE_QUARANTINED:
            raise ClusterFailed(f"{worker.name} failed: {worker.detail}")


async def _end(processes: Iterable[LocalProcess], *, grace_s: float) -> None:
    running = [process for process in processes if process.is_running]
    try:
        if running and grace_s > 0:
            for process in running:
                process.send_signal(signal.SIGINT)
            await asyncio.wait([asyncio.ensure_future(p.wait()) for p in running], timeout=grace_s)
    finally:
        for process in running:
            process.send_signal(signal.SIGKILL)
        await asyncio.gather(*(process.wait() for process in running))
