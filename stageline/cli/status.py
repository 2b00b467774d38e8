"""`stageline status` and `stageline drain`."""

import asyncio
import json
from typing import Annotated, Any

import typer
from rich.live import Live

from stageline.cli import options
from stageline.cli.output import line_console
from stageline.cli.tables import status_view
from stageline.client.client import Client
from stageline.client.errors import DeadlineExceeded, Unavailable
from stageline_rpc.v1 import cluster_pb2
from wire.addresses import DEFAULT_ADDRESS
from wire.status_codec import message_fields


def drain(
    worker: Annotated[
        str,
        typer.Argument(
            metavar="WORKER", help="Name of the worker, as in `stageline status`.", show_default=False
        ),
    ],
    token_file: options.OperatorTokenFile = None,
    coordinator: options.Coordinator = DEFAULT_ADDRESS,
    tls_dir: options.TlsDirectory = None,
) -> int:
    """Move the layers of a worker to other workers, then stop it.

    If no other worker can hold them, running requests finish first, within the coordinator's --drain-timeout.
    """
    token = None if tls_dir else options.operator_token(token_file, coordinator)

    async def run() -> None:
        async with Client(coordinator, tls_dir=tls_dir) as client:
            await client.drain(worker, token=token)

    asyncio.run(run())
    print(f"worker {worker} drained")
    return 0


_WATCH_INTERVAL_S = 1.0
_POLL_INTERVAL_S = 0.5
_WAIT_TIMEOUT_S = 60.0
_SERVING = "serving"


def _awaited_state(text: str) -> str:
    if text != _SERVING:
        raise ValueError(f"state {text!r} cannot be waited for, must be {_SERVING}")
    return text


def status(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the status as JSON (docs/status.md).")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second until Ctrl-C.")] = False,
    wait: Annotated[
        str | None,
        typer.Option(
            metavar=_SERVING,
            parser=options.option_parser(_awaited_state),
            help="Wait until the cluster serves, before the status is shown.",
        ),
    ] = None,
    timeout: Annotated[
        Any,  # a float; typer takes no parser of text for it
        typer.Option(
            metavar="TIME",
            parser=options.option_parser(options.parse_wait),
            help=f"Maximum time of --wait, such as 60, 60s or 10m (default: {_WAIT_TIMEOUT_S:g}s).",
        ),
    ] = None,
    coordinator: options.Coordinator = DEFAULT_ADDRESS,
    tls_dir: options.TlsDirectory = None,
) -> int:
    """Show plan, workers, layers, memory, KV use and requests."""
    if as_json and watch:
        raise typer.BadParameter("--json prints once: it cannot be used with --watch")
    if timeout is not None and wait is None:
        raise typer.BadParameter("--timeout is the time of --wait: give both")
    if wait is not None:
        timeout_s = _WAIT_TIMEOUT_S if timeout is None else timeout
        asyncio.run(_wait_until_serving(Client(coordinator, tls_dir=tls_dir), timeout_s))
    client = Client(coordinator, tls_dir=tls_dir)
    asyncio.run(_watch(client) if watch else show_once(client, as_json=as_json))
    return 0


async def _wait_until_serving(client: Client, timeout_s: float) -> None:
    """Raises CommandFailed after `timeout_s` seconds, with the last state."""
    last = "the coordinator does not respond"
    try:
        async with asyncio.timeout(timeout_s), client:
            while True:
                try:
                    message = await client.status()
                except (Unavailable, DeadlineExceeded) as error:
                    last = str(error)
                else:
                    if message.state == cluster_pb2.CLUSTER_STATE_SERVING:
                        return
                    last = message.detail or cluster_pb2.ClusterState.Name(message.state)
                await asyncio.sleep(_POLL_INTERVAL_S)
    except TimeoutError:
        text = f"not serving after {timeout_s:g} s: {last}"
        raise options.CommandFailed(text, reason="NOT_SERVING") from None


async def show_once(client: Client, *, as_json: bool) -> None:
    """Print the status of a cluster."""
    async with client:
        message = await client.status()
    if as_json:
        print(json.dumps(message_fields(message), indent=2))
    else:
        line_console().print(status_view(message))


async def _watch(client: Client) -> None:
    async with client:
        with Live(status_view(await client.status()), auto_refresh=False) as live:
            while True:
                live.update(status_view(await client.status()), refresh=True)
                await asyncio.sleep(_WATCH_INTERVAL_S)
