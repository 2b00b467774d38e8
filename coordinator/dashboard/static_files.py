"""The files of the page, read once."""

from dataclasses import dataclass
from pathlib import Path

import xxhash

_DIRECTORY = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """`etag` changes with its content."""

    body: bytes
    content_type: str
    etag: str


def load_static_files() -> dict[str, StaticFile]:
    """By name. Nothing else is ever read from the disk for a client."""
    return {path.name: _load(path) for path in sorted(_DIRECTORY.iterdir()) if path.suffix in _TYPES}


def _load(path: Path) -> StaticFile:
    body = path.read_bytes()
    return StaticFile(body, _TYPES[path.suffix], xxhash.xxh3_64_hexdigest(body))
