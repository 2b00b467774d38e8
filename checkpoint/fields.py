"""Typed, checked access to the fields of config.json. Every error names the field and its value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

from checkpoint.errors import BadConfig

RawConfig = Mapping[str, object]
MAX_LAYERS = 4096
MAX_INT = 2**31 - 1
LIMITS: Mapping[str, int] = {
    "num_hidden_layers": MAX_LAYERS,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "vocab_size": 2**24,
}
"""Largest values, far above every model: nothing is allocated for a field that is out of bounds."""
_Number = TypeVar("_Number", int, float)


def positive_int(raw: RawConfig, key: str, default: int | None = None) -> int:
    """`raw[key]`, an integer from 1 to its limit (`LIMITS`); `default` where it is absent or null.

    Raises BadConfig when it is absent without a default, or is anything else.
    """
    value = raw.get(key)
    if value is None:
        return _default(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise BadConfig(f"config field {key!r} must be a positive integer, is {_shown(value)}")
    if value > (limit := LIMITS.get(key, MAX_INT)):
        raise BadConfig(f"config field {key!r} is {_shown(value)}, the limit is {limit}")
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


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _default(key: str, default: _Number | None) -> _Number:
    if default is None:
        raise BadConfig(f"config field {key!r} is missing")
    return default
