"""Config dataclasses on the command line, in the environment and in TOML files."""

import inspect
import json
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tomli_w
import typer

from stageline.cli.options import build_config, option_parser
from wire.flags import Setting, key_of, parameter_of, settings_of, variable_of

_Config = TypeVar("_Config")

_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number"}
_PRECEDENCE = ("COMMANDLINE", "ENVIRONMENT", "DEFAULT_MAP")
_NO_DEFAULTS: Mapping[str, str] = {}


def config_parameters(
    config: type,
    *,
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    defaults: Mapping[str, str] = _NO_DEFAULTS,
) -> list[inspect.Parameter]:
    """Build command parameters for flags of `config`: those of `only`, or all but `without`.

    `defaults` overrides defaults in help texts.
    """
    return [
        parameter
        for setting in _chosen(config, only, without)
        for parameter in _parameters(setting, defaults.get(setting.flag.name))
    ]


def _chosen(config: type, only: Collection[str] | None, without: Collection[str]) -> Iterator[Setting]:
    for setting in settings_of(config):
        if setting.flag.name not in without and (only is None or setting.flag.name in only):
            yield setting


def _parameters(setting: Setting, default: str | None) -> Iterator[inspect.Parameter]:
    flag = setting.flag
    option: Any = typer.Option(
        ... if setting.default is MISSING else None,
        f"{flag.name}/--no-{key_of(flag.name)}" if setting.type is bool else flag.name,
        metavar=flag.metavar,
        parser=None if flag.parse is None else option_parser(flag.parse),
        min=flag.min if setting.type is int else None,
        help=setting.describe(default),
        envvar=variable_of(flag.name),
        show_envvar=False,
        rich_help_panel=flag.panel,
    )
    yield _parameter(flag.name, option, setting.type)
    if flag.off is not None:
        option = typer.Option(
            None,
            flag.off,
            help=f"Disable {flag.name}.",
            envvar=variable_of(flag.off),
            show_envvar=False,
            rich_help_panel=flag.panel,
        )
        yield _parameter(flag.off, option, bool)


def _parameter(flag: str, option: Any, annotation: type) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(parameter_of(flag), kind, default=option, annotation=annotation)


def file_parameters(config: type) -> list[inspect.Parameter]:
    """Parameters --config, which sets the command's defaults, and --print-config."""

    def read(context: typer.Context, path: Path | None) -> Path | None:
        if path is not None:
            context.default_map = read_toml(path, config)
        return path

    panel = "Configuration: flags override STAGELINE_* variables, which override --config"
    file: Any = typer.Option(
        None,
        metavar="FILE.toml",
        callback=read,
        is_eager=True,
        help="TOML file with flags as keys, such as max-step-tokens = 512.",
        rich_help_panel=panel,
    )
    is_printed: Any = typer.Option(
        False,
        "--print-config",
        help="Print the resulting configuration as TOML and exit.",
        rich_help_panel=panel,
    )
    return [_parameter("--config", file, Path), _parameter("--print-config", is_printed, bool)]


def make_config(
    config: type[_Config], context: typer.Context, flags: Mapping[str, Any], **others: Any
) -> _Config:
    """Build the config from `flags` (by parameter) and `others` (by field, for settings without a flag).

    Raises typer.BadParameter.
    """
    sections: defaultdict[str | None, dict[str, Any]] = defaultdict(dict)
    for setting in settings_of(config):
        value = flags.get(parameter_of(setting.flag.name))
        if _is_off(setting, context, flags, value):
            sections[setting.section][setting.attribute] = None
        elif value is not None:
            sections[setting.section][setting.attribute] = value
    types = get_type_hints(config)
    values = sections.pop(None, {})
    for section, fields in sections.items():
        assert section is not None
        values[section] = types[section](**fields)
    return build_config(lambda: config(**{**others, **values}))


def _is_off(setting: Setting, context: typer.Context, flags: Mapping[str, Any], value: Any) -> bool:
    """Whether a flag disables the setting that another flag sets."""
    on, off = setting.flag.name, setting.flag.off
    if off is None or not flags.get(parameter_of(off)):
        return False
    if value is None:
        return True
    ranks = [_rank(context, parameter_of(flag)) for flag in (off, on)]
    if ranks[0] == ranks[1]:
        raise typer.BadParameter(f"{on} {value} and {off} contradict each other: give one of them")
    return ranks[0] < ranks[1]


def _rank(context: typer.Context, parameter: str) -> int:
    source = context.get_parameter_source(parameter)
    assert source is not None
    return _PRECEDENCE.index(source.name)


def flags_of(
    config: object, *, only: Collection[str] | None = None, without: Collection[str] = ()
) -> tuple[str, ...]:
    """Build the command line that passes this config, or a part of it, to another process."""
    words: list[str] = []
    for setting in _chosen(type(config), only, without):
        flag, value = setting.flag, setting.value_in(config)
        if isinstance(value, bool):
            words.append(flag.name if value else f"--no-{key_of(flag.name)}")
        elif value is not None:
            words += [flag.name, str(flag.format(value))]
        elif flag.off is not None:
            words.append(flag.off)
    return tuple(words)


def toml_of(config: object) -> str:
    """Write this config as a TOML file for --config; unset values with default None are omitted."""
    entries: dict[str, Any] = {}
    for setting in settings_of(type(config)):
        flag, value = setting.flag, setting.value_in(config)
        if value is not None:
            entries[key_of(flag.name)] = flag.format(value)
        elif flag.off is not None:
            entries[key_of(flag.off)] = True
    return tomli_w.dumps(entries)


def read_toml(path: Path, config: type) -> dict[str, Any]:
    """The values of a file by parameter. Raises typer.BadParameter for unknown keys and wrong types."""
    types: dict[str, type] = {}
    for setting in settings_of(config):
        types[key_of(setting.flag.name)] = setting.type
        if setting.flag.off is not None:
            types[key_of(setting.flag.off)] = bool
    values: dict[str, Any] = {}
    for key, value in _entries(path).items():
        if isinstance(value, dict):
            text = f"section {key!r}: sections are not supported, write keys at the top level"
            raise typer.BadParameter(f"{path}: {text}")
        if key not in types:
            nearest = get_close_matches(key, types, n=1)
            hint = f", the nearest known one is {nearest[0]!r}" if nearest else ""
            raise typer.BadParameter(f"{path}: unknown key {key!r}{hint}")
        _check_type(path, key, value, types[key])
        values[parameter_of(key)] = value
    return values


def _entries(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{path} is not UTF-8 text") from None
    except ValueError as error:
        raise typer.BadParameter(f"{path} is not TOML: {error}") from None


def _check_type(path: Path, key: str, value: Any, expected: type) -> None:
    if expected is float and type(value) is int:
        return
    if type(value) is not (expected if expected in _EXPECTED else str):
        shown = json.dumps(value, default=str, ensure_ascii=False)
        wanted = _EXPECTED.get(expected, "a string")
        raise typer.BadParameter(f"{path}: {key} is {shown}, but must be {wanted}")
