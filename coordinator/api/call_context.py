"""Caller identity, deadline and operator rights of a call."""

import hmac
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.trace import SpanContext

from certificates.identity import Identity, Role
from coordinator.api.tenants import tenant_of
from coordinator.engine.engine import Engine
from stageline_rpc.internal.v1 import serve_pb2
from wire.addresses import peer_host
from wire.audit import AuditCaller
from wire.authorization import caller_of
from wire.channels import AUTHORIZATION_KEY, TENANT_KEY
from wire.errors import AccessDenied, AttachSecretMismatch, InvalidRequest, TokenMismatch, TokenMissing
from wire.ids import RequestId
from wire.peer_identity import peer_identity
from wire.peer_secrets import RefusedPeers
from wire.trace_context import parse_traceparent
from wire.user_files import token_path, write_secret

MAX_CLIENT_CHARACTERS = 256


class TokenFile:
    """New operator token, stored in `directory` for other commands; None without a directory."""

    def __init__(self, directory: Path | None) -> None:
        self.token = secrets.token_urlsafe(32) if directory is not None else None
        self._directory = directory
        self._path: Path | None = None

    def write(self, address: str) -> None:
        """Write the file, named after the coordinator's listen address. Raises OSError with the remedy."""
        if self._directory is None or self.token is None:
            return
        path = token_path(self._directory, address)
        try:
            write_secret(path, self.token)
        except OSError as error:
            raise OSError(
                f"the operator token cannot be written to {path} ({error.strerror}): give --token-file FILE,"
                " or set XDG_STATE_HOME to a directory that this user may write to"
            ) from error
        self._path = path

    def remove(self) -> None:
        """Remove the file, unless another coordinator has replaced its token."""
        if self._path is None or self.token is None:
            return
        try:
            if self._path.read_text(encoding="ascii").strip() == self.token:
                self._path.unlink()
        except (OSError, UnicodeDecodeError):
            return  # already removed


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """Caller of a call.

    `client` identifies the caller for limits: its tenant if it has one. `identity` is from its
    certificate, `span` is from its W3C headers, `deadline_s` is None without one.
    """

    host: str
    client: str
    deadline_s: float | None
    span: SpanContext | None = None
    identity: Identity | None = None
    tenant: str = ""
    max_tenant_sequences: int | None = None


class CallContexts:
    """Identifies clients by tenant, else the value of a metadata key, else operator, else their address."""

    def __init__(self, client_key: str | None, clock: Callable[[], float]) -> None:
        self._client_key = client_key
        self._clock = clock

    def of(self, context: grpc.aio.ServicerContext[Any, Any]) -> CallContext:
        untyped: Any = context  # the stubs lack these methods
        remaining_s = untyped.time_remaining()
        has_deadline = remaining_s is not None and math.isfinite(remaining_s)
        host, identity = peer_host(context), peer_identity(context)
        tenant = tenant_of(identity, metadata_value(context, TENANT_KEY))
        return CallContext(
            host=host,
            identity=identity,
            tenant=tenant,
            client=tenant or self._named(untyped.invocation_metadata()) or _operator(identity) or host,
            deadline_s=self._clock() + remaining_s if has_deadline else None,
            span=_span_of(untyped.invocation_metadata()),
        )

    def on_stream(
        self, stream: CallContext, submit: serve_pb2.SubmitEnvelope, *, deadline_s: float | None
    ) -> CallContext:
        """Caller of a request on a stream of many, which names its tenant, or its `client` where it has none.

        Raises AccessDenied for a tenant that the stream may not act for.
        """
        tenant = tenant_of(stream.identity, submit.tenant)
        return replace(
            stream,
            tenant=tenant,
            max_tenant_sequences=submit.max_tenant_sequences or None,
            client=tenant or submit.client or stream.client,
            deadline_s=deadline_s,
            span=parse_traceparent(submit.traceparent) if submit.traceparent else None,
        )

    def _named(self, metadata: Any) -> str | None:
        if self._client_key is None:
            return None
        return next((str(value) for key, value in metadata or () if key == self._client_key), None)


def check_client(client: str) -> None:
    """Raise InvalidRequest for a name of a client that is too long."""
    if len(client) > MAX_CLIENT_CHARACTERS:
        raise InvalidRequest(
            f"client has {len(client)} characters, the limit is {MAX_CLIENT_CHARACTERS}", field="client"
        )


def _operator(identity: Identity | None) -> str:
    """An operator, who has no tenant unless it names one; empty for others."""
    if identity is None or identity.role is not Role.OPERATOR:
        return ""
    return f"{identity.role.value}/{identity.name}"


class SecretCheck:
    """Checks the secrets of requests; wrong ones are counted and logged."""

    def __init__(self, engine: Engine, refused: RefusedPeers) -> None:
        self._engine = engine
        self._refused = refused

    def check(self, call: str, name: RequestId, secret: str, *, tenant: str, host: str) -> RequestId:
        """Return the id of the tenant's request of this name.

        Raises RequestNotFound, also for requests of other tenants, and AttachSecretMismatch.
        """
        try:
            return self._engine.check_secret(name, secret, tenant=tenant)
        except AttachSecretMismatch:
            self._refused.note(call, "wrong attach secret", host=host)
            raise


def metadata_value(context: grpc.aio.ServicerContext[Any, Any], key: str) -> str:
    """Value of a metadata key, empty if absent."""
    untyped: Any = context
    metadata = untyped.invocation_metadata() or ()
    return next((value for name, value in metadata if name == key and isinstance(value, str)), "")


def _span_of(metadata: Any) -> SpanContext | None:
    headers = {key: str(value) for key, value in metadata or () if key in ("traceparent", "tracestate")}
    if "traceparent" not in headers:
        return None
    return parse_traceparent(headers["traceparent"], headers.get("tracestate", ""))


TOKEN_HOLDER = "operator token"
"""Who acts with the operator token, in audit records."""


class Operators:
    """Checks operator tokens; wrong ones are counted and logged."""

    def __init__(self, token: str | None, refused: RefusedPeers) -> None:
        """Without a token, every caller is rejected."""
        self._token = token
        self._refused = refused

    def includes(self, context: grpc.aio.ServicerContext[Any, Any]) -> bool:
        """Whether the caller's certificate is an operator's."""
        caller = peer_identity(context)
        return caller is not None and caller.role is Role.OPERATOR

    def check(self, context: grpc.aio.ServicerContext[Any, Any]) -> AuditCaller:
        """Return the operator. Raises TokenMissing or TokenMismatch for a caller that is none.

        A certificate of the role operator needs no token.
        """
        if self.includes(context):
            return caller_of(context)
        scheme, _, given = metadata_value(context, AUTHORIZATION_KEY).partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise TokenMissing("this call needs the operator token: pass --token-file")
        if self._token is None:
            raise TokenMismatch("this coordinator has no operator token: start it with --token-file")
        if not hmac.compare_digest(given.strip().encode(), self._token.encode()):
            self._refused.note("an operator call", "wrong operator token", host=peer_host(context))
            raise TokenMismatch("the operator token is wrong")
        return {"who": peer_identity(context) or TOKEN_HOLDER, "host": peer_host(context)}

    def check_drain(self, worker: str, context: grpc.aio.ServicerContext[Any, Any]) -> AuditCaller:
        """Return who may drain a worker: operators, and itself. Raises AccessDenied, and as `check`."""
        caller = peer_identity(context)
        if caller is None or caller.role is not Role.WORKER:
            return self.check(context)
        if caller.name != worker:
            problem = f"{caller} may not drain {worker!r}"
            self._refused.note("an operator call", problem, host=peer_host(context), who=caller)
            raise AccessDenied(problem)
        return caller_of(context)
