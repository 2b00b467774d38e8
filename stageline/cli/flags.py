"""Flags that are written once and taken by several commands."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias, get_type_hints

_Command: TypeAlias = Callable[..., int]


def takes(*groups: type) -> Callable[[_Command], _Command]:
    """Gives a command the flags of some TypedDicts, in the place of its `**flags`.

    Each entry is a flag with its typer.Option in Annotated. One that is not on the line is None in `flags`.
    """
    hints = {
        name: hint for group in groups for name, hint in get_type_hints(group, include_extras=True).items()
    }

    def decorate(command: _Command) -> _Command:
        @functools.wraps(command)
        def with_flags(**given: Any) -> int:
            return command(**given)

        signature = inspect.signature(command)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
            for name, hint in hints.items()
        ]
        # Both are what typer reads.
        with_flags.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        with_flags.__annotations__ = {each.name: each.annotation for each in (*own, *added)} | {"return": int}
        return with_flags

    return decorate
