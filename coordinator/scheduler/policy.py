"""Pipeline depth and prefill chunk size. Pure."""

import math
from dataclasses import dataclass

from coordinator.scheduler.cost_model import CostModel, chunk_pairs

RATE_TOLERANCE = 0.95
"""Of two pipeline depths with rates closer than this, the larger is chosen: it tolerates slow transfers."""
CHUNK_TIME_TOLERANCE = 1.15
"""Time of a chunk relative to a full one at the start of a prompt, above which it is cut."""
STEP_SIZE_TOLERANCE = 0.3
"""Relative deviation from the step size allowed to end a step with a prompt, instead of splitting it."""
MAX_PREFILL_SHARE = 0.85
"""Maximum delay of a decode step by the chunks of one step, relative to the time between two tokens without
prefill. A `max_decode_slowdown` of 1.43 and more allows more.
"""
MIN_STEP_TOKENS = 64
"""Minimum tokens of a prefill step."""


DEFAULT_MAX_DECODE_SLOWDOWN = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Limits of steps and of the pipeline depth.

    Attributes:
        max_steps_in_flight: maximum pipeline depth, bound by memory.
        min_steps_in_flight: minimum depth, the number of stages; measured times decide between the two. None
            fixes the depth to the maximum.
        max_decode_slowdown: maximum mean slowdown of decode steps by prefill chunks, above 1.
    """

    max_step_tokens: int
    max_step_sequences: int
    max_steps_in_flight: int
    min_steps_in_flight: int | None = None
    max_decode_slowdown: float = DEFAULT_MAX_DECODE_SLOWDOWN

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_step_sequences", "max_steps_in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be in [1, inf)")
        if not 1 <= self.min_in_flight <= self.max_steps_in_flight:
            raise ValueError(
                f"min_steps_in_flight is {self.min_in_flight}, must be in [1, {self.max_steps_in_flight}]"
            )
        if self.max_decode_slowdown <= 1:
            raise ValueError(f"max_decode_slowdown is {self.max_decode_slowdown}, must be in (1, inf)")

    @property
    def min_in_flight(self) -> int:
        return self.max_steps_in_flight if self.min_steps_in_flight is None else self.min_steps_in_flight


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """Number and total cost of the decoding sequences, in flight or not."""

    num_sequences: int
    cost: int


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """Tokens of the current burst of prompts, and how many of them the step already has."""

    num_tokens: int
    step_tokens: int = 0


class BatchingPolicy:
    """Chooses pipeline depth and chunk sizes of one plan from measured times."""

    def __init__(self, limits: SchedulerLimits, cost_model: CostModel) -> None:
        self._limits = limits
        self._cost_model = cost_model
        self._credit_us = math.inf

    def steps_in_flight(self, load: DecodeLoad) -> int:
        """Number of steps to spread the work over."""
        return self._decode_steps(load) if load.num_sequences else self._prefill_steps()

    def chunk_tokens(self, load: DecodeLoad, prefill: PrefillLoad, *, start: int, end: int) -> int:
        """Maximum tokens of the next chunk of a step, for positions [start, end) of its prompt.

        Beside decodes, prefill accumulates the allowed slowdown as credit until it suffices for a chunk of
        useful size: many small chunks would cost more, and delay every token instead of some. Without
        decodes, the step size minimizes the time of the whole burst, and a chunk takes about as long as one
        at the start of a prompt, so that the chunks of a long prompt follow each other without gaps.
        """
        if load.num_sequences:
            return self._chunk_beside_decodes(load, start=start, end=end)
        return self._chunk_alone(prefill, start=start, end=end)

    def _chunk_beside_decodes(self, load: DecodeLoad, *, start: int, end: int) -> int:
        slowest, max_tokens = self._cost_model.slowest, self._limits.max_step_tokens
        if not slowest.knows_decodes or not slowest.knows_chunks:
            return max_tokens
        max_us = self._max_credit_us(load)
        available_us = min(self._credit_us, max_us)
        wanted_us = min(max_us, self.chunk_us(start=start, num_tokens=end - start))
        if available_us < RATE_TOLERANCE * wanted_us:
            return 0
        return int(min(max_tokens, max(1.0, slowest.chunk_tokens_within(available_us, start))))

    def _chunk_alone(self, prefill: PrefillLoad, *, start: int, end: int) -> int:
        slowest = self._cost_model.slowest
        size = self._prefill_step_tokens(prefill.num_tokens)
        left = max(0, size - prefill.step_tokens)
        if end - start <= left + STEP_SIZE_TOLERANCE * size:
            return end - start
        if prefill.step_tokens >= (1 - STEP_SIZE_TOLERANCE) * size:
            return 0
        full_us = slowest.chunk_us(size, size * size / 2)
        if slowest.chunk_us(left, chunk_pairs(start, left)) <= CHUNK_TIME_TOLERANCE * full_us:
            return left
        return max(1, int(min(left, slowest.chunk_tokens_within(full_us, start))))

    def record_step(self, load: DecodeLoad, *, prefill_us: float) -> None:
        """Update the prefill credit after a step was sent whose chunks take `prefill_us`."""
        if not load.num_sequences:
            self._credit_us = math.inf
            return
        cycle_us = self._cycle_us(load)
        steps = min(self._decode_steps(load), load.num_sequences)
        saved_us = min(self._credit_us, self._max_credit_us(load)) - prefill_us
        self._credit_us = saved_us + (self._limits.max_decode_slowdown - 1) * cycle_us / steps

    def chunk_us(self, *, start: int, num_tokens: int) -> float:
        """Predicted time that a chunk adds to a step on the slowest stage."""
        slowest = self._cost_model.slowest
        return slowest.chunk_us(num_tokens, chunk_pairs(start, num_tokens))

    def _decode_steps(self, load: DecodeLoad) -> int:
        """Pipeline depth with the highest decode rate.

        More steps keep more stages busy and overlap slow transfers. Once the slowest stage is always busy,
        more steps are only smaller, and each of them reads all weights.
        """
        limits = self._limits
        min_depth, max_depth = limits.min_in_flight, limits.max_steps_in_flight
        slowest = self._cost_model.slowest
        if min_depth == max_depth or not slowest.knows_decodes:
            return min_depth
        rates = dict[int, float]()
        for number in range(min_depth, max_depth + 1):
            size = min(max(1.0, load.num_sequences / number), limits.max_step_sequences)
            cost = load.cost / load.num_sequences * size
            cycle_us = self._cost_model.decode_cycle_us(number, cost)
            rates[number] = number * size / max(cycle_us, 1.0)
            if cycle_us > self._cost_model.decode_latency_us(cost) or number >= load.num_sequences:
                break
        best = max(rates.values())
        return max(number for number, rate in rates.items() if rate >= RATE_TOLERANCE * best)

    def _prefill_steps(self) -> int:
        """One step more than fills the pipeline; chunk sizes do not depend on the depth."""
        limits = self._limits
        size = limits.max_step_tokens
        slowest = self._cost_model.slowest
        slowest_us = slowest.chunk_us(size, size * size / 2)
        filling = (
            self._cost_model.chunk_latency_us(size) / slowest_us if slowest_us > 0 else limits.min_in_flight
        )
        number = max(limits.min_in_flight, math.floor(filling)) + 1
        return min(number, limits.max_steps_in_flight)

    def _prefill_step_tokens(self, num_tokens: int) -> int:
        """Tokens per step that minimize the time of `num_tokens` of prefill through the pipeline.

        R tokens in steps of x leave the last of S stages after (R / x + S - 1) * (base + x * rate), which is
        minimal for x = sqrt(R * base / (rate * (S - 1))): small steps fill and drain the pipeline faster,
        large steps pay their fixed cost less often.
        """
        max_tokens, slowest = self._limits.max_step_tokens, self._cost_model.slowest
        num_stages = self._cost_model.num_stages
        base_us, token_us = slowest.decode_us(0), slowest.chunk_us(1, 0)
        if num_stages == 1 or base_us <= 0 or token_us <= 0:
            return max_tokens
        best = math.sqrt(num_tokens * base_us / (token_us * (num_stages - 1)))
        num_steps = max(1, round(num_tokens / best))
        return min(max_tokens, max(MIN_STEP_TOKENS, math.ceil(num_tokens / num_steps)))

    def _max_credit_us(self, load: DecodeLoad) -> float:
        """Maximum credit for prefill. Twice the mean slowdown leaves room for unused credit."""
        return max(MAX_PREFILL_SHARE, 2 * (self._limits.max_decode_slowdown - 1)) * self._cycle_us(load)

    def _cycle_us(self, load: DecodeLoad) -> float:
        """Predicted time between two tokens of a sequence without prefill."""
        number = self._decode_steps(load)
        size = min(max(1.0, load.num_sequences / number), self._limits.max_step_sequences)
        return self._cost_model.decode_cycle_us(number, load.cost / load.num_sequences * size)
