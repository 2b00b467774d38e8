"""Files of a page, held in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash
from starlette.requests import Request
from starlette.responses import Response

_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
SHARED_DIRECTORY = Path(__file__).parent / "static"
"""Colours, basic elements, icon, and the switch between light and dark."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file of a page; `etag` changes with its content."""

    body: bytes
    content_type: str
    etag: str

    def response(self, request: Request) -> Response:
        """The file, or 304 if the browser has it."""
        headers = {"ETag": f'"{self.etag}"', "Cache-Control": "no-cache"}
        known = request.headers.get("If-None-Match", "").split(",")
        if any(other.strip().removeprefix("W/") == headers["ETag"] for other in known):
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.content_type, headers=headers)


def load_static_files(directory: Path) -> dict[str, StaticFile]:
    """Files of a page and of all pages, by name; no other file is ever read for a client."""
    paths = [*SHARED_DIRECTORY.iterdir(), *directory.iterdir()]
    return {path.name: _load(path) for path in sorted(paths) if path.suffix in _TYPES}


def _load(path: Path) -> StaticFile:
    body = path.read_bytes()
    return StaticFile(body, _TYPES[path.suffix], xxhash.xxh3_64_hexdigest(body))
