"""Whether a coordinator serves, from its answers and the time."""

from __future__ import annotations

from gateway.upstream.readiness import Readiness


def test_it_is_not_ready_before_it_has_served() -> None:
    readiness = Readiness(30.0)
    assert readiness.problem(0.0) == "no answer of its health check yet"
    readiness.note("waiting for workers", 1.0, is_serving=False)
    assert readiness.problem(1.0) == "waiting for workers"
    readiness.note("serving", 2.0, is_serving=True)
    assert readiness.problem(2.0) == readiness.problem(1000.0) == ""


def test_it_stays_ready_while_requests_wait_for_a_pipeline() -> None:
    readiness = Readiness(30.0)
    readiness.note("serving", 100.0, is_serving=True)
    readiness.note("workers are loading", 101.0, is_serving=False)
    assert readiness.problem(130.9) == ""
    readiness.note("starting an epoch", 120.0, is_serving=False)
    assert readiness.problem(131.0) == "starting an epoch"
    readiness.note("serving", 140.0, is_serving=True)
    assert readiness.problem(140.0) == ""
