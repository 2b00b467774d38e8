"""Special token ids from generation_config.json and config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from checkpoint.errors import BadConfig
from checkpoint.files import is_named, read_json_object

GENERATION_CONFIG_FILE = "generation_config.json"


def read_generation_config(directory: Path) -> dict[str, object]:
    """Read generation_config.json; empty if it is missing. Raises BadConfig."""
    path = directory / GENERATION_CONFIG_FILE
    return read_json_object(path) if is_named(path) else {}


def eos_token_ids(*sources: Mapping[str, object]) -> tuple[int, ...]:
    """Return the ids that end a sequence, of all sources: generation_config.json and objects of config.json.

    Finetunes change one of them only. Each may hold one id or a list. The tokenizer may have another one, see
    `TextCodec.end_token_ids`. Raises BadConfig for anything but non-negative integers.
    """
    ids: list[object] = []
    for source in sources:
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [value] if value is not None else []
    return tuple(dict.fromkeys(_token_id("eos_token_id", item) for item in ids))


def bos_token_id(generation: Mapping[str, object], raw_config: Mapping[str, object]) -> int | None:
    """Return the id that begins a sequence, or None: from generation_config.json, else config.json.

    Raises like `eos_token_ids`.
    """
    for source in (generation, raw_config):
        if (value := source.get("bos_token_id")) is not None:
            return _token_id("bos_token_id", value)
    return None


def _token_id(field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadConfig(f"{field!r} holds {value!r}, which is not a token id")
    return value
