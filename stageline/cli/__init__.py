"""The `stageline` command: its subcommands, registered here."""

import errno
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from deploy import ClusterFailed
from stageline.cli.commands import OTHER_NAMES, add_command, unknown_variable
from stageline.cli.options import USAGE, CommandFailed, report
from stageline.client.errors import Overloaded, StagelineError
from stageline.version import VERSION
from wire.errors import reason_of
from wire.exit_codes import ExitCode
from wire.user_files import variable_of

_SERVE = "Run a cluster"
_USE = "Use a cluster"
_COMMANDS = {
    "demo": ("stageline.cli.demo", _SERVE),
    "up": ("stageline.cli.up", _SERVE),
    "coordinator": ("stageline.cli.serve", _SERVE),
    "worker": ("stageline.cli.serve", _SERVE),
    "gateway": ("stageline.cli.serve", _SERVE),
    "deploy": ("stageline.cli.deploy", _SERVE),
    "doctor": ("stageline.cli.doctor", _SERVE),
    "plan": ("stageline.cli.plan", _SERVE),
    "models": ("stageline.cli.models", _SERVE),
    "weights": ("stageline.cli.weights", _SERVE),
    "generate": ("stageline.cli.generate", _USE),
    "chat": ("stageline.cli.chat", _USE),
    "batch": ("stageline.cli.batch", _USE),
    "attach": ("stageline.cli.attach", _USE),
    "cancel": ("stageline.cli.attach", _USE),
    "drain": ("stageline.cli.status", _SERVE),
    "status": ("stageline.cli.status", _USE),
    "health": ("stageline.cli.health", _SERVE),
    "top": ("stageline.cli.top", _USE),
    "trace": ("stageline.cli.trace", _USE),
    "bench": ("stageline.cli.bench", _USE),
    "support-bundle": ("stageline.cli.support_bundle", _USE),
    "certs": ("stageline.cli.certs", _SERVE),
    "token": ("stageline.cli.token", _SERVE),
    "keys": ("stageline.cli.keys", _SERVE),
}
"""Module and panel of each command, in the order of --help."""
_UNKNOWN_COMMAND = re.compile("No such command '(.*)'")
_REJECTED = {
    "greater_than_equal": "{value!r} is less than {ge}",
    "less_than_equal": "{value!r} is more than {le}",
    "int_parsing": "{value!r} is not an integer",
    "int_parsing_size": "the number is too large",
    "float_parsing": "{value!r} is not a number",
    "bool_parsing": "{value!r} is not a boolean (true or false)",
    "value_error": "{error}",
}
"""Texts for pydantic's types of errors, whose own texts lack the value."""

_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"stageline {VERSION}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    pass


def make_app(command: str | None = None) -> typer.Typer:
    """The command line with one command, or with all of them if there is none of that name.

    A mock worker starts four times as fast, and in half the memory, without the modules of other commands.
    """
    app = typer.Typer(
        name="stageline",
        help="Serve one language model from several machines, as a pipeline of stages.",
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for name in [command] if command in _COMMANDS else _COMMANDS:
        module, panel = _COMMANDS[name]
        add_command(app, name, getattr(import_module(module), name.replace("-", "_")), panel=panel)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's, and return its exit code.

    Failures are one line on stderr.
    """
    try:
        words = sys.argv[1:] if arguments is None else list(arguments)
        if (unknown := unknown_variable(os.environ)) is not None:
            report(unknown, reason=USAGE)
            return ExitCode.USAGE
        app = make_app(words[0] if words else None)
        return app(words or ["--help"], prog_name="stageline", standalone_mode=False) or ExitCode.DONE
    except typer.TyperException as error:
        report(_one_line(error), reason=USAGE)
        return ExitCode.USAGE
    except typer.Abort:
        return ExitCode.INTERRUPTED
    except (StagelineError, CommandFailed, ClusterFailed, OSError) as error:
        log_lines = error.log_lines if isinstance(error, CommandFailed | ClusterFailed) else ()
        report(_with_hint(error), reason=_reason(error), log_lines=log_lines)
        return ExitCode.FAILED


def _reason(error: Exception) -> str:
    return error.reason if isinstance(error, StagelineError | CommandFailed) else reason_of(error)


def _with_hint(error: Exception) -> str:
    if isinstance(error, ClusterFailed):
        return error.message
    if isinstance(error, Overloaded) and error.retry_after_s is not None:
        return f"{error}; try again in {error.retry_after_s:g} s"
    if isinstance(error, OSError) and error.errno in _UNWRITABLE and error.filename:
        variable = variable_of(os.fspath(error.filename), os.environ)
        return (
            str(error) if variable is None else f"{error}: set {variable} to a directory that can be written"
        )
    return str(error)


def _one_line(error: typer.TyperException) -> str:
    if (errors := getattr(error.__cause__, "errors", None)) is not None:  # pydantic's, through typer
        error.message = _describe_rejected(errors()[0]) or error.message
    message = " ".join(error.format_message().split()).removesuffix(".")
    if (unknown := _UNKNOWN_COMMAND.fullmatch(message)) is not None and unknown[1] in OTHER_NAMES:
        message = f"{message}. Here it is 'stageline {OTHER_NAMES[unknown[1]]}'"
    context = getattr(error, "ctx", None)  # only errors of usage have one
    if context is None:
        return message
    return f"{message}{_source(error, context)} (see {context.command_path} --help)"


def _describe_rejected(details: Mapping[str, Any]) -> str:
    text = _REJECTED.get(details["type"], "")
    return text.format(value=str(details["input"]), **details.get("ctx", {}))


def _source(error: typer.TyperException, context: typer.Context) -> str:
    """Where a rejected value comes from, if not from the command line."""
    option = getattr(error, "param", None)
    if option is None:
        return ""
    source = context.get_parameter_source(option.name)
    places = {"ENVIRONMENT": option.envvar, "DEFAULT_MAP": context.params.get("config")}
    return f", from {places[source.name]}" if source is not None and source.name in places else ""
