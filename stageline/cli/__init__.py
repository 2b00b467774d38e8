"""The `stageline` command: one file per subcommand, registered here."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from deploy import ClusterFailed
from stageline.cli.attach import attach, cancel
from stageline.cli.bench import bench
from stageline.cli.chat import chat
from stageline.cli.coordinator import coordinator
from stageline.cli.demo import demo
from stageline.cli.generate import generate
from stageline.cli.options import FAILURE, INTERRUPTED, USAGE, CommandFailed, report
from stageline.cli.plan import plan
from stageline.cli.status import drain, status
from stageline.cli.top import top
from stageline.cli.trace import trace
from stageline.cli.up import up
from stageline.cli.worker import worker
from stageline.client.errors import Overloaded, StagelineError
from stageline.version import VERSION
from wire.errors import reason_of

app = typer.Typer(
    name="stageline",
    help="Serve one language model from several machines, as a pipeline of stages.",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

_SERVE = "Run a cluster"
_USE = "Use a cluster"

app.command("demo", rich_help_panel=_SERVE)(demo)
app.command("up", rich_help_panel=_SERVE)(up)
app.command("coordinator", rich_help_panel=_SERVE)(coordinator)
app.command("worker", rich_help_panel=_SERVE)(worker)
app.command("plan", rich_help_panel=_SERVE)(plan)
app.command("generate", rich_help_panel=_USE)(generate)
app.command("chat", rich_help_panel=_USE)(chat)
app.command("attach", rich_help_panel=_USE)(attach)
app.command("cancel", rich_help_panel=_USE)(cancel)
app.command("drain", rich_help_panel=_SERVE)(drain)
app.command("status", rich_help_panel=_USE)(status)
app.command("top", rich_help_panel=_USE)(top)
app.command("trace", rich_help_panel=_USE)(trace)
app.add_typer(bench, name="bench", rich_help_panel=_USE)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"stageline {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's, and return its exit code.

    0: done. 1: failed, with one line. 2: wrong usage, with one line. 3: the worker's device failed.
    130: ended by Ctrl-C.
    """
    try:
        words = sys.argv[1:] if arguments is None else list(arguments)
        return app(words or ["--help"], prog_name="stageline", standalone_mode=False) or 0
    except typer.TyperException as error:
        report(_one_line(error), reason=USAGE)
        return error.exit_code
    except typer.Abort:
        return INTERRUPTED
    except (StagelineError, CommandFailed, ClusterFailed, OSError) as error:
        report(_with_hint(error), reason=_reason(error))
        return FAILURE


def _reason(error: Exception) -> str:
    return error.reason if isinstance(error, StagelineError | CommandFailed) else reason_of(error)


def _with_hint(error: Exception) -> str:
    if isinstance(error, Overloaded) and error.retry_after_s is not None:
        return f"{error}; try again in {error.retry_after_s:g} s"
    return str(error)


def _one_line(error: typer.TyperException) -> str:
    message = " ".join(error.format_message().split()).removesuffix(".")
    context = getattr(error, "ctx", None)  # only errors of usage have one
    if context is None:
        return message
    return f"{message}{_source(error, context)} (see {context.command_path} --help)"


def _source(error: typer.TyperException, context: typer.Context) -> str:
    """Where a rejected value comes from, if not from the command line."""
    option = getattr(error, "param", None)
    if option is None:
        return ""
    source = context.get_parameter_source(option.name)
    places = {"ENVIRONMENT": option.envvar, "DEFAULT_MAP": context.params.get("config")}
    return f", from {places[source.name]}" if source is not None and source.name in places else ""
