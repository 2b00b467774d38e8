"""Who may call which method: the one table, and the check of every call's certificate.

Without certificates (`Transport` in plain text) nobody has an identity and nothing is checked here.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import grpc

from certificates.identity import Identity, Role
from wire.addresses import peer_host
from wire.audit import NO_AUDIT, AuditCaller, AuditLog
from wire.errors import AccessDenied, CertificateRefused, ServingError
from wire.interceptors import abort_call
from wire.peer_identity import auth_context, identity_in, peer_identity
from wire.peer_secrets import RefusedPeers
from wire.transport import Transport

log = logging.getLogger(__name__)

_USERS = frozenset({Role.GATEWAY, Role.CLIENT, Role.OPERATOR})
_OPERATORS = frozenset({Role.OPERATOR})
_WORKERS = frozenset({Role.WORKER})
_PROCESSES = frozenset({Role.COORDINATOR, Role.GATEWAY, Role.WORKER})
_EVERYONE = frozenset(Role)

ROLES_OF_METHOD: Mapping[str, frozenset[Role]] = {
    "/stageline.v1.Inference/Generate": _USERS,
    "/stageline.v1.Inference/Attach": _USERS,
    "/stageline.v1.Inference/Cancel": _USERS,
    "/stageline.v1.Inference/Serve": _USERS,
    "/stageline.v1.Inference/GetModel": _EVERYONE,
    "/stageline.v1.Inference/GetTokenizer": _USERS,
    "/stageline.v1.Inference/Tokenize": _USERS,
    "/stageline.v1.Inference/Detokenize": _USERS,
    "/stageline.v1.Cluster/Drain": _OPERATORS | _WORKERS,
    "/stageline.v1.Cluster/GetStatus": frozenset({Role.GATEWAY, Role.OPERATOR}),
    "/stageline.v1.Cluster/WatchKvEvents": frozenset({Role.GATEWAY, Role.OPERATOR}),
    "/stageline.v1.TelemetryService/ListTraces": _OPERATORS,
    "/stageline.v1.TelemetryService/GetTrace": _OPERATORS,
    "/stageline.v1.TelemetryService/GetActivity": _OPERATORS,
    "/stageline.internal.v1.MembershipService/Join": _WORKERS,
    "/stageline.internal.v1.StepResultsService/Deliver": _WORKERS,
    "/stageline.internal.v1.StageService/Forward": frozenset({Role.COORDINATOR, Role.WORKER}),
    "/stageline.internal.v1.StageService/ComputeReference": frozenset({Role.COORDINATOR}),
    "/stageline.internal.v1.StageService/ProbeLink": _WORKERS | {Role.COORDINATOR},
    "/stageline.internal.v1.DoctorService/GetFacts": _OPERATORS,
    "/stageline.internal.v1.DoctorService/Measure": _OPERATORS,
    "/stageline.internal.v1.DoctorService/Ping": _PROCESSES,
    "/stageline.internal.v1.DoctorService/Upload": _PROCESSES,
    "/stageline.internal.v1.DoctorService/Download": _PROCESSES,
    "/opentelemetry.proto.collector.trace.v1.TraceService/Export": frozenset({Role.GATEWAY, Role.WORKER}),
    "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export": _WORKERS,
    "/grpc.health.v1.Health/Check": _EVERYONE,
    "/grpc.health.v1.Health/List": _EVERYONE,
    "/grpc.health.v1.Health/Watch": _EVERYONE,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _EVERYONE,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": _EVERYONE,
}
"""Roles that may call a method; a method that is not listed may be called by nobody.

Further conditions are with the service: a worker joins and drains under its own name, a stage takes frames
from the stage before it only, and Attach and Cancel need the secret of the request.
"""

ROLES_OF_PATH: Mapping[str, frozenset[Role]] = {"/weights": frozenset({Role.COORDINATOR, Role.WORKER})}
"""As ROLES_OF_METHOD, for HTTP ports of the cluster's own processes, by the first part of the path."""

Context = grpc.aio.ServicerContext[Any, Any]


def caller_of(context: Context) -> AuditCaller:
    """Who calls, for the audit log."""
    host = peer_host(context)
    return {"who": peer_identity(context) or f"host {host}", "host": host}


def _denial(caller: Identity, method: str) -> str:
    roles = sorted(role.value for role in ROLES_OF_METHOD.get(method, ()))
    advice = f": use a certificate of role {' or '.join(roles)}" if roles else ""
    return f"{caller} may not call {method.rpartition('/')[2][:100]}{advice}"


class DenyList:
    """Identities and serial numbers whose certificates are refused before they end; read when it changes."""

    def __init__(self, path: Path | None, audit: AuditLog = NO_AUDIT) -> None:
        """Raises OSError or ValueError for a file that cannot be used."""
        self._audit = audit
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._entries: frozenset[str] = frozenset()
        if path is not None:
            self._stamp = _stamp(path)
            self._entries = _read_entries(path)

    def denies(self, identity: Identity, serial: int) -> bool:
        """Whether a certificate of `identity` is refused."""
        self._refresh()
        names = {f"{identity.role.value}/{identity.name}", f"serial:{serial:x}"}
        return not names.isdisjoint(self._entries)

    def _refresh(self) -> None:
        if self._path is None:
            return
        try:
            if (stamp := _stamp(self._path)) == self._stamp:
                return
            self._stamp = stamp
            self._entries = _read_entries(self._path)
        except (OSError, ValueError) as error:
            log.warning("deny list: %s; the entries before stay in force", error)
            self._audit.reloaded(str(self._path), str(error))
        else:
            log.info("deny list %s was read again: %d entries", self._path, len(self._entries))
            self._audit.reloaded(str(self._path), None)


def authorization(
    transport: Transport, deny_list: Path | None, refused: RefusedPeers
) -> tuple[grpc.aio.ServerInterceptor, ...]:
    """Interceptors of a server: none in plain text. Raises OSError or ValueError for a bad deny list."""
    if transport.identity is None:
        return ()
    return (AuthorizationInterceptor(transport.identity, DenyList(deny_list, refused.audit), refused),)


class AuthorizationInterceptor(grpc.aio.ServerInterceptor):
    """Checks the certificate of each call against `ROLES_OF_METHOD` before the servicer sees the call."""

    def __init__(self, own: Identity, denied: DenyList, refused: RefusedPeers) -> None:
        """`own` is this process: callers must be of the same trust domain and cluster."""
        self._own, self._denied, self._refused = own, denied, refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        for kind in ("unary_unary", "stream_unary", "unary_stream", "stream_stream"):
            if (behaviour := getattr(handler, kind)) is not None:
                guard = self._guarded_stream if kind.endswith("_stream") else self._guarded
                return handler._replace(**{kind: guard(behaviour, method)})
        raise AssertionError(method)

    async def _admit(self, context: Context, method: str) -> None:
        """End the call, and count it, unless the certificate permits it."""
        caller: Identity | None = None
        try:
            caller = self._caller(context)
            if caller.role not in ROLES_OF_METHOD.get(method, frozenset()):
                raise AccessDenied(_denial(caller, method))
        except ServingError as error:
            self._refused.note(f"a call of {method[:100]}", str(error), host=peer_host(context), who=caller)
            await abort_call(context, error, method)

    def _caller(self, context: Context) -> Identity:
        auth = auth_context(context)
        caller = identity_in(auth)
        if caller is None or auth.get("ssl_tls_version") != [b"TLSv1.3"]:
            raise CertificateRefused("the connection has no certificate, or not TLS 1.3")
        _check_caller(caller, self._own, _serial(auth["x509_pem_cert"][0]), self._denied)
        return caller

    def _guarded(self, behaviour: Callable[[Any, Context], Awaitable[Any]], method: str) -> Any:
        async def guarded(request: Any, context: Context) -> Any:
            await self._admit(context, method)
            return await behaviour(request, context)

        return guarded

    def _guarded_stream(self, behaviour: Callable[[Any, Context], Any], method: str) -> Any:
        """Of a method that yields its responses, or writes them itself."""

        async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
            await self._admit(context, method)
            result = behaviour(request, context)
            if hasattr(result, "__aiter__"):
                async for response in result:
                    yield response
            else:
                await result

        return guarded


def _check_caller(caller: Identity, own: Identity, serial: int, denied: DenyList) -> None:
    """Raises CertificateRefused for another cluster's certificate, and one on the deny list."""
    if (caller.trust_domain, caller.cluster) != (own.trust_domain, own.cluster):
        raise CertificateRefused(
            f"{caller.uri} is of another cluster: this is {own.cluster} of {own.trust_domain}"
        )
    if denied.denies(caller, serial):
        raise CertificateRefused(f"the certificate of {caller} is on the deny list")


class CertificateGate:
    """Checks callers of an HTTP port against `ROLES_OF_PATH`; everyone passes in plain text."""

    def __init__(self, transport: Transport, deny_list: Path | None, refused: RefusedPeers) -> None:
        """Raises OSError or ValueError for a bad deny list."""
        self._own = transport.identity
        self._denied = DenyList(deny_list, refused.audit)

    def admit(self, certificate: bytes | None, path: str) -> None:
        """Check the certificate (DER) of a connection. Raises CertificateRefused and AccessDenied."""
        if self._own is None:
            return
        if certificate is None:
            raise CertificateRefused("the connection has no certificate")
        caller, serial = _proven(certificate)
        _check_caller(caller, self._own, serial, self._denied)
        if caller.role not in ROLES_OF_PATH.get(f"/{path.lstrip('/').partition('/')[0]}", frozenset()):
            raise AccessDenied(f"{caller} may not read {path[:100]}")


@lru_cache(maxsize=1024)
def _proven(certificate: bytes) -> tuple[Identity, int]:
    """Identity and serial number of a certificate in DER form. Raises CertificateRefused."""
    from cryptography import x509  # imported late: processes in plain text do not need it

    from certificates.authority import identity_of

    found = x509.load_der_x509_certificate(certificate)
    try:
        return identity_of(found), found.serial_number
    except ValueError as error:
        raise CertificateRefused(f"the certificate cannot be used: {error}") from None


@lru_cache(maxsize=1024)
def _serial(pem: bytes) -> int:
    from cryptography import x509  # imported late: processes in plain text do not need it

    return x509.load_pem_x509_certificate(pem).serial_number


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read_entries(path: Path) -> frozenset[str]:
    """Raises OSError and ValueError."""
    entries = set()
    for number, line in enumerate(path.read_text(encoding="ascii", errors="strict").splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        kind, separator, rest = entry.partition(":" if entry.startswith("serial:") else "/")
        if separator == ":":
            entry = f"serial:{int(rest, 16):x}"
        elif separator != "/" or kind not in {role.value for role in Role} or not rest:
            raise ValueError(f"{path}, line {number}: {entry[:100]!r} is neither ROLE/NAME nor serial:HEX")
        entries.add(entry)
    return frozenset(entries)
