"""JSON that clients and models write: of a bounded depth, and of whole characters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

MAX_JSON_DEPTH = 120
"""Limit of nested arrays and objects, which bounds every recursion over them; llguidance reads 125."""

_BRACKET_OR_STRING = re.compile(r'[\[{]|[\]}]|"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
HALF_CHARACTER = "\ufffd"
"""Stands for half of a surrogate pair."""
ESCAPED_HALF = "\\ufffd"


def check_depth(text: str) -> None:
    """Raise ValueError for JSON nested more than `MAX_JSON_DEPTH` levels deep, before it is parsed."""
    if text.count("[") + text.count("{") <= MAX_JSON_DEPTH:
        return
    depth = 0
    for match in _BRACKET_OR_STRING.finditer(text):
        opener = match.group()[0]
        depth += (opener in "[{") - (opener in "]}")
        if depth > MAX_JSON_DEPTH:
            raise ValueError(f"is nested too deeply: more than {MAX_JSON_DEPTH} levels of arrays and objects")


def whole_characters(text: str) -> str:
    """Replace the escapes of halves of surrogate pairs in a JSON text, which no UTF-8 text can have."""
    if "\\u" not in text:
        return text
    return _ESCAPE.sub(lambda match: ESCAPED_HALF if match["half"] else match.group(), text)


def read_json(text: str, **hooks: Callable[[Any], object]) -> object:
    """Return the value of a JSON text; `hooks` are those of `json.loads`. Raises ValueError."""
    check_depth(text)
    return json.loads(whole_characters(text), parse_constant=_reject_constant, **hooks)  # type: ignore[arg-type]


def parse_json(text: str) -> object:
    """Return the value of a JSON text; the text itself if it is none, or nested too deeply."""
    try:
        return read_json(text)
    except ValueError:
        return text


def is_json_object(text: str) -> bool:
    """Whether `text` is a JSON object."""
    return isinstance(parse_json(text), dict)


def _reject_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
