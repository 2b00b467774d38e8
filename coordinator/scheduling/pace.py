"""How many steps should be in flight, and how much prefill a step may hold. Pure."""

import math
from dataclasses import dataclass

from coordinator.scheduling.step_times import StepTimes

SAME_RATE = 0.98
"""Of two rates that differ by less, neither is better."""
EQUAL_TIME = 1.15
"""A chunk may take so many times the time of a full one at the start of a prompt before it is cut shorter."""
SPARE = 0.3
"""How far, as a share, a step of prefill may be off its size to end with a prompt: two halves cost more."""
SMALLEST_STEP = 64
"""Tokens; smaller steps of prefill would not pay even where measurements say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of a step and of the pipeline.

    Between `min_steps_in_flight`, the number of stages, and `max_steps_in_flight`, what memory allows,
    measurements decide; None leaves them no choice. Prefill may make decodes take up to
    `max_decode_slowdown` times as long as they would alone.
    """

    max_step_tokens: int
    max_step_sequences: int
    max_steps_in_flight: int
    min_steps_in_flight: int | None = None
    max_decode_slowdown: float = 1.4

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_step_sequences", "max_steps_in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 1 <= self.least_in_flight <= self.max_steps_in_flight:
            raise ValueError(
                f"min_steps_in_flight must be in [1, {self.max_steps_in_flight}], got {self.least_in_flight}"
            )
        if self.max_decode_slowdown <= 1:
            raise ValueError(f"max_decode_slowdown must be above 1, got {self.max_decode_slowdown}")

    @property
    def least_in_flight(self) -> int:
        return self.max_steps_in_flight if self.min_steps_in_flight is None else self.min_steps_in_flight


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """All sequences that decode, in flight or not, and the sum of their costs."""

    num_sequences: int
    cost: int


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """The tokens of the burst of prompts that is being prefilled, and what of the step its chunks have taken
    already.
    """

    num_tokens: int
    step_tokens: int = 0
    step_us: float = 0.0


class Pace:
    """What the measured times mean for one plan."""

    def __init__(self, limits: SchedulerLimits, times: StepTimes) -> None:
        self._limits = limits
        self._times = times

    def steps_in_flight(self, load: DecodeLoad) -> int:
        """How many steps to spread the work over."""
        return self._decode_steps(load) if load.num_sequences else self._prefill_steps()

    def chunk_tokens(self, load: DecodeLoad, prefill: PrefillLoad, *, start: int, end: int) -> int:
        """The most tokens of the next chunk of a step, for positions [start, end) of its prompt.

        Beside decodes, the chunks of a step share what decodes may be slowed down by. Without them they share
        the tokens that bring the whole burst through the pipeline soonest, and a chunk takes about as
        long as one of so many tokens at the start of a prompt, so that the chunks of a long prompt follow
        each other without gaps.
        """
        slowest, most = self._times.slowest, self._limits.max_step_tokens
        if load.num_sequences:
            if not slowest.knows_decodes or not slowest.knows_chunks:
                return most
            full_us = slowest.chunk_us(most, most * most / 2)
            budget_us = min(full_us, self._prefill_budget_us(load)) - prefill.step_us
            return int(min(most, slowest.chunk_tokens_within(max(0.0, budget_us), start)))
        size = self._soonest(prefill.num_tokens)
        left = max(0, size - prefill.step_tokens)
        if end - start <= left + SPARE * size:
            return end - start
        if prefill.step_tokens >= (1 - SPARE) * size:
            return 0
        full_us = slowest.chunk_us(size, size * size / 2)
        if slowest.chunk_us(left, left * (start + left / 2)) <= EQUAL_TIME * full_us:
            return left
        return int(min(left, slowest.chunk_tokens_within(full_us, start)))

    def chunk_us(self, *, start: int, num_tokens: int) -> float:
        """What a chunk adds to the slowest stage's time of a step."""
        return self._times.slowest.chunk_us(num_tokens, num_tokens * (start + num_tokens / 2))

    def _decode_steps(self, load: DecodeLoad) -> int:
        """The number that serves most sequences per second.

        More steps keep more stages busy and let slow transfers overlap, but as soon as the slowest stage is
        busy all the time, they only make steps smaller, of which each costs the reading of all weights.
        """
        limits = self._limits
        least, most = limits.least_in_flight, limits.max_steps_in_flight
        if least == most or not self._times.slowest.knows_decodes:
            return least
        rates = dict[int, float]()
        for number in range(least, most + 1):
            size = min(max(1.0, load.num_sequences / number), limits.max_step_sequences)
            cost = load.cost / load.num_sequences * size
            cycle_us = self._times.decode_cycle_us(number, cost)
            rates[number] = number * size / max(cycle_us, 1.0)
            if cycle_us > self._times.decode_way_us(cost) or number >= load.num_sequences:
                break
        best = max(rates.values())
        return max(number for number, rate in rates.items() if rate >= SAME_RATE * best)

    def _prefill_steps(self) -> int:
        """Chunks do not get smaller when there are more of them, so one more than fills the pipeline."""
        limits = self._limits
        size = limits.max_step_tokens
        slowest_us = self._times.slowest.chunk_us(size, size * size / 2)
        filling = self._times.chunk_way_us(size) / slowest_us if slowest_us > 0 else limits.least_in_flight
        number = max(limits.least_in_flight, math.floor(filling)) + 1
        return min(number, limits.max_steps_in_flight)

    def _soonest(self, num_tokens: int) -> int:
        """The tokens of a step with which `num_tokens` of prefill are through the whole pipeline soonest.

        Of R tokens in steps of x, the last leaves the last of S stages after R / x + S - 1 times
        base + x * rate, which is least for x = sqrt(R * base / (rate * (S - 1))): small steps keep the stages
        from waiting at the beginning and the end, and large ones pay less often for what each costs anyway.
        """
        most, slowest = self._limits.max_step_tokens, self._times.slowest
        num_stages = self._limits.least_in_flight
        base_us, token_us = slowest.decode_us(0), slowest.chunk_us(1, 0)
        if num_stages == 1 or base_us <= 0 or token_us <= 0:
            return most
        best = math.sqrt(num_tokens * base_us / (token_us * (num_stages - 1)))
        num_steps = max(1, round(num_tokens / best))
        return min(most, max(SMALLEST_STEP, math.ceil(num_tokens / num_steps)))

    def _prefill_budget_us(self, load: DecodeLoad) -> float:
        """What the chunks of one step may take, when every step has as much."""
        number = self._decode_steps(load)
        size = min(max(1.0, load.num_sequences / number), self._limits.max_step_sequences)
        cycle_us = self._times.decode_cycle_us(number, load.cost / load.num_sequences * size)
        return (self._limits.max_decode_slowdown - 1) * cycle_us / number
