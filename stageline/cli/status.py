"""`stageline status` and `stageline drain`."""

import asyncio
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from stageline.cli import options
from stageline.cli.tables import status_view
from stageline.client.client import Client
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


def status(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the status as JSON (docs/status.md).")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second until Ctrl-C.")] = False,
    coordinator: options.Coordinator = DEFAULT_ADDRESS,
    tls_dir: options.TlsDirectory = None,
) -> int:
    """Show plan, workers, layers, memory, KV use and requests."""
    if as_json and watch:
        raise typer.BadParameter("--json prints once: it cannot be used with --watch")
    client = Client(coordinator, tls_dir=tls_dir)
    asyncio.run(_watch(client) if watch else show_once(client, as_json=as_json))
    return 0


async def show_once(client: Client, *, as_json: bool) -> None:
    """Print the status of a cluster."""
    async with client:
        message = await client.status()
    if as_json:
        print(json.dumps(message_fields(message), indent=2))
    else:
        Console().print(status_view(message))


async def _watch(client: Client) -> None:
    async with client:
        with Live(status_view(await client.status()), auto_refresh=False) as live:
            while True:
                live.update(status_view(await client.status()), refresh=True)
                await asyncio.sleep(_WATCH_INTERVAL_S)
