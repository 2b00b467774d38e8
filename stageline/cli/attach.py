"""`stageline attach` and `stageline cancel`: a request that goes on without the command that sent it."""

import asyncio
import sys
from typing import Annotated

import typer

from stageline.cli import options, request_secrets
from stageline.cli.completion_view import print_report
from stageline.cli.failures import INTERRUPTED
from stageline.cli.stream import Report, show_for, show_stream
from stageline.client import Client
from stageline.errors import StagelineError

_RequestId = Annotated[
    str, typer.Argument(metavar="REQUEST_ID", help="As `generate --detach` told it.", show_default=False)
]


_SecretFile = Annotated[
    str | None,
    typer.Option(
        metavar="PATH|-",
        help="File of mode 0600 with the secret of the request, - for standard input "
        "(default: the file that `generate --detach` has left on this machine).",
    ),
]


def attach(
    request_id: _RequestId,
    secret_file: _SecretFile = None,
    from_token: Annotated[
        int, typer.Option(metavar="N", min=0, help="Leave out so many tokens of its output.")
    ] = 0,
    n: Annotated[int, typer.Option("--n", "-n", metavar="N", min=1, help="How many choices it has.")] = 1,
    json: options.Json = False,
    coordinator: options.Coordinator = options.DEFAULT_ADDRESS,
) -> int:
    """Show the output of a detached request, here instead of where it went before."""

    secret = request_secrets.find(request_id, secret_file)

    async def run() -> Report:
        async with Client(coordinator) as client:
            model = await client.model()
            outputs = client.attach(request_id, secret=secret, from_token=from_token)
            show = show_for(num_choices=n, as_token_ids=not model.has_tokenizer, is_json=json)
            return await show_stream(outputs, show)

    try:
        report = asyncio.run(run())
    except KeyboardInterrupt:
        print(f"\nstageline: no longer attached to request {request_id}", file=sys.stderr)
        return INTERRUPTED
    except StagelineError as error:
        request_secrets.forget_if_over(request_id, error)
        raise
    print_report(report, is_json=json)
    print(f"({report.describe_speed()})", file=sys.stderr)
    return 0


def cancel(
    request_id: _RequestId,
    secret_file: _SecretFile = None,
    token_file: options.OperatorTokenFile = None,
    coordinator: options.Coordinator = options.DEFAULT_ADDRESS,
) -> int:
    """Cancel a request, or drop the output of one that has ended.

    Needs the secret of the request, or with --token-file the operator token, which cancels any request.
    """
    token = None if token_file is None else options.operator_token(token_file, coordinator)
    secret = request_secrets.find(request_id, secret_file) if token is None else None

    async def run() -> None:
        async with Client(coordinator) as client:
            await client.cancel(request_id, secret=secret, token=token)

    try:
        asyncio.run(run())
    except StagelineError as error:
        request_secrets.forget_if_over(request_id, error)
        raise
    request_secrets.forget(request_id)
    return 0
