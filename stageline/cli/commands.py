"""Reads command lines and variables strictly: options given twice, variables that nothing reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from wire.flags import unread_variable

OTHER_NAMES = {
    "serve": "up",
    "start": "up",
    "run": "up",
    "launch": "up",
    "ps": "status",
    "list": "models",
    "complete": "generate",
    "server": "gateway",
    "stop": "drain",
    "benchmark": "bench",
}
"""Commands of other projects, and what does the same here."""


class Command(TyperCommand):
    """A command that refuses an option which takes one value and is given twice: the last one would win."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises BadParameter."""
        order: list[Any] = self.make_parser(ctx).parse_args(args=list(args))[2]
        for parameter, count in Counter(order).items():
            if count > 1 and _takes_one_value(parameter):
                problem = f"is given {count} times, and takes one value"
                raise typer.BadParameter(problem, ctx=ctx, param=parameter)
        return super().parse_args(ctx, args)


def _takes_one_value(parameter: Any) -> bool:
    if parameter.param_type_name != "option":
        return False
    return not (parameter.multiple or parameter.is_flag or parameter.count)


def add_command(app: typer.Typer, name: str, found: Callable[..., int] | typer.Typer, *, panel: str) -> None:
    """Add a command, or a group of them."""
    if not isinstance(found, typer.Typer):
        app.command(name, rich_help_panel=panel, cls=Command)(found)
        return
    for command in found.registered_commands:
        command.cls = Command
    app.add_typer(found, name=name, rich_help_panel=panel)


def unknown_variable(names: Iterable[str]) -> str | None:
    """Return a text about the first variable of Stageline's that no command reads; None if there is none."""
    return unread_variable(names, _configs)


def _configs() -> Sequence[type]:
    """Of coordinators, workers and gateways, which may share an environment."""
    from coordinator.config import CoordinatorConfig  # loaded only where such variables are set
    from gateway.config import GatewayConfig
    from stage_worker.config import WorkerConfig

    return CoordinatorConfig, WorkerConfig, GatewayConfig
