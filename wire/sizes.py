"""Parses and formats sizes in bytes."""

import re

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)", re.ASCII)
_BINARY = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_DECIMAL = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1}
_UNITS = _DECIMAL | {name.upper(): unit for name, unit in _BINARY.items()}
MAX_BYTES = 2**50


def parse_size(text: str) -> int:
    """Parse a size such as 20GiB, 512MiB, 1.5GB or 4096B. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size: write for example 20GiB, 512MiB or 8GB")
    number = float(match["number"])
    if number == 0:
        raise ValueError(f"{text!r} is zero, the minimum is 1B: write for example 20GiB, 512MiB or 8GB")
    if not match["unit"]:
        raise ValueError(
            f"{text!r} has no unit: write for example {match['number']}GiB or {match['number']}MiB"
        )
    unit = _UNITS.get(match["unit"].upper())
    if unit is None:
        raise ValueError(f"{text!r} has unknown unit {match['unit']!r}: use B, kB to TB or KiB to TiB")
    if number * unit > MAX_BYTES:
        raise ValueError(f"{text!r} is too large, the limit is {format_size(MAX_BYTES)}")
    size = round(number * unit)
    if size == 0:
        raise ValueError(f"{text!r} is too small, the minimum is 1B")
    return size


def format_size(size_bytes: int) -> str:
    """Format a size in binary units with one decimal: 980 B, 12.4 MiB, 20.0 GiB."""
    for name, unit in _BINARY.items():
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} B"


def exact_size(size_bytes: int) -> str:
    """Format a size such that `parse_size` returns the same number: 64MiB, 1000B."""
    for name, unit in _BINARY.items():
        if size_bytes and size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return f"{size_bytes}B"
