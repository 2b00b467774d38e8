"""docs/reference/flags.md: every command with its flags."""

from typing import Any

import typer
from rich.text import Text

from tools.reference_pages.markdown import GENERATED, table

_FLAGS = f"""\
# Flags

All commands and their flags. {GENERATED}

## Flags, variables and files

`stageline coordinator` and `stageline worker` take each flag from four places; the first that has it wins:

| place | examples |
|---|---|
| flag | `--max-step-tokens 512`, `--no-prefix-cache` |
| environment: `STAGELINE_` and the flag | `STAGELINE_MAX_STEP_TOKENS=512`, `STAGELINE_PREFIX_CACHE=false` |
| file of `--config`: the flag without `--` | `max-step-tokens = 512`, `prefix-cache = false` |
| default | see below |

The file is TOML. Values are numbers (`N`, `COUNT`, `SECONDS`, `X`, `RATIO`), `true` or `false`; all others
are strings as on the command line, such as `trace-bytes = "64MiB"` and `layers = "10,12,10"`. Relative paths
are relative to the working directory. Unknown keys, unknown variables and wrong types are errors; variables
with `STAGELINE_TEST_` are for the tests of Stageline.

`--print-config` prints the resulting configuration as such a file and exits. It prints the path of
`--token-file`, never the operator token.

`stageline up` and `stageline plan` read the variables too, but no file. `up` passes all settings to its
processes as flags; they ignore variables of flags.
"""


def flags() -> str:
    """Every command with its flags."""
    from stageline.cli import make_app

    command: Any = typer.main.get_command(make_app())
    return _FLAGS + "".join(_command_section(f"stageline {name}", found) for name, found in leaves(command))


def leaves(group: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """The commands without subcommands, with their names."""
    found: list[tuple[str, Any]] = []
    for name, command in group.commands.items():
        is_group = hasattr(command, "commands")
        found += leaves(command, f"{prefix}{name} ") if is_group else [(prefix + name, command)]
    return found


def _command_section(name: str, command: Any) -> str:
    options = [option for option in command.params if option.param_type_name == "option"]
    panels = sorted({_panel(option): None for option in options}, key=bool)
    text = f"\n## {name}\n\n{Text.from_markup(command.help)}\n"
    for panel in panels:
        rows = [_flag_row(option) for option in options if _panel(option) == panel]
        text += f"\n{panel and f'### {panel}' + chr(10) * 2}{table(('flag', 'value', 'meaning'), rows)}"
    return text


def _panel(option: Any) -> str:
    return option.rich_help_panel or ""


def _flag_row(option: Any) -> tuple[str, ...]:
    names = ", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
    return names, "" if option.is_flag else f"`{_metavar(option)}`", _flag_meaning(option)


def _metavar(option: Any) -> str:
    choices = option.type_descriptor.choices
    if option.metavar is None and choices is not None:
        return "|".join(str(choice.value) for choice in choices)
    return str(option.metavar or option.type_descriptor.annotation.__name__.upper())


def _flag_meaning(option: Any) -> str:
    text = option.help or ""
    if option.required:
        return f"{text} Required."
    if option.default in (None, []) or option.default is False:
        return text
    default = "on" if option.is_flag else option.default
    return f"{text.removesuffix('.')} (default: {default})."
