"""A web server of byte ranges in a thread, which counts what it sends and misbehaves on request."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import xxhash

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass(slots=True)
class Request:
    """A request as it arrived, and how many bytes of its body were sent."""

    method: str
    path: str
    headers: dict[str, str]
    begin: int = 0
    end: int = 0
    sent_bytes: int = 0


Misbehaviour = Callable[["Handler", Request], bool]
"""Answers a request in its own way; False leaves it to the server."""


@dataclass(slots=True)
class RangeServer:
    """Files of `directory`, with ETags of their contents. `misbehave` is asked before each answer."""

    directory: Path
    address: str = ""
    requests: list[Request] = field(default_factory=list)
    misbehave: Misbehaviour | None = None
    flip: dict[str, int] = field(default_factory=dict)
    """Position of a byte to be sent wrong, by file."""
    prefix: str = ""
    """Of all paths."""
    bytes_per_s: float | None = None
    """Of each connection."""
    chunk_bytes: int = 16 * 1024
    """Written at once."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://{self.address}{self.prefix}"

    @property
    def sent_bytes(self) -> int:
        """Bytes of all bodies, by what the sockets took."""
        return sum(request.sent_bytes for request in self.requests)

    def sent_of(self, suffix: str) -> int:
        """Bytes of bodies of files whose names end so."""
        return sum(request.sent_bytes for request in self.requests if request.path.endswith(suffix))

    def statuses(self) -> Counter[str]:
        return Counter(request.method for request in self.requests)

    def tag(self, path: Path) -> str:
        """A strong ETag, computed once per state of the file."""
        status = path.stat()
        key = f"{path}-{status.st_mtime_ns}-{status.st_size}"
        if key not in self.tags:
            self.tags[key] = f'"{xxhash.xxh3_64_hexdigest(path.read_bytes())}"'
        return self.tags[key]


class Handler(BaseHTTPRequestHandler):
    """Serves files with HEAD, and with GET of one range or of all."""

    protocol_version = "HTTP/1.1"
    owner: RangeServer

    def do_HEAD(self) -> None:
        self._serve(has_body=False)

    def do_GET(self) -> None:
        self._serve(has_body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Tests look at `RangeServer.requests`."""

    def _serve(self, *, has_body: bool) -> None:
        name = unquote(urlsplit(self.path).path).removeprefix(self.owner.prefix).lstrip("/")
        headers = {key.lower(): value for key, value in self.headers.items()}
        request = Request(self.command, unquote(urlsplit(self.path).path), headers)
        path = self.owner.directory / name
        size = path.stat().st_size if path.is_file() else 0
        found = _RANGE.fullmatch(headers.get("range", ""))
        is_same = path.is_file() and headers.get("if-range", self.owner.tag(path)) == self.owner.tag(path)
        request.begin, request.end = (int(found[1]), int(found[2]) + 1) if found and is_same else (0, size)
        with self.owner.lock:
            self.owner.requests.append(request)
        if self.owner.misbehave is not None and self.owner.misbehave(self, request):
            return
        if not path.is_file():
            self.answer(404, {})
            return
        if headers.get("if-match", self.owner.tag(path)) != self.owner.tag(path):
            self.answer(412, {})
            return
        self.begin_file(request, path, status=206 if found and is_same else 200)
        if has_body:
            self.send_range(request, path)

    def answer(self, status: int, headers: dict[str, str]) -> None:
        """Answer without a body."""
        self.send_response(status)
        for key, value in {"Content-Length": "0", **headers}.items():
            self.send_header(key, value)
        self.end_headers()

    def begin_file(self, request: Request, path: Path, *, status: int) -> None:
        """Send the head of an answer with the requested range."""
        self.send_response(status)
        self.send_header("ETag", self.owner.tag(path))
        self.send_header("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True))
        self.send_header("Content-Length", str(request.end - request.begin))
        if status == 206:
            place = f"{request.begin}-{request.end - 1}/{path.stat().st_size}"
            self.send_header("Content-Range", f"bytes {place}")
        self.end_headers()

    def send_range(self, request: Request, path: Path, *, end: int | None = None) -> None:
        """Send the requested bytes, or those before `end`."""
        flipped = self.owner.flip.get(path.name)
        with path.open("rb") as file:
            file.seek(request.begin)
            position, end = request.begin, request.end if end is None else end
            while position < end:
                data = bytearray(file.read(min(self.owner.chunk_bytes, end - position)))
                if flipped is not None and position <= flipped < position + len(data):
                    data[flipped - position] ^= 1
                try:
                    self.wfile.write(data)
                except OSError:
                    self.close_connection = True
                    return
                request.sent_bytes += len(data)
                position += len(data)
                if self.owner.bytes_per_s is not None:
                    time.sleep(len(data) / self.owner.bytes_per_s)

    def cut(self) -> None:
        """Close the connection at once."""
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that leave are no news."""


@contextmanager
def range_server(directory: Path, *, prefix: str = "") -> Iterator[RangeServer]:
    """Serve the files of a directory on loopback while the block runs."""
    owner = RangeServer(directory, prefix=prefix)
    handler = type("BoundHandler", (Handler,), {"owner": owner})
    with _Server(("127.0.0.1", 0), handler) as server:
        owner.address = f"127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield owner
        finally:
            server.shutdown()
            thread.join()
