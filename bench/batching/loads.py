"""Loads and pipelines of the study, and what is measured of a load."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.batching.policies import Compared
from bench.batching.simulated_pipeline import Arrival, ServedRequest, SimulatedPipeline, Stages, StepTimes
from bench.harness.spread import percentile
from coordinator.scheduler.policy import DEFAULT_ITL_TARGET_S, SchedulerLimits

PROMPT_TOKENS, NEW_TOKENS = 128, 64
LONG_PROMPT_TOKENS, LONG_SHARE = 4096, 0.05
CAPACITY_AT_ONCE = 32
MAX_TTFT_OF_LONE = 4.0
BETWEEN_BURST_S = 0.001
"""Requests of a burst arrive one after the other, as parsed."""

CPU = StepTimes(base_ms=2.8, decode_ms=0.14, token_ms=0.18, million_pairs_ms=60)
"""An 88M Llama on two workers with one CPU thread each, of 463 GFLOPS of bfloat16."""
GPU = StepTimes(base_ms=10.0, decode_ms=0.03, token_ms=0.03, million_pairs_ms=0.003)
"""A stage that reads 30 GB of weights at 3 TB/s."""
NOISE = 0.05


def pipeline_of(times: StepTimes, slowness: Sequence[float], *, noise: float = NOISE) -> Stages:
    return Stages(times=times, slowness=tuple(slowness), noise=noise)


def limits_of(num_stages: int) -> SchedulerLimits:
    """The limits of a coordinator with default flags."""
    return SchedulerLimits(
        max_step_tokens=512,
        max_step_sequences=64,
        max_steps_in_flight=4 * num_stages + 4,
        min_steps_in_flight=num_stages,
    )


@dataclass(frozen=True, slots=True)
class Served:
    """A served load: what users saw."""

    requests: list[ServedRequest]

    @property
    def duration_s(self) -> float:
        return max(request.tokens_s[-1] for request in self.requests) - self.requests[0].at_s

    @property
    def last_first_token_s(self) -> float:
        return max(request.tokens_s[0] for request in self.requests) - self.requests[0].at_s

    def ttft_s(self, quantile: float) -> float:
        return percentile([request.first_token_s for request in self.requests], quantile)

    def itl_s(self, quantile: float) -> float:
        return percentile([gap for request in self.requests for gap in request.gaps_s], quantile)

    def goodput(self, lone_ttft_s: float) -> float:
        """Share of requests with a first token in time, and a p99 of their gaps within the target."""
        good = [
            request.first_token_s <= MAX_TTFT_OF_LONE * lone_ttft_s
            and percentile(request.gaps_s, 0.99) <= DEFAULT_ITL_TARGET_S
            for request in self.requests
        ]
        return sum(good) / len(good)


class Study:
    """A policy on a pipeline, warmed up before each load."""

    def __init__(self, stages: Stages, policy: Compared) -> None:
        self._stages, self._policy = stages, policy

    def warm_pipeline(self, seed: int = 0) -> SimulatedPipeline:
        """A pipeline whose cost model has seen requests alone and at once."""
        limits = self._policy.limits(limits_of(len(self._stages.slowness)))
        pipeline = SimulatedPipeline(
            self._stages, limits, new_scheduler=self._policy.new_scheduler, seed=seed
        )
        for num_requests in (1, 2, 4, 8, 32):
            pipeline.serve(burst(num_requests))
        return pipeline

    def serve(self, arrivals: Sequence[Arrival], seed: int = 0) -> Served:
        return Served(self.warm_pipeline(seed).serve(arrivals))

    def lone_ttft_s(self, num_prompt_tokens: int = PROMPT_TOKENS) -> float:
        return self.serve([Arrival(0.0, num_prompt_tokens, NEW_TOKENS)]).last_first_token_s

    def prefill_s(self, num_requests: int) -> float:
        """Time of a burst's prefill alone."""
        return self.serve(burst(num_requests, max_tokens=1)).last_first_token_s

    def decode_lap_s(self, num_requests: int) -> float:
        """Mean time between two tokens while all requests decode."""
        served = self.serve(burst(num_requests, max_tokens=4 * NEW_TOKENS))
        settled = [request.gaps_s[NEW_TOKENS:-NEW_TOKENS] for request in served.requests]
        return statistics.fmean(gap for gaps in settled for gap in gaps)

    def capacity_per_s(self, arrivals: Sequence[Arrival]) -> float:
        """Requests per second of a closed loop of 32."""
        pipeline = self.warm_pipeline()
        served = Served(pipeline.serve_in_turn(arrivals, at_once=CAPACITY_AT_ONCE))
        return len(arrivals) / served.duration_s


def burst(num_requests: int, *, max_tokens: int = NEW_TOKENS) -> list[Arrival]:
    return [Arrival(number * BETWEEN_BURST_S, PROMPT_TOKENS, max_tokens) for number in range(num_requests)]


def poisson(num_requests: int, rate_per_s: float, *, long_share: float = 0.0, seed: int = 0) -> list[Arrival]:
    """Arrivals at random times; a share of them has long prompts."""
    draw, at_s, arrivals = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        at_s += draw.expovariate(rate_per_s)
        is_long = draw.random() < long_share
        arrivals.append(Arrival(at_s, LONG_PROMPT_TOKENS if is_long else PROMPT_TOKENS, NEW_TOKENS))
    return arrivals
