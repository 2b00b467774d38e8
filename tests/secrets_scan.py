"""Finds secrets in what processes show to others: command lines, environments, logs and files."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote

MIN_BYTES = 16


def forms_of(secret: str) -> set[bytes]:
    """The secret as it is, and as programs encode it."""
    data = secret.encode()
    assert len(data) >= MIN_BYTES, "a short secret is found by chance"
    encoded = {base64.b64encode(data[start:]).rstrip(b"=")[4:-4] for start in range(3)}
    return {data, data.hex().encode(), data.hex().upper().encode(), quote(secret, safe="").encode(), *encoded}


def key_lines(pem: bytes) -> list[str]:
    """The lines of a private key in PEM form that only this key has."""
    lines = pem.decode().splitlines()
    assert "PRIVATE KEY" in lines[0]
    return [line for line in lines[2:-2] if len(line) >= MIN_BYTES]


def secrets_in(places: Mapping[str, bytes], secrets: Mapping[str, str]) -> list[str]:
    """Each "SECRET in PLACE" that is found."""
    return sorted(
        f"{name} in {place}"
        for place, content in places.items()
        for name, secret in secrets.items()
        if any(form in content for form in forms_of(secret))
    )


def of_processes(pids: Mapping[str, int]) -> dict[str, bytes]:
    """Command lines and environments."""
    return {
        f"{part} of {name}": Path(f"/proc/{pid}/{part}").read_bytes()
        for name, pid in pids.items()
        for part in ("cmdline", "environ")
    }


def of_files(paths: Iterable[Path]) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in paths if path.is_file()}
