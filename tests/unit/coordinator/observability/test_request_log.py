"""Log level and fields of the end of a request."""

from __future__ import annotations

import logging

import pytest

from coordinator.observability.facts import RequestRecord
from coordinator.observability.request_log import RequestLog
from tests.unit.coordinator.engine.request_cases import RequestCase
from wire.errors import (
    ClusterUnavailable,
    DeadlinePassed,
    RequestCancelled,
    RequestPoisoned,
    RequestSuspended,
    ServingError,
    SliceFailed,
    StepFailed,
)
from wire.ids import id_text

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


class SomeTrace:
    """A trace with this id."""

    trace_id = TRACE_ID
    traceparent = caller_traceparent = ""


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (None, logging.DEBUG),
        (RequestCancelled("by its client"), logging.DEBUG),
        (DeadlinePassed("too late"), logging.DEBUG),
        (RequestSuspended("goes on elsewhere"), logging.DEBUG),
        (ClusterUnavailable("no pipeline"), logging.WARNING),
        (SliceFailed("not finite"), logging.WARNING),
        (StepFailed("three times"), logging.WARNING),
        (RequestPoisoned("two workers"), logging.ERROR),
    ],
)
def test_only_our_own_failures_are_logged_above_debug(
    caplog: pytest.LogCaptureFixture, error: ServingError | None, level: int
) -> None:
    caplog.set_level(logging.DEBUG, logger="coordinator")
    request = RequestCase().request()
    request.trace = SomeTrace()
    RequestLog().request_ended(RequestRecord(request, 0.0, 0.0, False, ended_s=0.0, error=error))
    (line,) = caplog.records
    assert line.levelno == level
    assert vars(line)["request_id"] == id_text(request.id)
    assert vars(line)["trace_id"] == TRACE_ID
    assert line.getMessage().startswith(f"request {id_text(request.id)} ")
    assert error is None or str(error) in line.getMessage()


def test_without_a_trace_the_line_has_no_trace_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="coordinator")
    RequestLog().request_accepted(RequestRecord(RequestCase().request(), 0.0, 0.0, False))
    assert "trace_id" not in vars(caplog.records[0])
