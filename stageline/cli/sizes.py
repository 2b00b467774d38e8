"""Sizes in bytes, as people write and read them."""

import re

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)", re.ASCII)
_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS = _DECIMAL | _BINARY
MAX_BYTES = 2**50


def parse_size(text: str) -> int:
    """Bytes of a size such as 20GiB, 512MiB, 1.5GB or 4096B. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for example 20GiB, 512MiB or 8GB")
    if not match["unit"]:
        raise ValueError(
            f"{text!r} has no unit; write for example {match['number']}GiB or {match['number']}B"
        )
    unit = _UNITS.get(match["unit"].upper())
    if unit is None:
        raise ValueError(
            f"{text!r} has the unknown unit {match['unit']!r}; known are B, kB to TB, KiB to TiB"
        )
    number = float(match["number"])
    if number * unit > MAX_BYTES:
        raise ValueError(f"{text!r} is more than any machine has, the limit is {format_size(MAX_BYTES)}")
    size = round(number * unit)
    if size == 0:
        raise ValueError(f"{text!r} is nothing; a size is at least 1B")
    return size


def format_size(size_bytes: int) -> str:
    """A size in binary units with three digits or so: 980 B, 12.4 MiB, 20.0 GiB."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} B"
