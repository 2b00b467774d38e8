"""`stageline drain`: a worker leaves, and no request fails."""

import asyncio
from typing import Annotated

import typer

from stageline.cli import options
from stageline.client import Client


def drain(
    worker: Annotated[
        str, typer.Argument(metavar="WORKER", help="Its name, as in `stageline status`.", show_default=False)
    ],
    token_file: options.OperatorTokenFile = None,
    coordinator: options.Coordinator = options.DEFAULT_ADDRESS,
) -> int:
    """Move the layers of a worker to others, and let it exit.

    Where nobody can take them, running requests finish first, within the coordinator's --drain-timeout.
    """

    token = options.operator_token(token_file, coordinator)

    async def run() -> None:
        async with Client(coordinator) as client:
            await client.drain(worker, token=token)

    asyncio.run(run())
    print(f"worker {worker} has left")
    return 0
