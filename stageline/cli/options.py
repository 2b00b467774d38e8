"""Flags shared by commands, and errors of commands."""

import functools
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, get_type_hints

import typer

from stageline.version import VERSION
from wire.exit_codes import error_line
from wire.flags import peer_address
from wire.transport import tls_directory
from wire.user_files import NoHomeDirectory, read_secret, state_directory, token_paths

if TYPE_CHECKING:
    from telemetry.service_manager import NotifySettings
    from telemetry.settings import TelemetrySettings

COPY_TOKENIZER = "copy the model's tokenizer.json beside its weights and restart the coordinator"
"""Advice where a model has no tokenizer."""
USAGE = "USAGE"
"""Reason code of a wrong command line."""


class CommandFailed(Exception):
    """An expected failure; its text is one line for the user, `reason` its code, `log_lines` follow."""

    def __init__(self, message: str, *, reason: str, log_lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.reason, self.log_lines = reason, log_lines


def require_torch(what: str) -> None:
    """Raises CommandFailed where torch is not installed; does not import it. `what` begins the text."""
    if find_spec("torch") is None:
        raise CommandFailed(
            f"{what} needs torch, which is not installed: install the build for this host's GPUs "
            "(pytorch.org); coordinators, gateways, clients and mock workers run without it",
            reason="LIBRARY_MISSING",
        )


def report(message: str, *, reason: str, log_lines: Sequence[str] = ()) -> None:
    """Write `stageline: error[REASON]: ...` to standard error."""
    print(error_line(reason, message, log_lines), file=sys.stderr, flush=True)


_Command: TypeAlias = Callable[..., int]


def takes(*groups: type | Sequence[inspect.Parameter]) -> Callable[[_Command], _Command]:
    """Replace a command's `**flags` by parameters.

    A group is a list of parameters, or a TypedDict whose entries are flags with typer.Option in Annotated.
    Flags that are not set are None in `flags`.
    """
    added = [parameter for group in groups for parameter in _parameters(group)]

    def decorate(command: _Command) -> _Command:
        @functools.wraps(command)
        def with_flags(**flags: Any) -> int:
            return command(**flags)

        signature = inspect.signature(command)
        own = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        # typer reads both.
        with_flags.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        annotations = {parameter.name: parameter.annotation for parameter in (*own, *added)}
        with_flags.__annotations__ = annotations | {"return": int}
        return with_flags

    return decorate


def _parameters(group: type | Sequence[inspect.Parameter]) -> Sequence[inspect.Parameter]:
    if not isinstance(group, type):
        return group
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
        for name, hint in get_type_hints(group, include_extras=True).items()
    ]


_Config = TypeVar("_Config")
_Value = TypeVar("_Value")


def read_secret_file(path: Path, *, what: str) -> str:
    """Read a secret. Raises typer.BadParameter with `what` and the reason if the file cannot be used."""
    try:
        return read_secret(path)
    except OSError as error:
        raise typer.BadParameter(f"{what} cannot be used: {error}") from None


def read_token(path: Path | None) -> str | None:
    """Read the operator token; None without a path. Raises typer.BadParameter."""
    return None if path is None else read_secret_file(path, what="--token-file")


def default_token_directory() -> Path:
    """Directory of the generated token of a coordinator without --token-file. Raises CommandFailed."""
    try:
        return state_directory(os.environ) / "tokens"
    except NoHomeDirectory as error:
        raise CommandFailed(f"{error}, or give --token-file FILE", reason="NO_TOKEN") from None


def operator_token(path: Path | None, coordinator: str) -> str:
    """Read the token in `path`, by default the stored one of the coordinator at this address.

    Raises CommandFailed or typer.BadParameter.
    """
    if path is not None:
        return read_secret_file(path, what="--token-file")
    candidates = token_paths(default_token_directory(), coordinator)
    found = next((candidate for candidate in candidates if candidate.exists()), None)
    if found is not None:
        return read_secret_file(found, what=f"the operator token of {coordinator}")
    what = f"the operator token of {coordinator} is not on this host: pass --token-file FILE"
    raise CommandFailed(what, reason="NO_TOKEN")


def build_config(make: Callable[[], _Config]) -> _Config:
    """Call `make`, and convert its ValueError to a usage error."""
    try:
        return make()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def telemetry_settings() -> "TelemetrySettings":
    """Read OpenTelemetry's environment variables. Raises typer.BadParameter."""
    from telemetry.settings import read_environment  # imported late: it loads OpenTelemetry's SDK

    return build_config(lambda: read_environment(os.environ, version=VERSION))


def notify_settings() -> "NotifySettings":
    """Read systemd's environment variables. Raises typer.BadParameter."""
    from telemetry.service_manager import read_notify_settings

    return build_config(lambda: read_notify_settings(os.environ, pid=os.getpid()))


def option_parser(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    # typer shows the text of BadParameter unchanged, but adds a prefix to ValueError's.
    def parse_option(text: str) -> _Value:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return parse_option


def parse_number(text: str) -> float:
    """Parse a finite number. Raises ValueError."""
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not a finite number")
    return number


_WAIT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m|h)?", re.ASCII)
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


def parse_wait(text: str) -> float:
    """Parse a time above 0 in seconds, such as 60, 60s, 500ms or 10m. Raises ValueError."""
    found = _WAIT.fullmatch(text)
    if found is None or not (seconds := float(found[1]) * _UNITS[found[2]]):
        raise ValueError(f"{text!r} is not a time above 0: write for example 60s, 500ms or 10m")
    return seconds


def parse_non_negative(text: str) -> float:
    """Parse a finite number of at least 0. Raises ValueError."""
    number = parse_number(text)
    if number < 0:
        raise ValueError(f"{text!r} is negative, the minimum is 0")
    return number


Coordinator: TypeAlias = Annotated[
    str,
    typer.Option(
        parser=option_parser(peer_address),
        metavar="HOST:PORT",
        envvar="STAGELINE_COORDINATOR",
        show_envvar=False,
        help="Coordinator address, also set by STAGELINE_COORDINATOR.",
    ),
]
TlsDirectory: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--tls-dir",
        parser=option_parser(tls_directory),
        metavar="DIR",
        envvar="STAGELINE_TLS_DIR",
        show_envvar=False,
        help="Directory with ca.crt, tls.crt and tls.key, for a coordinator with certificates; also set by "
        "STAGELINE_TLS_DIR.",
    ),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")]
OperatorTokenFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File of mode 0600 with the coordinator's operator token (default: the token generated by a "
        "coordinator on this host).",
    ),
]
