"""`stageline up`: a cluster and its gateway on this machine until Ctrl-C."""

import asyncio
import os
import shlex
import signal
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, TypedDict

import typer
from rich.console import Console
from rich.markup import escape

from checkpoint import CheckpointError
from coordinator.config import CoordinatorConfig
from coordinator.planner.plan import DeviceKind, PlanImpossible, WorkerCapacity
from deploy import LocalCluster, LocalClusterConfig, LocalProcess, LocalRun
from deploy.process import MAX_RESTARTS, WINDOW_S, RestartPolicy
from gateway.config import DEFAULT_HTTP_ADDRESS, GatewayConfig
from stage_worker.backends.contract import KernelChoice
from stage_worker.config import WorkerConfig
from stageline.cli import options
from stageline.cli.config_flags import config_parameters, flags_of, make_config
from stageline.cli.options import CommandFailed
from stageline.cli.tables import describe_cluster, describe_kv_cache, describe_start, topology_view
from stageline.client.client import Client
from stageline_rpc.v1 import cluster_pb2, inference_pb2
from wire.addresses import DEFAULT_ADDRESS, is_free, parse_address
from wire.channels import raise_file_limit
from wire.errors import reason_of
from wire.flags import OFF, parameter_of
from wire.user_files import find_cache_directory

_UNKNOWN_MEMORY_BYTES = 2**50  # for a GPU, whose memory only its worker can read: any plan fits


def check_plan(coordinator: CoordinatorConfig, cluster: LocalRun) -> None:
    """Raises CommandFailed for a plan that the coordinator would reject once all workers have joined."""
    from coordinator.model import open_model  # imported late, as the coordinator does
    from coordinator.planner.planner import plan_for

    workers = [
        WorkerCapacity(
            name=worker.name,
            memory_bytes=worker.memory_bytes or _UNKNOWN_MEMORY_BYTES,
            device=DeviceKind.HOST if worker.device == "cpu" else DeviceKind.GPU_IN_PLACE,
        )
        for worker in cluster.spec.workers
    ]
    try:
        plan_for(coordinator, open_model(coordinator), workers)
    except (CheckpointError, PlanImpossible) as error:
        raise CommandFailed(str(error), reason=reason_of(error)) from error


async def wait_until_serving(
    cluster: LocalCluster, console: Console, *, timeout_s: float
) -> cluster_pb2.GetStatusResponse:
    """Show progress and return the status once the cluster serves. Raises ClusterFailed."""
    with console.status("Waiting for the workers") as line:
        return await cluster.wait_until_serving(
            timeout_s=timeout_s, on_status=lambda status: line.update(escape(describe_start(status)))
        )


_GENERATE_TEXT = 'generate "Once upon a time"'
_GENERATE_IDS = "generate --token-ids 1,2,3"
_NUM_WORKERS = 3
ANY_PORT = "127.0.0.1:0"
_START_TIMEOUT_S = 3600.0  # large models load for minutes
GATEWAY_TIMEOUT_S = 60.0  # it loads a tokenizer
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


GATEWAY_FLAGS = (
    "--served-model-name",
    "--chat-template",
    "--tool-parser",
    "--reasoning-parser",
    "--strict-fields",
    "--max-body",
    "--response-keep",
    "--keys-file",
    "--allowed-origins",
)
PAYLOAD_FLAGS = ("--payload-listen", "--payload-min", "--same-host")
"""Worker flags for all workers; --payload-advertise names one port, and so one worker."""
WITHOUT_CERTIFICATES = ("--tls-dir", "--deny-list")
"""Flags of certificates, which processes of one machine do not need."""
SET_BY_CLUSTER = ("--stages", "--model", "--listen", "--http")
"""Coordinator flags that a local cluster sets itself."""
_processes = partial(typer.Option, rich_help_panel="Workers on this machine")


class ProcessFlags(TypedDict, total=False):
    """Processes of the cluster."""

    workers: Annotated[
        int | None,
        _processes(
            metavar="N",
            min=1,
            help=f"Stage workers, one stage each (default: {_NUM_WORKERS}, or the number of --mock flags).",
        ),
    ]
    device: Annotated[
        str | None,
        _processes(
            metavar="DEVICE,...",
            help="Device of all workers, or one per worker, e.g. cuda:0,cuda:1 (default: cpu).",
        ),
    ]
    pin: Annotated[
        bool | None,
        _processes(help="Pin each CPU worker to its own cores, if there are enough (default: on)."),
    ]
    restart: Annotated[
        bool | None,
        _processes(
            help="Restart a worker whose device failed or that a signal ended, at most "
            f"{MAX_RESTARTS} times within {WINDOW_S / 60:g} min (default: on).",
        ),
    ]
    mock: Annotated[
        list[str] | None,
        _processes(
            metavar="TIMES",
            help="Mock stages, as in step=20ms; repeatable: one for all workers, or one per worker.",
        ),
    ]


def gateway_address(text: str) -> str:
    """Parse HOST:PORT or "off". Raises ValueError."""
    return text if text == OFF else str(parse_address(text))


class GatewayFlag(TypedDict, total=False):
    """The gateway of the cluster."""

    gateway: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT|off",
            parser=options.option_parser(gateway_address),
            help=f"Listen address of the HTTP gateway (default: {DEFAULT_HTTP_ADDRESS}, or a free port "
            "where that is taken).",
            rich_help_panel="API",
        ),
    ]


@options.takes(
    ProcessFlags,
    GatewayFlag,
    config_parameters(GatewayConfig, only=GATEWAY_FLAGS),
    config_parameters(
        WorkerConfig,
        only=("--memory", "--threads", "--kernels", *PAYLOAD_FLAGS),
        defaults={
            "--memory": "an even share of 60 % of free memory",
            "--threads": "an even share of the cores",
        },
    ),
    config_parameters(
        CoordinatorConfig,
        without=("--stages", "--keys-file", *WITHOUT_CERTIFICATES),
        defaults={"--http": "a free port of 127.0.0.1"},
    ),
)
def up(context: typer.Context, **flags: Any) -> int:
    """Start a coordinator, its workers and a gateway on this machine, and stop them on Ctrl-C."""
    mocks = tuple(flags["mock"] or ())
    num_workers = flags["workers"] or (len(mocks) if len(mocks) > 1 else _NUM_WORKERS)
    coordinator = make_config(
        CoordinatorConfig,
        context,
        {**flags, "keys_file": None},  # is the gateway's
        num_stages=num_workers,
        http=ANY_PORT,
        token=options.read_token(flags["token_file"]),
        cache_directory=find_cache_directory(os.environ),
    )
    if mocks:
        _check_mocks(flags)
    if flags["gateway"] not in (None, OFF):
        options.build_config(lambda: coordinator.transport.check_listen("--gateway", flags["gateway"]))
    _check_payload_listen(flags["payload_listen"], num_workers)
    cluster = options.build_config(
        lambda: LocalClusterConfig(
            num_workers=num_workers,
            devices=tuple((flags["device"] or "cpu").split(",")),
            memory_bytes=flags["memory"],
            num_threads=flags["threads"],
            mocks=mocks,
            pins_workers=flags["pin"] is not False,
            model=coordinator.model,
            listen=coordinator.listen,
            http=coordinator.http,
            gateway=gateway_listen(flags["gateway"]),
            gateway_arguments=_gateway_arguments(coordinator, context, flags),
            coordinator_arguments=flags_of(coordinator, without=SET_BY_CLUSTER),
            worker_arguments=(_worker_arguments(coordinator, context, flags),) * num_workers,
        )
    )
    run = cluster.run()
    check_plan(coordinator, run)
    raise_file_limit()
    return asyncio.run(run_up(run, restarts=flags["restart"] is not False))


def _check_mocks(flags: Mapping[str, Any]) -> None:
    if flags["self_check"]:
        raise typer.BadParameter("--self-check needs real stages: it cannot be used with --mock")
    if flags["kernels"] not in (None, KernelChoice.AUTO):
        raise typer.BadParameter("mock stages compute nothing: --kernels cannot be used with --mock")


def _check_payload_listen(listen: str | None, num_workers: int) -> None:
    if listen not in (None, OFF) and num_workers > 1 and (port := parse_address(listen).port):
        raise typer.BadParameter(
            f"--payload-listen {listen} gives port {port} to each of {num_workers} workers: give port 0"
        )


def _worker_arguments(
    coordinator: CoordinatorConfig, context: typer.Context, flags: Mapping[str, Any]
) -> tuple[str, ...]:
    kernels = () if flags["kernels"] is None else ("--kernels", flags["kernels"].value)
    given = {parameter_of(flag): flags[parameter_of(flag)] for flag in PAYLOAD_FLAGS}
    payloads = make_config(WorkerConfig, context, given)
    return (*kernels, *flags_of(payloads, only=PAYLOAD_FLAGS), *flags_of(coordinator.logs))


def gateway_listen(given: str | None) -> str | None:
    """Return where the gateway listens; None for no gateway. Raises OSError if it is taken."""
    if given == OFF:
        return None
    if given is not None:
        if (address := parse_address(given)).port and ":" not in address.host and not is_free(address):
            raise OSError(
                f"cannot serve the gateway on {given}: the address is in use or not local; choose another "
                "with --gateway HOST:PORT"
            )
        return given
    return DEFAULT_HTTP_ADDRESS if is_free(parse_address(DEFAULT_HTTP_ADDRESS)) else ANY_PORT


def _gateway_arguments(
    coordinator: CoordinatorConfig, context: typer.Context, flags: Mapping[str, Any]
) -> tuple[str, ...]:
    given = {parameter_of(flag): flags[parameter_of(flag)] for flag in GATEWAY_FLAGS}
    if flags["gateway"] == OFF and (set_flags := [f for f in GATEWAY_FLAGS if given[parameter_of(f)]]):
        raise typer.BadParameter(f"{set_flags[0]} needs a gateway: it cannot be used with --gateway off")
    config = make_config(GatewayConfig, context, given)
    insecure = ("--insecure",) if coordinator.transport.insecure else ()
    return (*flags_of(config, only=GATEWAY_FLAGS), *insecure, *flags_of(coordinator.logs))


async def run_up(config: LocalRun, *, restarts: bool = True) -> int:
    """Run the cluster until a signal, then return 0. Raises ClusterFailed when the coordinator exits.

    With `restarts`, workers that exit unexpectedly are restarted.
    """
    console = Console()
    cluster = LocalCluster(config)
    _end_on_signals(cluster, console)
    try:
        async with cluster:
            await _serve(cluster, console, restarts=restarts)
    except asyncio.CancelledError:
        console.print(f"All processes stopped.{_kept_logs(cluster)}", highlight=False, soft_wrap=True)
    return 0


def _kept_logs(cluster: LocalCluster) -> str:
    return f" Logs are kept in {cluster.log_directory}" if cluster.log_directory.exists() else ""


def _end_on_signals(cluster: LocalCluster, console: Console) -> None:
    """Stop gracefully at the first signal, and immediately at the second."""
    task = asyncio.current_task()
    assert task is not None

    def end() -> None:
        if task.cancelling():
            cluster.kill_all()
        else:
            console.print("Stopping all processes. Press Ctrl-C again to stop immediately.")
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in _ENDING_SIGNALS:
        loop.add_signal_handler(number, end)


async def _serve(cluster: LocalCluster, console: Console, *, restarts: bool) -> None:
    console.print(f"Logs are in {cluster.log_directory}", highlight=False)
    status = await wait_until_serving(cluster, console, timeout_s=_START_TIMEOUT_S)
    async with Client(cluster.address) as client:
        model = await client.model()
    generate = _GENERATE_TEXT if model.has_tokenizer else _GENERATE_IDS
    console.print(describe_cluster(status), highlight=False)
    console.print(topology_view(status))
    console.print(describe_kv_cache(status), highlight=False)
    if cluster.dashboard_url is not None:
        console.print(f"dashboard {cluster.dashboard_url}", highlight=False)
    for gateway in cluster.gateways:
        await _show_gateway(cluster, gateway, console, model)
    console.print(
        f"Serving at [bold]{cluster.address}[/]. Press Ctrl-C to stop. In another terminal:\n"
        f"  {_client_command(cluster, generate)}\n  {_client_command(cluster, 'status')}",
        highlight=False,
    )
    supervisor = _Supervisor(cluster, console, restarts=restarts)
    try:
        while True:
            process = await cluster.next_exit()
            if process is cluster.coordinator:
                raise process.failure()
            supervisor.on_exit(process)
    finally:
        await supervisor.close()


async def _show_gateway(
    cluster: LocalCluster, name: str, console: Console, model: inference_pb2.GetModelResponse
) -> None:
    url = await cluster.while_running(cluster.gateway_url(name, timeout_s=GATEWAY_TIMEOUT_S))
    lines = [f"OpenAI's API at [bold]{url}/v1[/]" + (f", chat page {url}/" if model.has_tokenizer else "")]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
    line = cluster.line(name)
    keys_file = line[line.index("--keys-file") + 1] if "--keys-file" in line else None
    if keys_file is not None:
        note = f"With KEY, which `stageline keys create --keys-file {keys_file} ...` prints:"
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    command = curl_line(url, model, needs_key=keys_file is not None)
    console.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)


def curl_line(url: str, model: inference_pb2.GetModelResponse, *, needs_key: bool = False) -> str:
    """A command that asks the gateway at `url` for an answer; with `needs_key`, with the variable KEY."""
    if model.has_chat_template:
        path, body = "chat/completions", '{"messages": [{"role": "user", "content": "Once upon a time"}]}'
    elif model.has_tokenizer:
        path, body = "completions", '{"prompt": "Once upon a time", "max_tokens": 100}'
    else:
        path, body = "completions", '{"prompt": [1, 2, 3], "max_tokens": 16, "return_token_ids": true}'
    key = ' -H "authorization: Bearer $KEY"' if needs_key else ""
    return f"curl {url}/v1/{path}{key} -H 'content-type: application/json' -d '{body}'"


class _Supervisor:
    """Reports workers and gateways that exited, and restarts them within the limits of RestartPolicy."""

    def __init__(self, cluster: LocalCluster, console: Console, *, restarts: bool) -> None:
        self._cluster = cluster
        self._console = console
        self._restarts = restarts
        self._policies: defaultdict[str, RestartPolicy] = defaultdict(RestartPolicy)
        self._tasks: set[asyncio.Task[None]] = set()

    def on_exit(self, process: LocalProcess) -> None:
        is_worker = process.name not in self._cluster.gateways
        if process.has_left:
            after = ": other workers have its layers." if is_worker else ". Clients of gRPC are still served."
            self._print(f"{process.name} drained{after}")
            return
        self._print(str(process.failure()), style="red")
        delay_s = self._delay_s(process)
        if delay_s is None:
            self._print(
                ("Other workers take over its layers if they fit. " if is_worker else "")
                + f"To restart it:\n  stageline {shlex.join(self._cluster.line(process.name))}"
            )
            return
        self._print(f"Restarting {process.name} in {delay_s:g} s.")
        task = asyncio.create_task(self._start_again(process.name, delay_s), name=f"restart {process.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel pending restarts."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _delay_s(self, process: LocalProcess) -> float | None:
        code = process.exit_code
        if not self._restarts or code is None or not RestartPolicy.is_unexpected(code):
            return None
        delay_s = self._policies[process.name].next_delay_s(asyncio.get_running_loop().time())
        if delay_s is None:
            self._print(f"{process.name} was restarted {MAX_RESTARTS} times within {WINDOW_S / 60:g} min.")
        return delay_s

    async def _start_again(self, name: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        try:
            process = await self._cluster.restart(name)
        except OSError as error:
            self._print(f"{name} cannot be restarted: {error}", style="red")
        else:
            self._print(f"Restarted {name} (pid {process.pid}).")

    def _print(self, text: str, *, style: str | None = None) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True, style=style)


def _client_command(cluster: LocalCluster, command: str) -> str:
    is_default = cluster.address == DEFAULT_ADDRESS
    return f"stageline {command}" + ("" if is_default else f" --coordinator {cluster.address}")
