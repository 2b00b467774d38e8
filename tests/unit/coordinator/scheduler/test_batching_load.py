"""The batching policy on simulated pipelines: gaps between tokens, bursts, order, starvation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.batching.loads import CPU, Served, burst, limits_of, poisson
from bench.batching.simulated_pipeline import Arrival, ServedRequest, SimulatedPipeline, Stages, StepTimes
from coordinator.scheduler.sequence import Priority
from tests.properties import examples

TARGET_S = 0.1
LONG_STEPS = StepTimes(base_ms=6.5, decode_ms=0.9, token_ms=0.4, million_pairs_ms=0.2)
"""One depth of the pipeline is clearly the best. Where two are within 1 %, plans may move between them, and
the steps of one lap differ meanwhile.
"""


def pipeline_of(num_stages: int, times: StepTimes = CPU, **changes: float) -> SimulatedPipeline:
    """A pipeline without noise whose cost model has seen bursts."""
    stages = Stages(times=times, slowness=(1.0,) * num_stages, **changes)
    pipeline = SimulatedPipeline(stages, limits_of(num_stages))
    for num_requests in (1, 2, 4, 8, 32):
        pipeline.serve(burst(num_requests))
    return pipeline


def longest_gap_s(requests: list[ServedRequest]) -> float:
    return max(gap for request in requests for gap in request.gaps_s)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_arrivals_leave_gaps_between_tokens_within_the_target(num_stages: int) -> None:
    requests = pipeline_of(num_stages).serve(poisson(60, 2.0, seed=1))
    assert longest_gap_s(requests) <= TARGET_S


@pytest.mark.matrix(1)
@pytest.mark.parametrize("num_requests", [8, 16, 32])
def test_a_burst_takes_about_as_long_as_its_prefill_and_its_decodes(num_requests: int) -> None:
    pipeline = pipeline_of(2)
    alone = Served(pipeline.serve(burst(num_requests, max_tokens=1)))
    decoding = pipeline.serve(burst(num_requests, max_tokens=256))
    lap_s = sum(sum(request.gaps_s[64:192]) for request in decoding) / (128 * num_requests)
    served = Served(pipeline.serve(burst(num_requests)))
    assert served.duration_s <= (alone.last_first_token_s + 63 * lap_s) / 0.95
    assert served.last_first_token_s <= 1.35 * alone.last_first_token_s


@pytest.mark.matrix(2)
@pytest.mark.parametrize("num_stages", [1, 2, 4, 8, 16])
def test_after_a_burst_decodes_fill_the_pipeline_evenly(num_stages: int) -> None:
    pipeline, num_requests = pipeline_of(num_stages, LONG_STEPS), 32
    first = len(pipeline.steps)
    pipeline.serve(burst(num_requests))
    full = [step.num_decodes for step in pipeline.steps[first:] if not step.cost.chunk_tokens]
    settled = full[len(full) // 3 : len(full) // 2]
    assert max(settled) - min(settled) <= 1
    assert num_requests // (num_stages + 1) <= min(settled) <= -(-num_requests // num_stages)


@pytest.mark.full
@settings(max_examples=examples(0.2), deadline=None)
@given(
    num_stages=st.integers(1, 6),
    base_ms=st.floats(0.5, 30),
    decode_ms=st.floats(0, 1),
    token_ms=st.floats(0.01, 1),
    rate_per_s=st.floats(1, 30),
    seed=st.integers(0, 1000),
)
def test_no_decode_starves_under_any_load(
    num_stages: int, base_ms: float, decode_ms: float, token_ms: float, rate_per_s: float, seed: int
) -> None:
    """Half of the prompts are long, and arrive faster than they are computed."""
    times = StepTimes(base_ms=base_ms, decode_ms=decode_ms, token_ms=token_ms)
    arrivals = poisson(24, rate_per_s, long_share=0.5, seed=seed)
    requests = pipeline_of(num_stages, times).serve(arrivals)
    contexts = [1 + (arrival.num_prompt_tokens + arrival.max_tokens) / 1024 for arrival in arrivals]
    quiet_lap_s = (decode_ms * sum(contexts) + (num_stages + 1) * (base_ms + 1)) / 1e3
    # A decode may wait for one more lap while decodes spread out, and for one block of a prompt a step.
    blocks_s = 2 * num_stages * 16 * token_ms / 1e3
    assert longest_gap_s(requests) <= 2 * max(TARGET_S, 3 * quiet_lap_s) + blocks_s


def test_prompts_start_by_priority_and_arrival() -> None:
    priorities = [Priority.NORMAL, Priority.LOW, Priority.HIGH, Priority.NORMAL, Priority.HIGH, Priority.LOW]
    arrivals = [Arrival(0.0, 512, 8), *(Arrival(0.001, 512, 8, priority) for priority in priorities)]
    requests = pipeline_of(2).serve(arrivals)[1:]
    expected = sorted(range(6), key=lambda number: (-priorities[number], number))
    assert sorted(range(6), key=lambda number: requests[number].tokens_s[0]) == expected


def test_equal_loads_get_equal_steps() -> None:
    def steps() -> list[tuple[float, int, int]]:
        pipeline = pipeline_of(4)
        pipeline.serve(poisson(40, 4.0, long_share=0.1, seed=2))
        return [(step.sent_s, step.num_decodes, step.cost.chunk_tokens) for step in pipeline.steps]

    assert steps() == steps()
