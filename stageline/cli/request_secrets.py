"""Secrets of detached requests, one file each, so that another command finds them by the id."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import typer

from stageline.cli.failures import CommandFailed
from stageline.cli.options import read_secret_file
from stageline.errors import RequestNotFound, StagelineError
from wire.ids import id_text, parse_request_id
from wire.secret_files import state_directory, write_secret

LIVE_S = 7 * 24 * 3600.0
"""How long a file is kept whose request is not known to have ended. Its time of change says until when."""


def store(request_id: str, secret: str) -> None:
    """Writes the file, and removes those of requests that are over. Raises OSError."""
    _prune()
    path = _path(request_id)
    write_secret(path, secret)
    expire_after(request_id, LIVE_S)


def expire_after(request_id: str, seconds: float) -> None:
    """The file, if there is one, is not needed for longer than this."""
    until = time.time() + seconds
    with suppress(OSError):
        os.utime(_path(request_id), (until, until))


def forget(request_id: str) -> None:
    """The request is over."""
    with suppress(OSError, typer.BadParameter):
        _path(request_id).unlink()


def forget_if_over(request_id: str, error: StagelineError) -> None:
    """An error that says that the request is not there."""
    if isinstance(error, RequestNotFound):
        forget(request_id)


def find(request_id: str, secret_file: str | None) -> str:
    """The secret in `secret_file` ("-": standard input), else the stored one. Raises CommandFailed or
    typer.BadParameter.
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
