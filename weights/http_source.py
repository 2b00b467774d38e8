"""Byte ranges over HTTP/1.1: connections that are used again, redirects, and what can go wrong.

The standard library's client, since it hands out the socket's bytes with one copy and holds the interpreter's
lock only for headers.
"""

from __future__ import annotations

import functools
import http.client
import json
import netrc
import re
import socket
import ssl
import threading
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from time import monotonic, time
from typing import Any, Protocol
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from checkpoint.pins import PinnedFile
from weights.errors import (
    RangeNotHeld,
    RangesIgnored,
    RequestAborted,
    SourceChanged,
    SourceError,
    SourceRefused,
    SourceUnavailable,
)
from weights.location import LOOPBACK, RemoteModel
from weights.parallel import run_requests
from weights.source import TIMEOUT_S, RangeBody, WeightSource
from wire.foreign_text import parse_digits

MAX_REDIRECTS = 5
NUM_HEADS = 8
"""HEAD requests at a time."""
MAX_READ = 1024 * 1024
MAX_DISCARDED_BYTES = 64 * 1024
"""Rest of a body that is read to use the connection again; a longer one costs the connection."""
MIN_WINDOW_BYTES = 64 * 1024
"""Minimum of a connection within its timeout, else it counts as stalled."""
_REDIRECTS = (301, 302, 303, 307, 308)
_BUSY = (408, 425, 429, 500, 502, 503, 504)
_MAX_REFUSAL_BYTES = 4096
_MAX_BYTES = 2**63 - 1
"""Largest size and position of bytes that a source may name."""
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", re.ASCII)

Headers = Mapping[str, str]
NO_HEADERS: Headers = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHead:
    """What a server says about a file."""

    size_bytes: int
    validator: str


class HttpRanges:
    """Requests of one source. `credentials` gives headers for the source's own host, and for no other."""

    def __init__(
        self,
        *,
        credentials: Callable[[], Headers] = lambda: NO_HEADERS,
        context: ssl.SSLContext | None = None,
        timeout_s: float = TIMEOUT_S,
        uses_proxies: bool = True,
        check_server: Callable[[ssl.SSLSocket], None] | None = None,
    ) -> None:
        """`context` verifies servers; by default it trusts the authorities of this host.

        `check_server` is called with each new connection of https, and raises SourceRefused.
        """
        self._credentials = credentials
        self._context = context or ssl.create_default_context()
        self._timeout_s = timeout_s
        self._proxies = urllib.request.getproxies() if uses_proxies else {}
        self._check_server = check_server
        self._idle: dict[tuple[str, str], list[_Connection]] = {}
        self._busy: set[_Connection] = set()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connections that no request uses."""
        with self._lock:
            idle = [connection for kept in self._idle.values() for connection in kept]
            self._idle.clear()
        for connection in idle:
            connection.close()

    def abort(self) -> None:
        """End the requests of other threads, whatever they wait for; they raise RequestAborted.

        Looking up a name takes its time.
        """
        with self._lock:
            for connection in self._busy:
                connection.abort()

    def head(self, url: str) -> FileHead | None:
        """Size and validator of a file; None if there is none. Raises SourceError."""
        response, connection = self._request("HEAD", url, {})
        _end_body(response, connection)
        where = _shown(url)
        if response.status == 404:
            return None
        _check_status(response, where)
        if response.status != 200 or not (length := response.getheader("Content-Length", "")):
            raise SourceRefused(f"{where} does not tell the size of the file (status {response.status})")
        if (size_bytes := parse_digits(length, limit=_MAX_BYTES)) is None:
            raise SourceUnavailable(
                f"{where} answered Content-Length {length!r:.40}, expected a number of bytes"
            )
        if not (validator := _validator(response)):
            raise SourceRefused(
                f"{where} has neither a strong ETag nor Last-Modified, so a change would not be noticed"
            )
        return FileHead(size_bytes=size_bytes, validator=validator)

    def open(self, url: str, file: PinnedFile, begin: int, end: int, *, pins_url: bool = False) -> RangeBody:
        """Request a range. Raises like `WeightSource.open`.

        With `pins_url` the address itself names one version of the file, and other servers on the way may
        have validators of their own.
        """
        headers = {"Range": f"bytes={begin}-{end - 1}"}
        if not pins_url:
            headers["If-Range"] = file.validator
        response, connection = self._request("GET", url, headers)
        try:
            _check_status(response, _shown(url))
            _check_range(response, _shown(url), file, begin, end)
            if not pins_url and (got := _validator(response)) != file.validator:
                raise _changed(_shown(url), file, got)
        except BaseException:
            connection.close()
            raise
        return _HttpBody(response, connection, _shown(url), end - begin, stall_s=self._timeout_s)

    def open_part(self, url: str, begin: int, end: int) -> tuple[RangeBody, int]:
        """Request a range of a file that the address pins; return the body and where it ends.

        A server may have only the first bytes of the range. Raises RangeNotHeld when it has none, and
        SourceUnavailable or SourceRefused with the server's reason.
        """
        response, connection = self._request("GET", url, {"Range": f"bytes={begin}-{end - 1}"})
        try:
            if response.status != 206:
                raise _refusal(response, _shown(url))
            part_end = _part_end(response, _shown(url), begin, end)
        except BaseException:
            connection.close()
            raise
        body = _HttpBody(response, connection, _shown(url), part_end - begin, stall_s=self._timeout_s)
        return body, part_end

    def read_text(self, url: str, *, max_bytes: int) -> bytes:
        """A small answer. Raises SourceError."""
        response, connection = self._request("GET", url, {})
        try:
            if response.status != 200:
                raise _refusal(response, _shown(url))
            text = response.read(max_bytes + 1)
            if len(text) > max_bytes:
                raise SourceRefused(f"{_shown(url)} answered more than {max_bytes} bytes")
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise connection.failure(f"{_shown(url)} broke off: {_reason(error)}") from error
        except BaseException:
            connection.close()
            raise
        connection.keep()
        return text

    def _request(
        self, method: str, url: str, headers: Headers
    ) -> tuple[http.client.HTTPResponse, _Connection]:
        """Send a request and follow redirects. A kept connection that the server has closed is replaced."""
        own, shown = urlsplit(url), _shown(url)
        for _ in range(MAX_REDIRECTS + 1):
            parts = urlsplit(url)
            is_own = (parts.scheme, parts.netloc) == (own.scheme, own.netloc)
            sent = {**headers, **(self._credentials() if is_own else NO_HEADERS)}
            connection = self._connection(parts)
            response = connection.send(method, parts, sent, shown)
            if response.status not in _REDIRECTS:
                if response.status == 403 and not is_own:
                    connection.close()
                    raise SourceUnavailable(f"{shown}: the address that it redirects to is refused by now")
                return response, connection
            _end_body(response, connection)
            url = _redirected(url, response, shown, allows_http=own.scheme == "http")
        raise SourceRefused(f"{shown} redirects more than {MAX_REDIRECTS} times")

    def _connection(self, parts: SplitResult) -> _Connection:
        """An idle connection to a host, or a new one; it is busy until it is kept or closed."""
        key = (parts.scheme, parts.netloc)

        def on_end(connection: _Connection, *, is_usable: bool) -> None:
            with self._lock:
                self._busy.discard(connection)
                if is_kept := is_usable and not connection.is_aborted:
                    self._idle.setdefault(key, []).append(connection)
            if not is_kept:
                connection.disconnect()

        with self._lock:
            idle = self._idle.get(key)
            connection = idle.pop() if idle else _Connection(self._new(parts), on_end, self._check_server)
            self._busy.add(connection)
            return connection

    def _new(self, parts: SplitResult) -> http.client.HTTPConnection:
        host, port = parts.hostname or "", parts.port
        proxy = urlsplit(self._proxies.get(parts.scheme, ""))
        if proxy.hostname is None or host in LOOPBACK or urllib.request.proxy_bypass(host):
            if parts.scheme == "https":
                return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._context)
            return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        if parts.scheme != "https":
            raise SourceRefused(f"plain http through a proxy is not supported: {parts.scheme}://{host}")
        tunnel = http.client.HTTPSConnection(
            proxy.hostname, proxy.port, timeout=self._timeout_s, context=self._context
        )
        tunnel.set_tunnel(host, port, headers=_proxy_headers(proxy))
        return tunnel


class _OnEnd(Protocol):
    """Takes a connection that no request uses any longer, and disconnects one that is not usable."""

    def __call__(self, connection: _Connection, *, is_usable: bool) -> None: ...


class _Connection:
    """A connection that is used by one request after the other, until it is closed or aborted."""

    def __init__(
        self,
        connection: http.client.HTTPConnection,
        on_end: _OnEnd,
        check_server: Callable[[ssl.SSLSocket], None] | None = None,
    ) -> None:
        dialled: Any = connection
        dialled._create_connection = self._dial  # there is no public way to give it a socket
        self._connection = connection
        self._on_end, self._check_server = on_end, check_server
        self._is_fresh = True
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        """A second handle of the socket, since TLS takes the first one while it shakes hands."""
        self.is_aborted = False

    def send(self, method: str, parts: SplitResult, headers: Headers, shown: str) -> http.client.HTTPResponse:
        """Raises SourceUnavailable and RequestAborted."""
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        sent = {"Accept-Encoding": "identity", "User-Agent": "stageline", **headers}
        while True:
            was_fresh, self._is_fresh = self._is_fresh, True
            try:
                self._connect()
                self._connection.request(method, target, headers=sent)
                return self._connection.getresponse()
            except (OSError, http.client.HTTPException, UnicodeError) as error:  # of a host's name
                self.disconnect()
                if was_fresh or self.is_aborted:
                    self.close()
                    raise self.failure(f"{shown} does not respond: {_reason(error)}") from error
            except BaseException:
                self.close()
                raise

    def failure(self, text: str) -> SourceUnavailable | RequestAborted:
        """The error of a request that ended early."""
        return RequestAborted(text) if self.is_aborted else SourceUnavailable(text)

    def _connect(self) -> None:
        """Connect unless it is, and check the server before anything is sent."""
        if self._connection.sock is not None:
            return
        self._connection.connect()
        connected: Any = self._connection.sock
        if self._check_server is not None and isinstance(connected, ssl.SSLSocket):
            self._check_server(connected)

    def _dial(self, address: tuple[str, int], timeout_s: float, _source: None) -> socket.socket:
        """Connect to the first address of a host that answers, unless `abort` ends it. Raises OSError."""
        failure = OSError(f"{address[0]} has no address")
        for family, kind, protocol, _, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            try:
                self._register(sock)
                sock.settimeout(timeout_s)
                sock.connect(place)
                return sock
            except OSError as error:
                sock.close()
                failure = error
        raise failure

    def _register(self, sock: socket.socket) -> None:
        """Raises ConnectionAbortedError."""
        with self._lock:
            if self.is_aborted:
                raise ConnectionAbortedError("aborted")
            self._forget_socket()
            self._socket = sock.dup()

    def _forget_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def keep(self) -> None:
        """The response was read to its end: the next request may use the connection."""
        self._is_fresh = self._connection.sock is None
        if self._is_fresh:
            self.disconnect()
        self._on_end(self, is_usable=True)

    def disconnect(self) -> None:
        """Close the socket; the next request connects again."""
        self._connection.close()
        self._is_fresh = True
        with self._lock:
            self._forget_socket()

    def close(self) -> None:
        """No further request uses the connection."""
        self._on_end(self, is_usable=False)

    def abort(self) -> None:
        """End the request of another thread. The connection is not used again."""
        with self._lock:
            self.is_aborted = True
            if self._socket is not None:
                try:
                    self._socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    return  # it has ended by itself


class _HttpBody(RangeBody):
    def __init__(
        self,
        response: http.client.HTTPResponse,
        connection: _Connection,
        shown: str,
        num_bytes: int,
        *,
        stall_s: float,
    ) -> None:
        self._response, self._connection, self._shown = response, connection, shown
        self._expected, self._received = num_bytes, 0
        self._stall_s = stall_s
        self._window_began_s, self._window_bytes = monotonic(), 0

    def read_some(self, view: memoryview) -> int:
        try:
            data = self._response.read1(min(len(view), MAX_READ))
        except (OSError, http.client.HTTPException) as error:
            raise self._ended(_reason(error)) from error
        if not data:
            raise self._ended("connection closed")
        view[: len(data)] = data
        self._received += len(data)
        self._check_rate(len(data))
        return len(data)

    def _check_rate(self, num_bytes: int) -> None:
        """A server that sends a byte now and then has stalled too."""
        self._window_bytes += num_bytes
        if (now_s := monotonic()) - self._window_began_s < self._stall_s:
            return
        if self._window_bytes < MIN_WINDOW_BYTES and self._received < self._expected:
            raise self._ended(f"{self._window_bytes} bytes in {self._stall_s:g} s")
        self._window_began_s, self._window_bytes = now_s, 0

    def _ended(self, reason: str) -> SourceUnavailable | RequestAborted:
        return self._connection.failure(
            f"{self._shown} ended after {self._received} of {self._expected} bytes: {reason}"
        )

    def close(self) -> None:
        if self._received == self._expected:
            _end_body(self._response, self._connection)  # read1() does not notice that nothing is left
        else:
            self._connection.close()


def _end_body(response: http.client.HTTPResponse, connection: _Connection) -> None:
    """Keep the connection of an answer whose rest nobody wants; close it if that is long or cut."""
    try:
        response.read(MAX_DISCARDED_BYTES)
        is_whole = response.isclosed()
    except (OSError, http.client.HTTPException):
        is_whole = False
    if is_whole:
        connection.keep()
    else:
        connection.close()


def _redirected(url: str, response: http.client.HTTPResponse, shown: str, *, allows_http: bool) -> str:
    """The address that a response names; plain http is for loopback.

    Raises SourceRefused, and SourceUnavailable for a damaged address.
    """
    if not (location := response.getheader("Location", "")):
        raise SourceRefused(f"{shown} answered {response.status} without an address")
    if not location.isascii():
        raise SourceUnavailable(f"{shown} redirects to {location!r:.100}, which is not ASCII")
    try:
        found = urljoin(url, location)
        parts = urlsplit(found)
        has_place = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_place = False
    if not has_place:
        raise SourceRefused(f"{shown} redirects to an address that is invalid")
    is_allowed = parts.scheme == "https" or (
        allows_http and parts.scheme == "http" and parts.hostname in LOOPBACK
    )
    if not is_allowed:
        raise SourceRefused(f"{shown} redirects to an address that is not https://")
    return found


def _check_status(response: http.client.HTTPResponse, shown: str) -> None:
    """Raises SourceError for a status other than 2xx."""
    status = response.status
    if status in _BUSY:
        wait_s = _retry_after_s(response.getheader("Retry-After", ""))
        raise SourceUnavailable(f"{shown} answered {status} {response.reason}", retry_after_s=wait_s)
    if status in (412, 416):
        raise SourceChanged(f"{shown} has changed since the model was opened (status {status})")
    if status in (401, 403):
        raise SourceRefused(f"{shown} refused access (status {status}): check the credentials on this host")
    if not 200 <= status < 300:
        raise SourceRefused(f"{shown} answered {status} {response.reason}")


def _refusal(response: http.client.HTTPResponse, shown: str) -> SourceError:
    """The error for an answer of a process of a cluster other than the requested bytes."""
    try:
        problem = str(json.loads(response.read(_MAX_REFUSAL_BYTES))["error"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, RecursionError):
        problem = response.reason
    text = f"{shown} answered {response.status}: {problem:.300}"
    if response.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        return RangeNotHeld(text)
    return SourceUnavailable(text) if response.status in _BUSY else SourceRefused(text)


def _part_end(response: http.client.HTTPResponse, shown: str, begin: int, end: int) -> int:
    """Where the part of [begin, end) that a server sends ends. Raises SourceRefused."""
    place = response.getheader("Content-Range", "")
    found = _CONTENT_RANGE.fullmatch(place)
    if found is None or int(found[1]) != begin or not begin <= int(found[2]) < end:
        raise SourceRefused(f"{shown} answered {place!r:.100} for bytes {begin}-{end - 1}")
    return int(found[2]) + 1


def _check_range(
    response: http.client.HTTPResponse, shown: str, file: PinnedFile, begin: int, end: int
) -> None:
    """Raises SourceChanged, RangesIgnored or SourceRefused unless the body is bytes [begin, end)."""
    if response.status == 200:
        if (got := _validator(response)) != file.validator:
            raise _changed(shown, file, got)
        raise RangesIgnored(f"{shown} ignores byte ranges: use a server that answers them with status 206")
    place = response.getheader("Content-Range", "")
    if response.status != 206 or not place:
        raise SourceRefused(f"{shown} answered a range with status {response.status} and no Content-Range")
    if (found := _CONTENT_RANGE.fullmatch(place)) is None:
        raise SourceUnavailable(f"{shown} answered Content-Range {place!r:.60} for {begin}-{end - 1}")
    if found[3] not in ("*", str(file.size_bytes)):
        raise SourceChanged(f"{shown} has {found[3]} bytes, had {file.size_bytes} when the model was opened")
    if (int(found[1]), int(found[2])) != (begin, end - 1):
        raise SourceUnavailable(f"{shown} answered bytes {found[1]}-{found[2]} for {begin}-{end - 1}")


def _changed(shown: str, file: PinnedFile, got: str) -> SourceChanged:
    return SourceChanged(
        f"{shown} has changed since the model was opened: it was {file.validator}, now is {got or 'unknown'};"
        " restart the coordinator to serve the new version"
    )


def _validator(response: http.client.HTTPResponse) -> str:
    """The strong ETag, or else the time of the last change; "" without either."""
    tag: str = response.getheader("ETag", "")
    return tag if tag.startswith('"') else response.getheader("Last-Modified", "")


def _retry_after_s(text: str) -> float | None:
    """Seconds of a Retry-After header, which may be a time instead (RFC 9110, section 10.2.3)."""
    if text.isascii() and text.isdigit():
        return float(text)  # infinite for too many digits
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time())
    except (ValueError, OverflowError):
        return None


def _shown(url: str) -> str:
    """The address without its query, which may be a signature."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no byte in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _proxy_headers(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    return {"Proxy-Authorization": _basic(proxy.username, proxy.password or "")}


def _basic(user: str, password: str) -> str:
    return f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"


def netrc_credentials(host: str) -> Headers:
    """The header for a host in ~/.netrc. Raises SourceRefused for a file that cannot be used."""
    try:
        found = netrc.netrc().authenticators(host)
    except FileNotFoundError:
        return NO_HEADERS
    except (netrc.NetrcParseError, OSError) as error:
        raise SourceRefused(f"~/.netrc cannot be used: {type(error).__name__}") from None
    return NO_HEADERS if found is None else {"Authorization": _basic(found[0], found[2] or "")}


class HttpSource(WeightSource):
    """A folder, whose files are found by their names since HTTP lists none. Credentials are in ~/.netrc."""

    def __init__(self, location: RemoteModel, *, timeout_s: float = TIMEOUT_S) -> None:
        self.location = location
        host = urlsplit(str(location)).hostname or ""
        self._ranges = HttpRanges(credentials=lambda: netrc_credentials(host), timeout_s=timeout_s)

    def find(self, names: Iterable[str]) -> dict[str, PinnedFile]:
        found = run_requests(
            [functools.partial(self._find, name) for name in names],
            num_threads=NUM_HEADS,
            name="weights-head",
            abort=self.abort,
        )
        return {file.name: file for file in found if file is not None}

    def open(self, file: PinnedFile, begin: int, end: int) -> RangeBody:
        return self._ranges.open(self._url(file.name), file, begin, end)

    def close(self) -> None:
        self._ranges.close()

    def abort(self) -> None:
        self._ranges.abort()

    def _find(self, name: str, _ending: threading.Event) -> PinnedFile | None:
        head = self._ranges.head(self._url(name))
        if head is None:
            return None
        return PinnedFile(name=name, size_bytes=head.size_bytes, validator=head.validator)

    def _url(self, name: str) -> str:
        return self.where(quote(name))
