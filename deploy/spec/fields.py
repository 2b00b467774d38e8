"""Keys of the cluster file: how a dataclass is read from a mapping.

A field `Annotated[T, Key(...)]` of a dataclass is a key of its section. Values that a process takes by a flag
are read by the definition of that flag, so that type, limits and texts of errors have one place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from deploy.spec.document import DocumentValue, SpecError, WrongField
from weights.location import is_remote, model_location
from wire.addresses import Address, parse_address
from wire.flags import (
    OFF,
    Setting,
    checkpoint_directory,
    directory_path,
    existing_file,
    file_path,
    files,
    key_of,
    settings_of,
)
from wire.sizes import parse_size
from wire.transport import tls_directory

_Section = TypeVar("_Section")
_ONE_PATH = (checkpoint_directory, directory_path, existing_file, file_path, tls_directory)
_TRUTH = {"true": True, "false": False}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_MIN_CPUS, _MAX_CPUS = 0.01, 4096.0


@dataclass(frozen=True, slots=True)
class Key:
    """A key and its reader, which raises SpecError, or ValueError without the place."""

    name: str
    help: str
    read: Callable[[DocumentValue], Any]


def keys_of(section: type) -> Mapping[str, tuple[str, Key]]:
    """Keys of a section, each with its field."""
    hints = get_type_hints(section, include_extras=True)
    found: dict[str, tuple[str, Key]] = {}
    for field in fields(section):
        for note in getattr(hints[field.name], "__metadata__", ()):
            if isinstance(note, Key):
                found[note.name] = (field.name, note)
    return found


def read_section(section: type[_Section], entry: DocumentValue) -> _Section:
    """Make a section from a mapping. Raises SpecError with the place of what is wrong."""
    keys = keys_of(section)
    values: dict[str, Any] = {}
    for name, value in entry.entries().items():
        if name not in keys:
            raise value.unknown(iter(keys))
        field, key = keys[name]
        values[field] = _placed(value, partial(key.read, value))
    required = {field.name for field in fields(section) if _is_required(field)}  # type: ignore[arg-type]
    missing = [name for name, (field, _) in keys.items() if field in required and field not in values]
    if missing:
        raise entry.error(f"{missing[0]!r} is missing")
    made: _Section = _placed(entry, lambda: section(**values))
    return made


def _is_required(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _placed(entry: DocumentValue, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except SpecError:
        raise
    except WrongField as error:
        raise entry.error_at(error) from None
    except ValueError as error:
        raise entry.error(str(error)) from None


def text(entry: DocumentValue) -> str:
    """Any text of one line."""
    found = entry.text()
    if not found or not found.isprintable():
        raise entry.error(f"{found!r} is not a line of printable text")
    return found


def word(entry: DocumentValue) -> str:
    """Any text without spaces."""
    found = text(entry)
    if " " in found:
        raise entry.error(f"{found!r} has spaces: give one word")
    return found


def host(entry: DocumentValue) -> str:
    """A host name or an IP address, without brackets and port."""
    found = text(entry)
    try:
        is_host = parse_address(str(Address(found, 0))).host == found
    except ValueError:
        is_host = False
    if not is_host:
        raise entry.error(
            f"{found!r} is not a host name or an IP address: write for example gpu-a or fd00::1"
        )
    return found


def number(entry: DocumentValue, *, low: float, high: float) -> int:
    """A whole number between `low` and `high`."""
    value = _number(int, entry.text())
    if not low <= value <= high:
        raise ValueError(f"{value} is out of range: must be in [{low:g}, {high:g}]")
    return int(value)


def cpu_count(entry: DocumentValue) -> float:
    """A number of CPUs in hundredths, which is as fine as engines divide them; an int if it is whole."""
    text = entry.text()
    value = _number(float, text)
    if not _MIN_CPUS <= value <= _MAX_CPUS:
        raise ValueError(f"{text} is out of range: must be in [{_MIN_CPUS:g}, {_MAX_CPUS:g}]")
    if round(value, 2) != value:
        raise ValueError(f"{text} is finer than {_MIN_CPUS:g}: round it")
    return int(value) if value.is_integer() else float(value)


def size(entry: DocumentValue) -> int:
    """A size in bytes, from a text such as 20GiB."""
    return parse_size(entry.text())


def absolute_path(entry: DocumentValue) -> Path:
    """An absolute path on the host of a process; whether it exists is not known here."""
    return _absolute(entry.text())


def section_of(section: type[_Section]) -> Callable[[DocumentValue], _Section]:
    """The reader of a mapping."""
    return partial(read_section, section)


def list_of(section: type[_Section]) -> Callable[[DocumentValue], tuple[_Section, ...]]:
    """The reader of a list of mappings."""
    return lambda entry: tuple(read_section(section, item) for item in entry.items())


def variables(entry: DocumentValue) -> dict[str, str]:
    """Environment variables: texts by name."""
    found: dict[str, str] = {}
    for name, value in entry.entries().items():
        if _VARIABLE.fullmatch(name) is None:
            raise value.error(f"{name!r} is not the name of an environment variable")
        found[name] = text(value) if value.text() else ""
    return found


def flag_value(config: type, flag: str) -> Callable[[DocumentValue], Any]:
    """The reader of a value that a process takes by `flag`."""
    return lambda entry: parse_flag(flags_of(config)[flag], entry.text())


def flag_words(config: type, *, taken: Mapping[str, str]) -> Callable[[DocumentValue], tuple[str, ...]]:
    """The reader of further flags of a process, by their keys in TOML files: max-step-tokens: 512.

    `taken` has the flags that other keys of the file set, with those keys.
    """

    def read(entry: DocumentValue) -> tuple[str, ...]:
        settings = {key_of(flag): setting for flag, setting in flags_of(config).items()}
        words: list[str] = []
        for name, value in entry.entries().items():
            if name not in settings:
                raise value.unknown(key for key in settings if f"--{key}" not in taken)
            setting = settings[name]
            if (instead := taken.get(setting.flag.name)) is not None:
                raise value.error(f"is set by the file's own key: use {instead}")
            words += words_of(config, {setting.flag.name: _placed(value, partial(_parsed, setting, value))})
        return tuple(words)

    return read


def _parsed(setting: Setting, entry: DocumentValue) -> Any:
    return parse_flag(setting, entry.text())


@cache
def flags_of(config: type) -> Mapping[str, Setting]:
    """The settings of a process by their flags."""
    return {setting.flag.name: setting for setting in settings_of(config)}


def parse_flag(setting: Setting, text: str) -> Any:
    """Parse the text of a flag; None for `off`. Raises ValueError.

    Paths must be absolute, and need not exist: they are on the host of the process.
    """
    flag = setting.flag
    if text == OFF and flag.off is not None:
        return None
    if flag.parse in _ONE_PATH or (flag.parse is model_location and not is_remote(text)):
        return _absolute(text)
    if flag.parse is files:
        return tuple(_absolute(part.strip()) for part in text.split(","))
    value = flag.parse(text) if flag.parse is not None else _typed(setting.type, text)
    if isinstance(value, int | float) and not _is_within(setting, value):
        low = f"at least {flag.min}" if flag.above is None else f"above {flag.above}"
        high = f" and at most {flag.max}" if flag.max < math.inf else ""
        raise ValueError(f"{text} is out of range: must be {low}{high}")
    return value


def _is_within(setting: Setting, value: float) -> bool:
    flag = setting.flag
    if flag.above is not None and not value > flag.above:
        return False
    return value <= flag.max and (flag.min is None or value >= flag.min)


def _typed(kind: type, text: str) -> Any:
    if kind is bool:
        if text not in _TRUTH:
            raise ValueError(f"{text!r} is not a boolean: must be true or false")
        return _TRUTH[text]
    if kind in (int, float):
        return _number(kind, text)
    if kind is str:
        return text
    members = [member.value for member in kind]  # type: ignore[attr-defined]
    if text not in members:
        raise ValueError(f"{text!r} is not one of {', '.join(members)}")
    return kind(text)


def _number(kind: type, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is not {'a whole number' if kind is int else 'a number'}") from None


def _absolute(text: str) -> Path:
    path = Path(text)
    if not path.is_absolute() or not text.isprintable():
        raise ValueError(f"path {json.dumps(text)} is not absolute: processes start in different directories")
    return path


def words_of(config: type, values: Mapping[str, Any]) -> list[str]:
    """The words of a command line that set flags of `config`; a None turns a flag off."""
    words: list[str] = []
    for name, value in values.items():
        flag = flags_of(config)[name].flag
        if isinstance(value, bool):
            words.append(name if value else f"--no-{key_of(name)}")
        elif value is None:
            assert flag.off is not None, f"{name} cannot be turned off"
            words.append(flag.off)
        else:
            formatted = flag.format(value)
            is_whole = isinstance(formatted, float) and formatted.is_integer()
            words += [name, str(int(formatted) if is_whole else formatted)]
    return words


def parse_words(config: type, words: tuple[str, ...]) -> dict[str, Any]:
    """The values of flags by name: the inverse of `words_of`. Raises ValueError for an unknown flag."""
    settings = flags_of(config)
    off = {setting.flag.off: name for name, setting in settings.items() if setting.flag.off is not None}
    values: dict[str, Any] = {}
    remaining = iter(words)
    for word in remaining:
        if word in off:
            values[off[word]] = None
        elif word in settings and settings[word].type is bool:
            values[word] = True
        elif word in settings:
            values[word] = parse_flag(settings[word], next(remaining))
        elif (name := word.replace("--no-", "--", 1)) in settings:
            values[name] = False
        else:
            raise ValueError(f"unknown flag {word!r}")
    return values
