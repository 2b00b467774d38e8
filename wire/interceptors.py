"""gRPC server interceptor that maps exceptions to statuses with reason codes."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.any_pb2 import Any as AnyPb2Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio
from grpc_status import rpc_status

from wire.condition import Condition
from wire.errors import (
    InvalidRequest,
    MethodNotFound,
    Overloaded,
    ServiceNotFound,
    ServingError,
    reason_of,
    status_of,
)
from wire.ids import parse_request_id
from wire.log_context import log_context
from wire.peer_limits import PeerLimits

log = logging.getLogger(__name__)


DOMAIN = "stageline"


def details_of(error: BaseException) -> tuple[tuple[str, bytes], ...]:
    """Return trailing metadata for `error`: ErrorInfo with the reason, RetryInfo with the retry delay,
    BadRequest with the field.

    Only Stageline's own errors have details; a broken connection has none, so clients can tell them apart.
    """
    code, text = status_of(error)
    number: int = code.value[0]
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=sent_reason(error), domain=DOMAIN)]
    if isinstance(error, Overloaded) and error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if isinstance(error, InvalidRequest) and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=text)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    status = status_pb2.Status(code=number, message=text, details=[_packed(detail) for detail in details])
    metadata: tuple[tuple[str, bytes], ...] = rpc_status.to_status(status).trailing_metadata
    return metadata


def sent_reason(error: BaseException) -> str:
    """Return the reason code for the client: INTERNAL_ERROR for everything but a ServingError."""
    return reason_of(error) if isinstance(error, ServingError) else "INTERNAL_ERROR"


def _packed(message: Message) -> AnyPb2Any:
    packed = AnyPb2Any()
    packed.Pack(message)
    return packed


class _HealthContext:
    """Stands in for the call context in grpc's health servicer: `abort` raises ServiceNotFound."""

    def __init__(self, service: str) -> None:
        self._service = service

    async def abort(self, code: grpc.StatusCode) -> NoReturn:
        raise ServiceNotFound(f"service {self._service[:100]!r} not found")


READINESS = "readiness"
"""Service of health checks that is SERVING while the process is ready; it can be checked, not watched."""
CONDITION_KEY = "stageline-condition"
"""Trailing metadata key of a health check: the state of the process in a few words."""


class HealthServicer(health_aio.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """Raises ServiceNotFound, with details, where grpc's servicer aborts without; knows `READINESS`."""

    def __init__(self, condition: Callable[[], Condition]) -> None:
        super().__init__()
        self._condition = condition

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        condition = self._condition()
        context.set_trailing_metadata(((CONDITION_KEY, condition.text),))
        if request.service == READINESS:
            return _readiness(condition)
        return await super().Check(request, _HealthContext(request.service))

    async def List(  # noqa: N802
        self, request: health_pb2.HealthListRequest, context: object
    ) -> health_pb2.HealthListResponse:
        """All services that Check knows; grpc's servicer does not implement it."""
        known = self._server_status.items()
        found = {name: health_pb2.HealthCheckResponse(status=status) for name, status in known}
        found[READINESS] = _readiness(self._condition())
        return health_pb2.HealthListResponse(statuses=found)


def _readiness(condition: Condition) -> health_pb2.HealthCheckResponse:
    status = health_pb2.HealthCheckResponse
    return status(status=status.SERVING if condition.is_ready else status.NOT_SERVING)


Context = grpc.aio.ServicerContext[Any, Any]

UNDECODABLE = "request cannot be decoded as the message of this method"
_SHOWN_METHOD = 100
"""Maximum characters of a method name repeated in an error."""


OnRefusal: TypeAlias = Callable[[str, ServingError], None]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps ServingError to status codes; other exceptions are logged and sent as INTERNAL.

    The text of such an INTERNAL is fixed, where grpc.aio alone would send the text of the exception.
    Calls beyond `limits` are refused before the servicer sees them, and before their message is read: a
    method with a single request is served as one with a stream of requests, which has to have one.
    """

    def __init__(self, limits: PeerLimits | None = None, on_refusal: OnRefusal | None = None) -> None:
        self._limits = limits or PeerLimits()
        self._on_refusal = on_refusal

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        name = str(handler_call_details.method)
        if handler is None:
            return grpc.stream_stream_rpc_method_handler(self._guard_unary(_reject_method(name), name))
        if handler.stream_unary is not None:
            return handler._replace(stream_unary=self._guard_unary(handler.stream_unary, name))
        if handler.stream_stream is not None:
            return handler._replace(stream_stream=self._guard_responses(handler.stream_stream, name))
        opened = handler._replace(
            request_streaming=True,
            request_deserializer=_rejecting_deserializer(handler.request_deserializer),
            unary_unary=None,
            unary_stream=None,
        )
        if handler.unary_unary is not None:
            return opened._replace(stream_unary=self._guard_unary(handler.unary_unary, name, is_single=True))
        guarded = self._guard_responses(handler.unary_stream, name, is_single=True)
        return opened._replace(stream_stream=guarded)

    async def _enter(self, requests: Any, context: Context, name: str, *, is_single: bool) -> Any:
        """Count the call, and read its request if that is a single message; return what the servicer gets."""
        try:
            self._limits.enter(context, name, is_stream=not is_single)
            return await self._limits.read_message(context, _raise_rejection) if is_single else requests
        except ServingError as error:
            if self._on_refusal is not None:
                self._on_refusal(name, error)
            raise

    def _guard_unary(
        self, behaviour: Callable[[Any, Context], Awaitable[Any]], name: str, *, is_single: bool = False
    ) -> Callable[..., Any]:
        async def guarded(requests: Any, context: Context) -> Any:
            request = None
            try:
                request = await self._enter(requests, context, name, is_single=is_single)
                return await behaviour(request, context)
            except Exception as error:
                await abort_call(context, error, name, request)

        return guarded

    def _guard_responses(
        self, behaviour: Callable[[Any, Context], Any], name: str, *, is_single: bool = False
    ) -> Callable[..., Any]:
        """Wrap a servicer that yields responses or, like grpc's health service, writes them itself."""
        guard: Any = self._guard_stream if inspect.isasyncgenfunction(behaviour) else self._guard_unary
        guarded: Callable[..., Any] = guard(behaviour, name, is_single=is_single)
        return guarded

    def _guard_stream(
        self, behaviour: Callable[[Any, Context], AsyncIterator[Any]], name: str, *, is_single: bool
    ) -> Callable[..., Any]:
        async def guarded(requests: Any, context: Context) -> AsyncIterator[Any]:
            request = None
            try:
                request = await self._enter(requests, context, name, is_single=is_single)
                async for response in behaviour(request, context):
                    yield response
            except Exception as error:
                await abort_call(context, error, name, request)

        return guarded


class _RejectedRequest:
    """Result of a deserializer that rejected a request; the handler raises `error`.

    Raising in the deserializer would send the parser's text to the client.
    """

    def __init__(self, error: ServingError) -> None:
        self.error = error


def _raise_rejection(request: Any) -> None:
    if isinstance(request, _RejectedRequest):
        raise request.error


def _rejecting_deserializer(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        try:
            return data if deserialize is None else deserialize(data)
        except DecodeError:
            return _RejectedRequest(InvalidRequest(UNDECODABLE))
        except ServingError as error:
            return _RejectedRequest(error)

    return parse


def _reject_method(name: str) -> Callable[..., Any]:
    async def refuse(requests: Any, context: Context) -> None:
        raise MethodNotFound(f"method {name[:_SHOWN_METHOD]!r} not found")

    return refuse


async def abort_call(context: Context, error: Exception, name: str, request: Any = None) -> None:
    """End a call of method `name` with the status of `error`, by raising."""
    # gRPC handles its own errors: an explicit abort, a disconnected client, a stopping server.
    if isinstance(error, grpc.aio.BaseError) and not isinstance(error, grpc.aio.UsageError):
        raise error
    if isinstance(error, DecodeError):  # in a stream; `_rejecting_deserializer` handles single messages
        error = InvalidRequest(UNDECODABLE)
    code, text = status_of(error)
    if not isinstance(error, ServingError):
        log.exception("unexpected error in %s", name, exc_info=error, extra=_request_fields(error, request))
    else:
        log.debug("%s ends as %s: %s", name, code.name, text, extra=_request_fields(error, request))
    await context.abort(code, text, trailing_metadata=details_of(error))


def _request_fields(error: Exception, request: Any) -> dict[str, object]:
    """Log fields of the request that the error, or else the call's message, names."""
    if isinstance(error, ServingError) and error.request_id is not None:
        return log_context(request_id=error.request_id)
    try:
        return log_context(request_id=parse_request_id(request.request_id))
    except (AttributeError, TypeError, ValueError):
        return {}
