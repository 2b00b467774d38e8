"""Typed, checked access to the fields of config.json. Every error names the field and its value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from checkpoint.errors import BadConfig

RawConfig = Mapping[str, object]
_Number = TypeVar("_Number", int, float)


def positive_int(raw: RawConfig, key: str, default: int | None = None) -> int:
    """`raw[key]`, an integer above 0; `default` where it is absent or null.

    Raises BadConfig when it is absent without a default, or is anything else.
    """
    value = raw.get(key)
    if value is None:
        return _default(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise BadConfig(f"config field {key!r} must be a positive integer, is {value!r}")
    return value


def positive_float(raw: RawConfig, key: str, default: float | None = None) -> float:
    """`raw[key]`, a finite number above 0; `default` where it is absent or null. Raises as `positive_int`."""
    value = raw.get(key)
    if value is None:
        return _default(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise BadConfig(f"config field {key!r} must be a positive number, is {value!r}")
    return float(value)


def optional_float(raw: RawConfig, key: str) -> float | None:
    """As `positive_float`, with None where the field is absent or null."""
    return None if raw.get(key) is None else positive_float(raw, key)


def flag(raw: RawConfig, key: str, *, default: bool) -> bool:
    """`raw[key]`, true or false; `default` where it is absent or null. Raises BadConfig for anything else."""
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadConfig(f"config field {key!r} must be true or false, is {value!r}")
    return value


def text(raw: RawConfig, key: str) -> str | None:
    """`raw[key]`, a string, or None where it is absent or null. Raises BadConfig for anything else."""
    value = raw.get(key)
    if value is not None and not isinstance(value, str):
        raise BadConfig(f"config field {key!r} must be a string, is {value!r}")
    return value


def _default(key: str, default: _Number | None) -> _Number:
    if default is None:
        raise BadConfig(f"config field {key!r} is missing")
    return default
