"""`stageline attach` and `stageline cancel`, and secrets of detached requests."""

import asyncio
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from stageline.cli import options
from stageline.cli.options import CommandFailed, read_secret_file
from stageline.cli.output import Report, print_report, show_for, show_stream
from stageline.client.client import Client
from stageline.client.errors import RequestNotFound, StagelineError
from wire.addresses import DEFAULT_ADDRESS
from wire.exit_codes import ExitCode
from wire.ids import id_text, parse_request_id
from wire.user_files import state_directory, write_secret

MAX_LIFE_S = 7 * 24 * 3600.0
"""Lifetime of a secret file while the request's end is unknown; the file's modification time is its expiry.
"""


def store(request_id: str, secret: str) -> None:
    """Write the secret file, and remove expired ones. Raises OSError."""
    _prune()
    path = _path(request_id)
    write_secret(path, secret)
    expire_after(request_id, MAX_LIFE_S)


def expire_after(request_id: str, seconds: float) -> None:
    """Set the expiry of the secret file, if it exists."""
    until = time.time() + seconds
    with suppress(OSError):
        os.utime(_path(request_id), (until, until))


def forget(request_id: str) -> None:
    """Remove the secret file of a request."""
    with suppress(OSError, typer.BadParameter):
        _path(request_id).unlink()


def forget_if_over(request_id: str, error: StagelineError) -> None:
    """Remove the secret file of a request that the coordinator no longer has."""
    if isinstance(error, RequestNotFound):
        forget(request_id)


def find(request_id: str, secret_file: str | None) -> str:
    """Read the secret from `secret_file` ("-": standard input), by default from the stored file.

    Raises CommandFailed or typer.BadParameter.
    """
    if secret_file == "-":
        return _given(sys.stdin.readline().strip(), "standard input")
    if secret_file is not None:
        return _given(read_secret_file(Path(secret_file), what="--secret-file"), secret_file)
    path, what = _path(request_id), f"the secret of request {request_id}"
    if not path.exists():
        problem = f"{what} is not on this host: pass --secret-file PATH"
        raise CommandFailed(problem, reason="NO_SECRET")
    return _given(read_secret_file(path, what=what), str(path))


def _given(secret: str, place: str) -> str:
    if not secret:
        raise CommandFailed(f"no secret in {place}: it is empty", reason="NO_SECRET")
    return secret


def _directory() -> Path:
    return state_directory(os.environ) / "requests"


def _path(request_id: str) -> Path:
    try:
        return _directory() / id_text(parse_request_id(request_id))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _prune() -> None:
    now = time.time()
    with suppress(OSError):
        for path in _directory().iterdir():
            with suppress(OSError):
                if path.stat().st_mtime < now:
                    path.unlink()


_RequestId = Annotated[
    str, typer.Argument(metavar="REQUEST_ID", help="Id that `generate --detach` printed.", show_default=False)
]


_SecretFile = Annotated[
    str | None,
    typer.Option(
        metavar="PATH|-",
        help="File of mode 0600 with the secret of the request, - for standard input "
        "(default: the file that `generate --detach` wrote on this machine).",
    ),
]


def attach(
    request_id: _RequestId,
    secret_file: _SecretFile = None,
    from_token: Annotated[int, typer.Option(metavar="N", min=0, help="Skip the first N output tokens.")] = 0,
    n: Annotated[
        int, typer.Option("--n", "-n", metavar="N", min=1, help="Number of choices of the request.")
    ] = 1,
    json: options.Json = False,
    coordinator: options.Coordinator = DEFAULT_ADDRESS,
    tls_dir: options.TlsDirectory = None,
) -> int:
    """Move the output of a detached request to this terminal."""
    secret = find(request_id, secret_file)

    async def run() -> Report:
        async with Client(coordinator, tls_dir=tls_dir) as client:
            model = await client.model()
            outputs = client.attach(request_id, secret=secret, from_token=from_token)
            show = show_for(num_choices=n, as_token_ids=not model.has_tokenizer, is_json=json)
            return await show_stream(outputs, show)

    try:
        report = asyncio.run(run())
    except KeyboardInterrupt:
        print(f"\nstageline: detached from request {request_id}", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except StagelineError as error:
        forget_if_over(request_id, error)
        raise
    print_report(report, is_json=json)
    print(f"({report.describe_speed()})", file=sys.stderr)
    return 0


def cancel(
    request_id: _RequestId,
    secret_file: _SecretFile = None,
    token_file: options.OperatorTokenFile = None,
    coordinator: options.Coordinator = DEFAULT_ADDRESS,
    tls_dir: options.TlsDirectory = None,
) -> int:
    """Cancel a request, or drop the output of one that has ended.

    Needs the secret of the request, or with --token-file the operator token, which cancels any request.
    """
    token = None if token_file is None else options.operator_token(token_file, coordinator)
    secret = find(request_id, secret_file) if token is None else None

    async def run() -> None:
        async with Client(coordinator, tls_dir=tls_dir) as client:
            await client.cancel(request_id, secret=secret, token=token)

    try:
        asyncio.run(run())
    except StagelineError as error:
        forget_if_over(request_id, error)
        raise
    forget(request_id)
    return 0
