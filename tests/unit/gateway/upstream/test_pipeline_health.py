"""Whether a coordinator's pipeline serves, from its answers and the time."""

from __future__ import annotations

from gateway.upstream.link import PipelineHealth


def test_it_is_not_ready_before_it_has_served() -> None:
    health = PipelineHealth(30.0)
    assert health.problem(0.0) == "no answer of its health check yet"
    health.note("waiting for workers", 1.0, is_serving=False)
    assert health.problem(1.0) == "waiting for workers"
    health.note("serving", 2.0, is_serving=True)
    assert health.problem(2.0) == health.problem(1000.0) == ""


def test_it_stays_ready_while_requests_wait_for_a_pipeline() -> None:
    health = PipelineHealth(30.0)
    health.note("serving", 100.0, is_serving=True)
    health.note("workers are loading", 101.0, is_serving=False)
    assert health.problem(130.9) == ""
    health.note("starting an epoch", 120.0, is_serving=False)
    assert health.problem(131.0) == "starting an epoch"
    health.note("serving", 140.0, is_serving=True)
    assert health.problem(140.0) == ""
