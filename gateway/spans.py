"""Spans of HTTP requests: one per request that generates, above the coordinator's spans."""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace import SpanContext

from telemetry.span_recorder import Attributes, SpanRecorder, is_sampled, new_span_id, new_trace_id
from telemetry.spans import Attr, SpanName
from wire.ids import RequestId, id_text
from wire.trace_context import format_traceparent, parse_traceparent, span_context

_KEY = "stageline.span"
_CANCELLED = 499
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _Failure:
    status: int
    code: str
    text: str


class OutputTimes:
    """Seconds of a request's output on the text thread, and the time of the first one."""

    __slots__ = ("_since_s", "first_s", "wait_s", "work_s")

    def __init__(self) -> None:
        self.wait_s = self.work_s = 0.0
        self.first_s: float | None = None
        self._since_s: float | None = None

    def wait(self) -> None:
        """Output waits for the thread."""
        if self._since_s is None:
            self._since_s = time.monotonic()

    def timed(self, work: Callable[[], _Result]) -> Callable[[], _Result]:
        """Return `work` on what waited, which adds its times when the thread runs it."""
        self.wait()
        since_s, self._since_s = self._since_s, None
        assert since_s is not None

        def run() -> _Result:
            begun_s = time.monotonic()
            self.wait_s += begun_s - since_s
            try:
                return work()
            finally:
                self.work_s += time.monotonic() - begun_s

        return run

    def output(self) -> None:
        """A stream has output to send."""
        if self.first_s is None:
            self.first_s = time.monotonic()


class RequestSpan:
    """The span of one HTTP request, recorded at its end.

    An unsampled request is recorded if it fails after its submission, as at the coordinator, or by the fault
    of the server. Nothing in it is of the prompt or of the output.

    Attributes:
        output: Times of the output; None for an unsampled request.
    """

    def __init__(
        self, recorder: SpanRecorder, name: SpanName, parent: SpanContext | None, sampler: Sampler
    ) -> None:
        trace_id = new_trace_id() if parent is None else parent.trace_id
        self._recorder, self._name, self._parent = recorder, name, parent
        self._is_sampled = is_sampled(sampler, trace_id, parent, name)
        self._trace_id, self._span_id = trace_id, new_span_id()
        self._attributes: Attributes = {}
        self._started_s = self._last_s = time.monotonic()
        self._responded_s: float | None = None
        self._failure: _Failure | None = None
        self._is_submitted = self._has_left = False
        self.output = OutputTimes() if self._is_sampled else None

    @property
    def traceparent(self) -> str:
        """W3C header of this span."""
        return format_traceparent(self._context(is_sampled=self._is_sampled))

    def opened(self, request_id: RequestId, model: str, *, is_stream: bool) -> None:
        """The body has been read and checked. `model` is one of the served names."""
        self._attributes |= {
            Attr.REQUEST_ID: id_text(request_id),
            Attr.REQUEST_MODEL: model,
            Attr.STREAM: is_stream,
        }
        self._passed(Attr.BODY_DURATION)

    def submitting(self) -> None:
        """The prompts are ready."""
        self._is_submitted = True
        self._passed(Attr.PROMPT_DURATION)

    def accepted(self) -> None:
        """The coordinator has accepted all prompts."""
        self._passed(Attr.ACCEPT_DURATION)

    def responded(self) -> None:
        """The response begins."""
        self._responded_s = time.monotonic()

    def failed(self, status: int, code: str | None, text: str) -> None:
        """The response is an error, or ends with one. `text` is recorded if the server is at fault."""
        self._failure = _Failure(status, code or str(status), text)

    def left(self) -> None:
        """The client has closed the connection."""
        self._has_left = True

    def end(self, status: int) -> None:
        """The response has ended."""
        if self._is_sampled or (
            self._failure is not None and (self._is_submitted or self._failure.status >= 500)
        ):
            self._record(status)

    def _context(self, *, is_sampled: bool) -> SpanContext:
        state = None if self._parent is None else self._parent.trace_state
        return span_context(self._trace_id, self._span_id, is_sampled=is_sampled, tracestate=state)

    def _passed(self, duration: Attr) -> None:
        now_s = time.monotonic()
        self._attributes[duration], self._last_s = now_s - self._last_s, now_s

    def _record(self, status: int) -> None:
        method, route = self._name.split(" ")
        clock, failure = self._recorder.clock, self._failure
        attributes: Attributes = {
            Attr.HTTP_METHOD: method,
            Attr.HTTP_ROUTE: route,
            Attr.HTTP_STATUS: status,
            Attr.URL_PATH: route,
            Attr.URL_SCHEME: "http",
            Attr.OUTCOME: self._outcome(),
            **self._attributes,
            **self._output_attributes(status),
            Attr.CLOCK_OFFSET: clock.offset_us / 1e6,
            Attr.CLOCK_UNCERTAINTY: (clock.uncertainty_us or 0) / 1e6,
        }
        if failure is not None:
            attributes[Attr.ERROR_TYPE] = failure.code
        self._recorder.record(
            self._name,
            self._context(is_sampled=True),  # exporters drop others
            self._parent,
            start_s=self._started_s,
            end_s=time.monotonic(),
            attributes=attributes,
            error=failure.text if failure is not None and failure.status >= 500 else None,
            is_server=True,
        )

    def _outcome(self) -> str:
        if self._failure is None:
            return "cancelled" if self._has_left else "finished"
        return "cancelled" if self._failure.status == _CANCELLED else "failed"

    def _output_attributes(self, status: int) -> Attributes:
        if (output := self.output) is None or status >= 400:
            return {}
        found: Attributes = {Attr.TEXT_WAIT_DURATION: output.wait_s, Attr.TEXT_DURATION: output.work_s}
        first_s = output.first_s if self._attributes.get(Attr.STREAM) else self._responded_s
        if first_s is not None:
            found[Attr.TIME_TO_OUTPUT] = first_s - self._started_s
        return found


class GatewaySpans:
    """Begins the spans of a gateway's requests."""

    def __init__(self, recorder: SpanRecorder, sampler: Callable[[], Sampler]) -> None:
        """`sampler` returns the coordinator's, so that both decide alike."""
        self._recorder, self._sampler = recorder, sampler

    def begin(self, name: SpanName, scope: MutableMapping[str, Any]) -> None:
        """Begin the span of a request, below the span of its W3C headers."""
        headers = {key: value for key, value in scope["headers"] if key in (b"traceparent", b"tracestate")}
        parent = None
        if (traceparent := headers.get(b"traceparent")) is not None:
            tracestate = headers.get(b"tracestate", b"")
            parent = parse_traceparent(traceparent.decode("latin-1"), tracestate.decode("latin-1"))
        scope[_KEY] = RequestSpan(self._recorder, name, parent, self._sampler())


def span_of(scope: MutableMapping[str, Any]) -> RequestSpan | None:
    """The span of a request; None for one that does not generate, and without telemetry."""
    return scope.get(_KEY)
