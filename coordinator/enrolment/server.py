"""HTTPS server for enrolment: `/ca`, `/enroll` with a join token, `/renew` with a certificate."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from cryptography import x509
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from coordinator.enrolment.enroller import Enrolled, Enroller
from web.connection_limits import FOR_OPERATORS
from web.protocol import PEER_CERTIFICATE
from web.server import HttpServer
from wire.addresses import Address, counted_host, parse_address
from wire.errors import (
    AccessDenied,
    CertificateRefused,
    InvalidRequest,
    JoinTokenRefused,
    Overloaded,
    ServingError,
    reason_of,
)
from wire.peer_secrets import RefusedPeers

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16_384
TIMEOUT_S = 10.0
MAX_TRIES = 60
WINDOW_S = 60.0
MAX_HOSTS = 1024
MAX_RUNNING = 4
"""Signatures at a time; further requests wait."""
_STATUSES: dict[type[ServingError], int] = {
    InvalidRequest: 400,
    CertificateRefused: 401,
    AccessDenied: 403,
    JoinTokenRefused: 403,
    Overloaded: 429,
}
_Handler = Callable[[Request, str], Awaitable[Response]]


class EnrolmentServer:
    """Serves applicants on `listen` (HOST:PORT) from `start` to `stop`."""

    def __init__(
        self,
        enroller: Enroller,
        *,
        listen: str,
        tls: ssl.SSLContext,
        refused: RefusedPeers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tls` asks for certificates and takes connections without; `refused` counts and logs refusals."""
        self._enroller, self._refused = enroller, refused
        self._rate = HostRate(clock)
        self._running = asyncio.Semaphore(MAX_RUNNING)
        application = Starlette(
            routes=[
                Route("/ca", self._guarded(self.authority)),
                Route("/enroll", self._guarded(self.enrol), methods=["POST"]),
                Route("/renew", self._guarded(self.renew), methods=["POST"]),
            ]
        )
        hint = "choose another address with --enroll-listen HOST:PORT"
        self._server = HttpServer(
            application, parse_address(listen), name="enrolment", hint=hint, tls=tls, limits=FOR_OPERATORS
        )

    @property
    def address(self) -> Address:
        return self._server.address

    async def start(self) -> None:
        """Raises OSError with one line if the address cannot be bound."""
        await self._server.start()

    async def stop(self) -> None:
        """Close every connection."""
        await self._server.stop()

    async def authority(self, request: Request, host: str) -> Response:
        content = await asyncio.to_thread(self._enroller.authorities)
        return Response(content, media_type="application/x-pem-file")

    async def enrol(self, request: Request, host: str) -> Response:
        fields = await _read_fields(request, ("token_id", "secret", "csr"))
        token_id, secret, csr = fields
        return await self._answer(lambda: self._enroller.enrol(token_id, secret, csr.encode(), host=host))

    async def renew(self, request: Request, host: str) -> Response:
        der = request.scope.get("extensions", {}).get(PEER_CERTIFICATE)
        if der is None:
            raise CertificateRefused("the connection has no certificate")
        (csr,) = await _read_fields(request, ("csr",))
        certificate = x509.load_der_x509_certificate(der)
        return await self._answer(lambda: self._enroller.renew(certificate, csr.encode(), host=host))

    async def _answer(self, work: Callable[[], Enrolled]) -> Response:
        async with self._running:
            enrolled = await asyncio.to_thread(work)
        return _json_response(asdict(enrolled))

    def _guarded(self, handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            host = request.client.host if request.client else "unknown"
            try:
                self._rate.check(host)
                async with asyncio.timeout(TIMEOUT_S):
                    response = await handler(request, host)
            except ServingError as error:
                if not isinstance(error, Overloaded):
                    self._refused.note(f"{request.method} {request.url.path[:32]}", str(error), host=host)
                response = _error_response(_STATUSES.get(type(error), 409), str(error), reason_of(error))
            except TimeoutError:
                response = _error_response(504, f"no answer within {TIMEOUT_S:g} s", "DEADLINE_PASSED")
            except OSError as error:
                log.error("enrolment failed: %s", error)
                text = "the coordinator cannot sign certificates; its log has the details"
                response = _error_response(503, text, "OS_ERROR")
            return response

        return handle


class HostRate:
    """Limits requests per host and minute; the host that was quiet for longest is forgotten first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def check(self, host: str) -> None:
        """Count a request. Raises Overloaded above the limit."""
        host, now_s = counted_host(host), self._clock()
        times = self._times.setdefault(host, deque(maxlen=MAX_TRIES))
        self._times.move_to_end(host)
        if len(self._times) > MAX_HOSTS:
            self._times.popitem(last=False)
        if len(times) == MAX_TRIES and now_s - times[0] < WINDOW_S:
            wait_s = WINDOW_S - (now_s - times[0])
            raise Overloaded(
                f"this host sent {MAX_TRIES} requests in {WINDOW_S:g} s, the limit: retry in {wait_s:.0f} s",
                retry_after_s=wait_s,
            )
        times.append(now_s)


async def _read_fields(request: Request, names: tuple[str, ...]) -> list[str]:
    """ASCII texts of a JSON object with exactly these fields. Raises InvalidRequest."""
    try:
        fields: Any = json.loads(await _read_body(request))
    except (ValueError, RecursionError):
        fields = None
    if (
        not isinstance(fields, dict)
        or set(fields) != set(names)
        or not all(isinstance(value, str) and value.isascii() for value in fields.values())
    ):
        raise InvalidRequest(f"the body is not a JSON object with the ASCII texts {', '.join(names)}")
    return [fields[name] for name in names]


async def _read_body(request: Request) -> bytes:
    """Raises InvalidRequest."""
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise InvalidRequest(f"the body exceeds the limit of {MAX_BODY_BYTES} bytes")
    except ClientDisconnect:
        raise InvalidRequest("the connection was closed before the end of the body") from None
    return body


def _json_response(value: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(value).encode(), status, media_type="application/json")


def _error_response(status: int, text: str, reason: str) -> Response:
    return _json_response({"error": text, "reason": reason}, status)
