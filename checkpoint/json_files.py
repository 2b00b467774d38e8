"""Strict reading of small JSON files."""

from __future__ import annotations

import json
from pathlib import Path

from checkpoint.errors import BadConfig, CheckpointError
from checkpoint.regular_files import read_regular

MAX_CONFIG_BYTES = 4 * 1024 * 1024
"""Of config.json and generation_config.json, which have some kB."""


def read_json_object(path: Path, *, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, object]:
    """The JSON object in `path`.

    Raises CheckpointNotFound when the file is absent or unreadable, NotRegularFile when it is no file,
    FileTooLarge, and BadConfig when it is not UTF-8, not JSON, not an object, or names a key twice.
    """
    return parse_json_object(read_regular(path, max_bytes=max_bytes), str(path), BadConfig)


def parse_json_object(text: bytes, source: str, error_type: type[CheckpointError]) -> dict[str, object]:
    """`text` as a JSON object; `source` names it in an error of `error_type`."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise error_type(f"{source} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise error_type(f"{source} holds a JSON {type(value).__name__}, not an object")
    return value


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} appears twice")
        result[key] = value
    return result
