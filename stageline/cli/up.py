"""`stageline up`: a cluster on this machine, until Ctrl-C."""

import asyncio
import shlex
import signal
from collections import defaultdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from checkpoint import CheckpointError
from coordinator.config import DEFAULT_TRACE_BYTES, CoordinatorConfig
from coordinator.planner.plan import PlanImpossible, WorkerCapacity
from deploy import LocalCluster, LocalClusterConfig, LocalProcess
from deploy.process import MAX_RESTARTS, WINDOW_S, RestartPolicy
from stage_worker.backends.contract import KernelChoice
from stageline.cli import options
from stageline.cli.coordinator import flags_of
from stageline.cli.options import CommandFailed
from stageline.cli.tables import describe_cluster, describe_kv_cache, describe_start, topology_view
from stageline.client.client import Client
from stageline_rpc.v1 import cluster_pb2
from telemetry.logs import LogFormat, LogLevel, LogSettings
from wire.channels import raise_file_limit
from wire.errors import reason_of

_UNKNOWN_MEMORY_BYTES = 2**50  # of a device that only its worker asks: no reason to refuse


def check_plan(coordinator: CoordinatorConfig, cluster: LocalClusterConfig) -> None:
    """Raises CommandFailed with the line that the coordinator would say once all workers have joined."""
    from coordinator.model import open_model  # imported late, as the coordinator does
    from coordinator.planner.planner import plan_for

    workers = [
        WorkerCapacity(name=name, memory_bytes=memory_bytes or _UNKNOWN_MEMORY_BYTES)
        for name, memory_bytes in cluster.worker_memory_bytes().items()
    ]
    try:
        plan_for(coordinator, open_model(coordinator), workers)
    except (CheckpointError, PlanImpossible) as error:
        raise CommandFailed(str(error), reason=reason_of(error)) from error


async def wait_until_serving(
    cluster: LocalCluster, console: Console, *, timeout_s: float
) -> cluster_pb2.GetStatusResponse:
    """Returns the status once the cluster serves, with a line that moves until then. Raises ClusterFailed."""
    with console.status("Waiting for the workers") as line:
        return await cluster.wait_until_serving(
            timeout_s=timeout_s, on_status=lambda status: line.update(escape(describe_start(status)))
        )


_GENERATE_TEXT = 'generate "Once upon a time"'
_GENERATE_IDS = "generate --token-ids 1,2,3"
_NUM_WORKERS = 3
_START_TIMEOUT_S = 3600.0  # a large model takes its time to load; the progress shows meanwhile
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def up(
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help=f"Stage workers to start, one stage each: {_NUM_WORKERS}, or as many as --mock is given.",
        ),
    ] = None,
    model: options.Model = None,
    listen: options.Listen = options.DEFAULT_ADDRESS,
    device: Annotated[
        str, typer.Option(metavar="DEVICE,...", help="One device for all workers, or one for each.")
    ] = "cpu",
    memory: options.Memory = None,
    threads: options.Threads = None,
    pin: Annotated[
        bool, typer.Option(help="Give each worker on the CPU cores of its own, if there are enough.")
    ] = True,
    kernels: options.Kernels = KernelChoice.AUTO,
    layers: options.Layers = None,
    dtype: options.Dtype = None,
    wire_dtype: options.WireDtype = None,
    block_size: options.BlockSize = 16,
    max_step_tokens: options.MaxStepTokens = 512,
    max_step_sequences: options.MaxStepSequences = 64,
    max_model_len: options.MaxModelLen = None,
    kv_tokens: options.KvTokens = None,
    prefix_cache: options.PrefixCache = True,
    queue_size: options.QueueSize = 256,
    max_client_requests: options.MaxClientRequests = None,
    client_key: options.ClientKey = None,
    max_unread_tokens: options.MaxUnreadTokens = 4096,
    priority_age: options.PriorityAge = 10.0,
    steps_in_flight: options.StepsInFlight = None,
    max_decode_slowdown: options.MaxDecodeSlowdown = 1.3,
    heartbeat: options.Heartbeat = 0.5,
    lease: options.Lease = 2.0,
    recovery_timeout: options.RecoveryTimeout = 30.0,
    drain_timeout: options.DrainTimeout = 30.0,
    mock_model: options.MockModel = None,
    self_check: options.SelfCheck = None,
    self_check_interval: options.SelfCheckInterval = 600.0,
    journal: options.Journal = None,
    reattach_timeout: options.ReattachTimeout = 60.0,
    http: options.Http = None,
    no_http: options.NoHttp = False,
    token_file: options.TokenFile = None,
    trace_sample: options.TraceSample = None,
    trace_store: options.TraceStore = 512,
    trace_bytes: options.TraceBytes = None,
    restart: Annotated[
        bool,
        typer.Option(
            help="Start a worker again whose device has failed or that a signal has ended, "
            f"at most {MAX_RESTARTS} times within {WINDOW_S / 60:g} min."
        ),
    ] = True,
    log_format: options.LogFormat = LogFormat.CONSOLE,
    log_level: options.LogLevel = LogLevel.INFO,
    mock: Annotated[
        list[str] | None,
        typer.Option(metavar="TIMES", help="Mock stages, as in step=20ms; once for all, or once for each."),
    ] = None,
) -> int:
    """Start a coordinator and its workers on this machine, and keep them until Ctrl-C."""

    num_workers = workers or (len(mock) if mock and len(mock) > 1 else _NUM_WORKERS)

    def make_configs() -> tuple[CoordinatorConfig, LocalClusterConfig]:
        coordinator = CoordinatorConfig(
            model_directory=model,
            listen=listen,
            num_stages=num_workers,
            layers=options.parse_layers(layers),
            dtype=dtype,
            wire_dtype=wire_dtype,
            block_size=block_size,
            max_step_tokens=max_step_tokens,
            max_step_sequences=max_step_sequences,
            max_sequence_tokens=max_model_len,
            max_kv_tokens=kv_tokens,
            prefix_cache=prefix_cache,
            queue_size=queue_size,
            max_client_requests=max_client_requests,
            client_key=client_key,
            max_unread_tokens=max_unread_tokens,
            priority_age_s=priority_age,
            steps_in_flight=steps_in_flight,
            max_decode_slowdown=max_decode_slowdown,
            heartbeat_s=heartbeat,
            lease_s=lease,
            recovery_timeout_s=recovery_timeout,
            drain_timeout_s=drain_timeout,
            mock_model=mock_model,
            self_check=self_check,
            self_check_interval_s=self_check_interval,
            journal=journal,
            reattach_timeout_s=reattach_timeout,
            http=options.http_address(http, options.ANY_HTTP, is_off=no_http),
            token=options.read_token(token_file),
            trace_sample=trace_sample,
            trace_store=trace_store,
            trace_bytes=trace_bytes or DEFAULT_TRACE_BYTES,
            logs=LogSettings(format=log_format, level=log_level),
        )
        if self_check and mock:
            raise ValueError("--self-check needs stages that compute: not together with --mock")
        if mock and kernels is not KernelChoice.AUTO:
            raise ValueError("a mock stage computes nothing: --mock does not go with --kernels")
        cluster = LocalClusterConfig(
            num_workers=num_workers,
            model_directory=model,
            listen=listen,
            devices=tuple(device.split(",")),
            memory_bytes=memory,
            num_threads=threads,
            mocks=tuple(mock or ()),
            pins_workers=pin,
            http=coordinator.http,
            coordinator_arguments=(
                *flags_of(coordinator),
                *(() if token_file is None else ("--token-file", str(token_file))),
            ),
            worker_arguments=((*coordinator.logs.flags, *_kernel_flags(kernels)),) * num_workers,
        )
        return coordinator, cluster

    coordinator, cluster = options.build_config(make_configs)
    check_plan(coordinator, cluster)
    raise_file_limit()
    return asyncio.run(run_up(cluster, restarts=restart))


def _kernel_flags(kernels: KernelChoice) -> tuple[str, ...]:
    return () if kernels is KernelChoice.AUTO else ("--kernels", kernels.value)


async def run_up(config: LocalClusterConfig, *, restarts: bool = True) -> int:
    """Returns 0 once a signal has ended the cluster; raises ClusterFailed when the coordinator ends. With
    `restarts`, workers that end unexpectedly are started again.
    """
    console = Console()
    cluster = LocalCluster(config)
    _end_on_signals(cluster, console)
    try:
        async with cluster:
            await _serve(cluster, console, restarts=restarts)
    except asyncio.CancelledError:
        console.print(f"All processes have ended.{_kept_logs(cluster)}", highlight=False, soft_wrap=True)
    return 0


def _kept_logs(cluster: LocalCluster) -> str:
    return f" Logs are kept in {cluster.log_directory}" if cluster.log_directory.exists() else ""


def _end_on_signals(cluster: LocalCluster, console: Console) -> None:
    """The first signal ends the cluster in order; a second one does not wait for that."""
    task = asyncio.current_task()
    assert task is not None

    def end() -> None:
        if task.cancelling():
            cluster.kill_all()
        else:
            console.print("Ending all processes. Ctrl-C again does not wait for them.")
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in _ENDING_SIGNALS:
        loop.add_signal_handler(number, end)


async def _serve(cluster: LocalCluster, console: Console, *, restarts: bool) -> None:
    console.print(f"Logs are in {cluster.log_directory}", highlight=False)
    status = await wait_until_serving(cluster, console, timeout_s=_START_TIMEOUT_S)
    async with Client(cluster.address) as client:
        generate = _GENERATE_TEXT if (await client.model()).has_tokenizer else _GENERATE_IDS
    console.print(describe_cluster(status), highlight=False)
    console.print(topology_view(status))
    console.print(describe_kv_cache(status), highlight=False)
    if cluster.dashboard_url is not None:
        console.print(f"dashboard {cluster.dashboard_url}", highlight=False)
    console.print(
        f"Serving at [bold]{cluster.address}[/]. Ctrl-C ends it. In another terminal:\n"
        f"  {_client_command(cluster, generate)}\n  {_client_command(cluster, 'status')}",
        highlight=False,
    )
    supervisor = _Supervisor(cluster, console, restarts=restarts)
    try:
        while True:
            process = await cluster.next_exit()
            if process is cluster.coordinator:
                raise process.failure()
            supervisor.note_exit(process)
    finally:
        await supervisor.close()


class _Supervisor:
    """Tells of workers that have ended, and starts them again where that may help."""

    def __init__(self, cluster: LocalCluster, console: Console, *, restarts: bool) -> None:
        self._cluster = cluster
        self._console = console
        self._restarts = restarts
        self._policies: defaultdict[str, RestartPolicy] = defaultdict(RestartPolicy)
        self._tasks: set[asyncio.Task[None]] = set()

    def note_exit(self, process: LocalProcess) -> None:
        """A worker has ended."""
        if process.has_left:
            self._print(f"{process.name} has left: its layers are with the others.")
            return
        self._print(str(process.failure()), style="red")
        delay_s = self._delay_s(process)
        if delay_s is None:
            self._print(
                "The others take over its layers, if they can hold them. To start it again:\n"
                f"  stageline {shlex.join(self._cluster.worker_line(process.name))}"
            )
            return
        self._print(f"Starting {process.name} again in {delay_s:g} s.")
        task = asyncio.create_task(self._start_again(process.name, delay_s), name=f"restart {process.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Starts nothing any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _delay_s(self, process: LocalProcess) -> float | None:
        code = process.exit_code
        if not self._restarts or code is None or not RestartPolicy.is_unexpected(code):
            return None
        delay_s = self._policies[process.name].next_delay_s(asyncio.get_running_loop().time())
        if delay_s is None:
            self._print(
                f"{process.name} was started again {MAX_RESTARTS} times within {WINDOW_S / 60:g} min."
            )
        return delay_s

    async def _start_again(self, name: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        try:
            process = await self._cluster.restart_worker(name)
        except OSError as error:
            self._print(f"{name} cannot be started again: {error}", style="red")
        else:
            self._print(f"Started {name} again (pid {process.pid}).")

    def _print(self, text: str, *, style: str | None = None) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True, style=style)


def _client_command(cluster: LocalCluster, command: str) -> str:
    is_default = cluster.address == options.DEFAULT_ADDRESS
    return f"stageline {command}" + ("" if is_default else f" --coordinator {cluster.address}")
