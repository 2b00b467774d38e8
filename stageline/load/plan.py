"""The requests of a load: arrivals, lengths, prompts; a function of specification and seed.

Length distributions in tokens:

    128                      constant
    uniform:64-512           equally likely, both ends included
    normal:256,64            mean and standard deviation
    lognormal:256,128        mean and standard deviation of the lengths, not of their logarithm
    normal:256,64:16-1024    clipped to the range

Samples are rounded to whole tokens, at least one.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

MAX_REQUESTS = 1_000_000

_DRAWN_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """An endless arrival process of `rate_per_s` requests per second; an infinite rate means all at once.

    Gaps are gamma-distributed with shape `burstiness`: 1 is a Poisson process, lower values are burstier,
    higher ones steadier. The squared coefficient of variation of the gaps is 1 / burstiness. Raises
    ValueError.
    """

    rate_per_s: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if not self.rate_per_s > 0:
            raise ValueError(f"a request rate of {self.rate_per_s:g} per second is not above 0")
        if not 0 < self.burstiness < math.inf:
            raise ValueError(f"a burstiness of {self.burstiness:g} is not above 0 and finite")

    def first(self, num_requests: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """Seconds from the first arrival to each of `num_requests`, in order; shape (num_requests,)."""
        return np.concatenate(([0.0], np.cumsum(self._gaps_s(num_requests - 1, rng))))

    def within(self, duration_s: float, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """Arrival times before `duration_s` in seconds, in order. Raises ValueError above MAX_REQUESTS."""
        if math.isinf(self.rate_per_s):
            raise ValueError("an infinite rate needs a number of requests, not a duration")
        times_s = np.zeros(1)
        while times_s[-1] < duration_s:
            if len(times_s) > MAX_REQUESTS:
                raise ValueError(
                    f"{duration_s:g} s at {self.rate_per_s:g} requests per second are more than "
                    f"{MAX_REQUESTS} requests"
                )
            later_s = times_s[-1] + np.cumsum(self._gaps_s(_DRAWN_AT_ONCE, rng))
            times_s = np.concatenate((times_s, later_s))
        return times_s[times_s < duration_s]

    def _gaps_s(self, num_gaps: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        # Two rates with the same seed have the same pattern, scaled.
        return rng.standard_gamma(self.burstiness, num_gaps) / (self.burstiness * self.rate_per_s)


MAX_TOKENS = 2**24

_EXAMPLES = "128, uniform:64-512, normal:256,64 or lognormal:256,128:16-1024"
_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_RANGE = re.compile(r"([0-9]+)-([0-9]+)")
_MOMENTS = re.compile(rf"{_NUMBER},{_NUMBER}(?::([0-9]+-[0-9]+))?")


class Lengths(Protocol):
    def draw(self, num_draws: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Independent samples, each at least 1; shape (num_draws,)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UniformLengths:
    """Each integer in [lowest, highest] is equally likely. Raises ValueError."""

    lowest: int
    highest: int

    def __post_init__(self) -> None:
        if not 1 <= self.lowest <= self.highest <= MAX_TOKENS:
            raise ValueError(
                f"{self.lowest} to {self.highest} tokens is not a range of lengths in [1, {MAX_TOKENS}]"
            )

    def draw(self, num_draws: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        return rng.integers(self.lowest, self.highest, num_draws, endpoint=True)


class Shape(StrEnum):
    """Distribution family."""

    NORMAL = "normal"
    LOGNORMAL = "lognormal"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClippedLengths:
    """A distribution with mean and standard deviation before clipping. Raises ValueError."""

    shape: Shape
    mean: float
    deviation: float
    bounds: UniformLengths = UniformLengths(lowest=1, highest=MAX_TOKENS)

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= MAX_TOKENS:
            raise ValueError(f"a mean of {self.mean:g} tokens is not in [1, {MAX_TOKENS}]")

    def draw(self, num_draws: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        drawn = self._draw(num_draws, rng).clip(self.bounds.lowest, self.bounds.highest)
        tokens: npt.NDArray[np.int64] = np.rint(drawn).astype(np.int64)
        return tokens

    def _draw(self, num_draws: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        if self.shape is Shape.NORMAL:
            return rng.normal(self.mean, self.deviation, num_draws)
        # Moments of the logarithm, from the lengths' moments.
        variance = math.log1p((self.deviation / self.mean) ** 2)
        return rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), num_draws)


def parse_lengths(text: str) -> Lengths:
    """Parse a distribution (see the module). Raises ValueError."""
    kind, separator, arguments = text.partition(":")
    if not separator and re.fullmatch(r"[0-9]+", kind):
        return UniformLengths(lowest=int(kind), highest=int(kind))
    if kind == "uniform" and (found := _RANGE.fullmatch(arguments)):
        return _range(found)
    if kind in tuple(Shape) and (found := _MOMENTS.fullmatch(arguments)):
        mean, deviation, bounds = found.groups()
        distribution = ClippedLengths(shape=Shape(kind), mean=float(mean), deviation=float(deviation))
        return distribution if bounds is None else _clipped(distribution, bounds)
    raise ValueError(f"{text!r} is not a distribution of lengths; examples: {_EXAMPLES}")


def _range(found: re.Match[str]) -> UniformLengths:
    return UniformLengths(lowest=int(found[1]), highest=int(found[2]))


def _clipped(distribution: ClippedLengths, bounds: str) -> ClippedLengths:
    found = _RANGE.fullmatch(bounds)
    assert found is not None, "the pattern around it has matched it"
    return ClippedLengths(
        shape=distribution.shape,
        mean=distribution.mean,
        deviation=distribution.deviation,
        bounds=_range(found),
    )


class Purpose(IntEnum):
    """Purposes with random streams of their own, so that changing one leaves the others."""

    ARRIVALS = 0
    PROMPT_LENGTHS = 1
    OUTPUT_LENGTHS = 2
    PREFIX_GROUPS = 3
    PROMPTS = 4
    PREFIXES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSpec:
    """A load with either `num_requests` or `duration_s`; the other is None.

    Prompt lengths exclude the `shared_prefix_tokens` at the begin of every prompt; requests of the same of
    `num_prefix_groups` groups share their prefix. Raises ValueError.
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
            raise ValueError("a load needs either a number of requests or a duration")
        if self.num_requests is not None and not 1 <= self.num_requests <= MAX_REQUESTS:
            raise ValueError(f"number of requests {self.num_requests} is not in [1, {MAX_REQUESTS}]")
        if self.duration_s is not None and not 0 < self.duration_s < math.inf:
            raise ValueError(f"a duration of {self.duration_s:g} s is not above 0 and finite")
        if self.shared_prefix_tokens < 0 or self.num_prefix_groups < 1:
            raise ValueError(
                f"{self.num_prefix_groups} prefix groups of {self.shared_prefix_tokens} tokens: "
                "at least 1 group and 0 tokens are required"
            )
        if self.num_prefix_groups > 1 and not self.shared_prefix_tokens:
            raise ValueError(
                f"{self.num_prefix_groups} prefix groups need a shared prefix, which has 0 tokens"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRequest:
    """One request. `time_s` counts from the first arrival; `prompt_tokens` includes the shared prefix."""

    index: int
    time_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_group: int

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


def make_plan(spec: LoadSpec) -> tuple[PlannedRequest, ...]:
    """Create the requests in order of arrival, equal for equal specifications. Raises ValueError."""
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
    """Raises ValueError, with the numbers, for a request longer than `max_sequence_tokens`."""
    num_too_long = sum(request.num_tokens > max_sequence_tokens for request in plan)
    if num_too_long:
        longest = max(plan, key=lambda request: request.num_tokens)
        raise ValueError(
            f"request {longest.index} has {longest.prompt_tokens} prompt tokens and {longest.output_tokens} "
            f"output tokens, together {longest.num_tokens}, more than the {max_sequence_tokens} that fit; "
            f"{num_too_long} of {len(plan)} requests do not fit"
        )


def rng_for(seed: int, purpose: Purpose, *which: int) -> np.random.Generator:
    """Random generator that depends on the arguments only."""
    return np.random.default_rng((seed, purpose, *which))


def _times_s(spec: LoadSpec) -> npt.NDArray[np.float64]:
    rng = rng_for(spec.seed, Purpose.ARRIVALS)
    if spec.num_requests is not None:
        return spec.arrivals.first(spec.num_requests, rng)
    assert spec.duration_s is not None, "checked when the specification was made"
    return spec.arrivals.within(spec.duration_s, rng)


class Prompts:
    """Random token ids in [0, vocab_size), a function of the specification's seed and the request's index."""

    def __init__(self, spec: LoadSpec, vocab_size: int) -> None:
        self._spec = spec
        self._vocab_size = vocab_size
        self._prefix = cache(self._make_prefix)

    def token_ids(self, request: PlannedRequest) -> list[int]:
        """The shared prefix of the request's group, followed by the request's own tokens."""
        num_own = request.prompt_tokens - self._spec.shared_prefix_tokens
        own = self._draw(num_own, Purpose.PROMPTS, request.index)
        token_ids: list[int] = np.concatenate((self._prefix(request.prefix_group), own)).tolist()
        return token_ids

    def _make_prefix(self, group: int) -> npt.NDArray[np.int64]:
        return self._draw(self._spec.shared_prefix_tokens, Purpose.PREFIXES, group)

    def _draw(self, num_tokens: int, purpose: Purpose, which: int) -> npt.NDArray[np.int64]:
        return rng_for(self._spec.seed, purpose, which).integers(0, self._vocab_size, num_tokens)
