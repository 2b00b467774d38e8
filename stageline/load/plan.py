"""What is sent when, all of it known before the first request: a function of the specification alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from stageline.load.arrivals import MAX_REQUESTS, Arrivals
from stageline.load.lengths import Lengths


class Purpose(IntEnum):
    """Each purpose has random numbers of its own, so that changing one part of a load leaves the others."""

    ARRIVALS = 0
    PROMPT_LENGTHS = 1
    OUTPUT_LENGTHS = 2
    PREFIX_GROUPS = 3
    PROMPTS = 4
    PREFIXES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSpec:
    """A load. It has `num_requests`, or as many as arrive within `duration_s`; one of the two is None.

    The lengths of prompts do not count the `shared_prefix_tokens` that every prompt begins with; requests of
    the same of `num_prefix_groups` groups begin with the same ones. Raises ValueError.
    """

    arrivals: Arrivals
    num_requests: int | None
    duration_s: float | None
    prompt_lengths: Lengths
    output_lengths: Lengths
    shared_prefix_tokens: int = 0
    num_prefix_groups: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.num_requests is None) == (self.duration_s is None):
            raise ValueError("a load has a number of requests or a duration, and not both")
        if self.num_requests is not None and not 1 <= self.num_requests <= MAX_REQUESTS:
            raise ValueError(f"{self.num_requests} requests are not in [1, {MAX_REQUESTS}]")
        if self.duration_s is not None and not 0 < self.duration_s < math.inf:
            raise ValueError(f"a duration of {self.duration_s:g} s is not above 0 and finite")
        if self.shared_prefix_tokens < 0 or self.num_prefix_groups < 1:
            raise ValueError(
                f"{self.num_prefix_groups} groups of {self.shared_prefix_tokens} shared tokens are no groups"
            )
        if self.num_prefix_groups > 1 and not self.shared_prefix_tokens:
            raise ValueError(
                f"{self.num_prefix_groups} prefix groups need a shared prefix, which has 0 tokens"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRequest:
    """One request. `time_s` counts from the first arrival; `prompt_tokens` has the shared prefix in it."""

    index: int
    time_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_group: int

    @property
    def num_tokens(self) -> int:
        """The length of the whole sequence."""
        return self.prompt_tokens + self.output_tokens


def make_plan(spec: LoadSpec) -> tuple[PlannedRequest, ...]:
    """The requests in the order of their arrival, the same for equal specifications. Raises ValueError."""
    times_s = _times_s(spec)
    num_requests = len(times_s)
    prompts = spec.prompt_lengths.draw(num_requests, rng_for(spec.seed, Purpose.PROMPT_LENGTHS))
    outputs = spec.output_lengths.draw(num_requests, rng_for(spec.seed, Purpose.OUTPUT_LENGTHS))
    groups = rng_for(spec.seed, Purpose.PREFIX_GROUPS).integers(0, spec.num_prefix_groups, num_requests)
    return tuple(
        PlannedRequest(
            index=index,
            time_s=time_s,
            prompt_tokens=spec.shared_prefix_tokens + prompt,
            output_tokens=output,
            prefix_group=group,
        )
        for index, (time_s, prompt, output, group) in enumerate(
            zip(times_s.tolist(), prompts.tolist(), outputs.tolist(), groups.tolist(), strict=True)
        )
    )


def check_fits(plan: Sequence[PlannedRequest], max_sequence_tokens: int) -> None:
    """Raises ValueError, with the numbers, when a request of the plan is longer than a sequence may be."""
    num_too_long = sum(request.num_tokens > max_sequence_tokens for request in plan)
    if num_too_long:
        longest = max(plan, key=lambda request: request.num_tokens)
        raise ValueError(
            f"request {longest.index} has {longest.prompt_tokens} prompt tokens and {longest.output_tokens} "
            f"output tokens, together {longest.num_tokens}, more than the {max_sequence_tokens} that fit; "
            f"{num_too_long} of {len(plan)} requests do not fit"
        )


def rng_for(seed: int, purpose: Purpose, *which: int) -> np.random.Generator:
    """Random numbers that depend on the arguments only."""
    return np.random.default_rng((seed, purpose, *which))


def _times_s(spec: LoadSpec) -> npt.NDArray[np.float64]:
    rng = rng_for(spec.seed, Purpose.ARRIVALS)
    if spec.num_requests is not None:
        return spec.arrivals.first(spec.num_requests, rng)
    assert spec.duration_s is not None, "checked when the specification was made"
    return spec.arrivals.within(spec.duration_s, rng)
