"""Sampling parameters of generation_config.json, checked when the file is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from checkpoint.errors import BadConfig
from checkpoint.generation_config import GENERATION_CONFIG_FILE, read_generation_config
from wire.sampling import SAMPLING_NUMBERS, Range

_NAMES = frozenset({"temperature", "top_p", "min_p", "typical_p", "repetition_penalty"})
_RANGES: Mapping[str, Range] = {
    **{number.name: number.range for number in SAMPLING_NUMBERS if number.name in _NAMES},
    "top_k": Range(-1, 2**32 - 1),
}
"""Of the parameters that the file may set; -1 and 0 for top_k are all tokens."""


def read_generation_defaults(directory: Path) -> dict[str, float]:
    """The parameters that the file of a checkpoint directory sets, by name; empty without the file.

    Raises BadConfig for a value that requests could not have, with the file.
    """
    values = read_generation_config(directory)
    return {
        name: _checked(directory / GENERATION_CONFIG_FILE, name, values[name], valid)
        for name, valid in _RANGES.items()
        if values.get(name) is not None
    }


def _checked(path: Path, name: str, value: object, valid: Range) -> float:
    """Return the value of a parameter in the file `path`. Raises BadConfig.

    Requests with a default out of range would all be rejected, for a parameter that they do not have.
    """
    is_whole = name == "top_k"
    if isinstance(value, int if is_whole else int | float) and not isinstance(value, bool) and value in valid:
        return value
    expected = "an integer" if is_whole else "a number"
    raise BadConfig(f"{path}: {name} is {value!r:.40}, must be {expected} in {valid}: correct or remove it")
