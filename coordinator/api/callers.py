"""Who calls, and until when."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.trace import SpanContext

from wire.peer_host import peer_host
from wire.trace_context import parse_traceparent


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """`client` is whose limits hold; `deadline_s` is on the clock that it was read with, None for none.
    `span` is what the caller traces itself under, by W3C's headers.
    """

    client: str
    deadline_s: float | None
    span: SpanContext | None = None


class Callers:
    """Tells clients apart by the value of a metadata key, or by their address where there is none."""

    def __init__(self, client_key: str | None, clock: Callable[[], float]) -> None:
        self._client_key = client_key
        self._clock = clock

    def of(self, context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
        """The caller behind a call."""
        untyped: Any = context  # the stubs lack what a context can be asked
        remaining_s = untyped.time_remaining()
        has_deadline = remaining_s is not None and math.isfinite(remaining_s)
        return Caller(
            client=self._named(untyped.invocation_metadata()) or peer_host(context),
            deadline_s=self._clock() + remaining_s if has_deadline else None,
            span=_span_of(untyped.invocation_metadata()),
        )

    def _named(self, metadata: Any) -> str | None:
        if self._client_key is None:
            return None
        return next((str(value) for key, value in metadata or () if key == self._client_key), None)


def metadata_value(context: grpc.aio.ServicerContext[Any, Any], key: str) -> str:
    """What the caller sends under this key; empty where there is nothing."""
    untyped: Any = context
    metadata = untyped.invocation_metadata() or ()
    return next((value for name, value in metadata if name == key and isinstance(value, str)), "")


def _span_of(metadata: Any) -> SpanContext | None:
    headers = {key: str(value) for key, value in metadata or () if key in ("traceparent", "tracestate")}
    if "traceparent" not in headers:
        return None
    return parse_traceparent(headers["traceparent"], headers.get("tracestate", ""))
