"""From the flags of a request to the keywords of `Client.generate`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import typer

from stageline.parameters import Detach, GenerateOptions


def options_from(flags: Mapping[str, Any]) -> GenerateOptions:
    """The options that the user has given. Raises typer.BadParameter, which names the flag."""
    # A flag that may be repeated is an empty list where it is not given.
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    return cast("GenerateOptions", {name: _convert(name, value) for name, value in given.items()})


def parse_token_ids(text: str) -> list[int]:
    """Token ids, as in 1,15,7. Raises ValueError."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} is not a list of token ids such as 1,15,7") from None


def _convert(name: str, value: Any) -> object:
    try:
        return _CONVERSIONS[name](value) if name in _CONVERSIONS else value
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=f"--{name.replace('_', '-')}") from None


def _biases(entries: list[str]) -> dict[int, float]:
    return dict(map(_bias, entries))


def _bias(entry: str) -> tuple[int, float]:
    token_id, _, bias = entry.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ValueError(f"{entry!r} is not ID=BIAS, for example 15=-2.5") from None


def _text_or_file(text: str) -> str:
    """The text itself, or what is in the file that @FILE names."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {text[1:]!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{text[1:]!r} is not UTF-8 text") from None


_CONVERSIONS: dict[str, Callable[[Any], object]] = {
    "logit_bias": _biases,
    "allowed_token_ids": parse_token_ids,
    "stop_token_ids": parse_token_ids,
    "bad_word_ids": lambda entries: [parse_token_ids(entry) for entry in entries],
    "json_schema": _text_or_file,
    "grammar": _text_or_file,
    "on_disconnect": lambda keep_s: Detach(keep_s=keep_s),
}
