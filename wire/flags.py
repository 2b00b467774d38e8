"""Flag declarations at the fields of config dataclasses.

A field of type `Annotated[T, Flag(...)]` can be set by a flag, an environment variable or a key of a TOML
file. The declaration and the field's default are the only definition of an option.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

from wire.addresses import parse_address, parse_peer_address


def listen_address(text: str) -> str:
    """Normalise HOST:PORT to listen on. Raises ValueError."""
    return str(parse_address(text))


OFF = "off"


def listen_address_or_off(text: str) -> str:
    """Normalise HOST:PORT to listen on, or `OFF`. Raises ValueError."""
    return text if text == OFF else listen_address(text)


def peer_address(text: str) -> str:
    """Normalise HOST:PORT to connect to. Raises ValueError."""
    return str(parse_peer_address(text))


def peer_addresses(text: str) -> tuple[str, ...]:
    """Normalise addresses to connect to, separated by commas. Raises ValueError."""
    return tuple(peer_address(part.strip()) for part in text.split(","))


def file_path(text: str) -> Path:
    """Return the absolute path of a file, existing or not. Raises ValueError for a directory.

    Links stay links: Kubernetes replaces files by changing one.
    """
    path = Path(os.path.abspath(text))
    if path.is_dir():
        raise ValueError(f"{text!r} is a directory: give the path of a file")
    return path


def directory_path(text: str) -> Path:
    """Return the absolute path of a directory, existing or not. Raises ValueError for anything else."""
    path = Path(os.path.realpath(text))
    if path.is_symlink():
        raise ValueError(f"{text!r} is a loop of links: give the path of a directory")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{text!r} is a file: give the path of a directory")
    return path


def existing_file(text: str) -> Path:
    """Return the absolute path of a file. Raises ValueError."""
    path = file_path(text)
    if not path.is_file():
        raise ValueError(f"file {text!r} does not exist")
    return path


def files(text: str) -> tuple[Path, ...]:
    """Return the absolute paths of files, separated by commas. Raises ValueError."""
    return tuple(existing_file(part.strip()) for part in text.split(","))


def checkpoint_directory(text: str) -> Path:
    """Return the absolute path of an existing directory or GGUF file. Raises ValueError for anything else."""
    path = Path(text)
    is_gguf = path.suffix.lower() == ".gguf"
    if not path.exists():
        raise ValueError(f"{'file' if is_gguf else 'directory'} {text!r} does not exist: {_model_hint(text)}")
    if not path.is_dir() and not is_gguf:
        raise ValueError(
            f"{text!r} is a file: give the directory of a Hugging Face checkpoint, or a GGUF file"
        )
    return path.absolute() if is_gguf else path.resolve()


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def _model_hint(text: str) -> str:
    """What to give; for names as hubs have them, which other servers take without a scheme, their address."""
    if _HUB_NAME.fullmatch(text):
        return f"a model of the Hugging Face Hub is hf://{text}"
    return "give the directory of a checkpoint, a GGUF file, or hf://ORG/NAME"


def plain(value: Any) -> Any:
    """Convert to a type of TOML: bool, int, float or str."""
    if isinstance(value, Enum):
        value = value.value
    return value if isinstance(value, bool | int | float | str) else str(value)


@dataclass(frozen=True, slots=True)
class Flag:
    """How users set a field. `help` has no full stop; default and limits are appended.

    `unset` describes the default None. `parse` converts the flag's text, `format` a value to text that
    `parse` accepts; without them the field's type is used. `off` names a flag that sets the field to None.
    `above` is an exclusive minimum; a number is always finite.
    """

    name: str
    metavar: str | None
    help: str
    unset: str | None = None
    panel: str | None = None
    min: float | None = None
    above: float | None = None
    max: float = math.inf
    parse: Callable[[str], Any] | None = None
    format: Callable[[Any], Any] = plain
    off: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A config field with a flag, or such a field of the nested dataclass `section`.

    `type` is the value's type on the command line; `default` is MISSING for a required flag.
    """

    flag: Flag
    type: type
    attribute: str
    section: str | None
    default: Any

    def value_in(self, config: object) -> Any:
        owner = config if self.section is None else getattr(config, self.section)
        return getattr(owner, self.attribute)

    def describe(self, default: str | None = None) -> str:
        """Return the help text; `default` replaces the field's default."""
        default = default or self._default_text()
        return f"{self.flag.help}." if default is None else f"{self.flag.help} (default: {default})."

    def _default_text(self) -> str | None:
        if self.default is MISSING:
            return None
        if self.default is None:
            return self.flag.unset
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        text = self.flag.format(self.default)
        return f"{text:g}s" if self.flag.metavar == "SECONDS" else str(text)


def key_of(flag: str) -> str:
    """Return the TOML key of a flag: max-step-tokens for --max-step-tokens."""
    return flag.removeprefix("--")


def parameter_of(flag: str) -> str:
    """Return the command's parameter of a flag: max_step_tokens for --max-step-tokens."""
    return key_of(flag).replace("-", "_")


def variable_of(flag: str) -> str:
    """Return the environment variable of a flag: STAGELINE_MAX_STEP_TOKENS for --max-step-tokens."""
    return f"STAGELINE_{parameter_of(flag).upper()}"


def settings_of(config: type) -> tuple[Setting, ...]:
    """Return the settings of a config dataclass and its nested dataclasses, in declaration order."""
    settings: list[Setting] = []
    hints = get_type_hints(config, include_extras=True)
    for field in fields(config):
        hint = hints[field.name]
        flags = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, Flag)]
        if flags:
            settings.append(
                Setting(
                    flag=flags[0],
                    type=_text_type(hint.__origin__, flags[0]),
                    attribute=field.name,
                    section=None,
                    default=field.default,
                )
            )
        elif is_dataclass(hint):
            assert isinstance(hint, type)
            settings += [replace(setting, section=field.name) for setting in settings_of(hint)]
    return tuple(settings)


def variables_of(config: type) -> Iterator[str]:
    """Yield the environment variables of all flags of a config dataclass."""
    for setting in settings_of(config):
        yield variable_of(setting.flag.name)
        if setting.flag.off is not None:
            yield variable_of(setting.flag.off)


_PREFIX = "STAGELINE_"
_OF_TESTS = "STAGELINE_TEST_"
"""Reserved for tests and tools of the project."""
_OF_CLIENTS = frozenset(("STAGELINE_COORDINATOR", "STAGELINE_GATEWAY", "STAGELINE_TLS_DIR"))


def unread_variable(names: Iterable[str], configs: Callable[[], Sequence[type]]) -> str | None:
    """Return a text about the first variable of Stageline's that neither clients nor processes with `configs`
    read; None if there is none.
    """
    doubtful = {name for name in names if name.startswith(_PREFIX) and not name.startswith(_OF_TESTS)}
    if doubtful <= _OF_CLIENTS:
        return None
    known = _OF_CLIENTS.union(*map(variables_of, configs()))
    if not (unknown := sorted(doubtful - known)):
        return None
    # The prefix, which all have, would make any two alike.
    others = [name.removeprefix(_PREFIX) for name in known]
    nearest = get_close_matches(unknown[0].removeprefix(_PREFIX), others, n=1)
    hint = f", the nearest known one is {_PREFIX}{nearest[0]}" if nearest else ""
    return f"no command reads the environment variable {unknown[0]}{hint}"


def _text_type(annotation: Any, flag: Flag) -> type:
    if flag.parse is not None:
        return str
    types: list[type] = [member for member in get_args(annotation) if member is not type(None)]
    return types[0] if types else cast(type, annotation)


def check_limits(config: object) -> None:
    """Raise ValueError for a number outside the `min` or `above` and the `max` of its flag."""
    for setting in settings_of(type(config)):
        flag, value = setting.flag, setting.value_in(config)
        if value is None or (flag.min is None and flag.above is None):
            continue
        is_above = value > flag.above if flag.min is None else value >= flag.min
        if not (is_above and value <= flag.max and value < math.inf):
            low = f"({flag.above}" if flag.min is None else f"[{flag.min}"
            high = f"{flag.max}{']' if flag.max < math.inf else ')'}"
            raise ValueError(f"{flag.name} is {value}, must be in {low}, {high}")
