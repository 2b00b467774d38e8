"""Pipeline depth and prefill chunk size. Pure."""

import math
from dataclasses import dataclass

from coordinator.scheduler.cost_model import CostModel, chunk_pairs

SAME_RATE = 0.95
"""Of two numbers of steps with rates that differ by less, the larger one is taken: it does not depend on
transfers that always take the same time.
"""
EQUAL_TIME = 1.15
"""A chunk may take so many times the time of a full one at the start of a prompt before it is cut shorter."""
SPARE = 0.3
"""How far, as a share, a step of prefill may be off its size to end with a prompt: two halves cost more."""
PEAK = 0.85
"""What the chunks of one step may add to the time between two tokens, in such times without prefill; more
only where prefill may slow decodes down by half and more on average.
"""
SMALLEST_STEP = 64
"""Tokens; smaller steps of prefill would not pay even where measurements say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of a step and of the pipeline.

    Between `min_steps_in_flight`, the number of stages, and `max_steps_in_flight`, what memory allows,
    measurements decide; None leaves them no choice. Prefill may make decodes take `max_decode_slowdown` times
    as long as they would alone, on average.
    """

    max_step_tokens: int
    max_step_sequences: int
    max_steps_in_flight: int
    min_steps_in_flight: int | None = None
    max_decode_slowdown: float = 1.3

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
    """The tokens of the burst of prompts that is being prefilled, and those of them in the step already."""

    num_tokens: int
    step_tokens: int = 0


class BatchingPolicy:
    """What the measured times mean for one plan."""

    def __init__(self, limits: SchedulerLimits, times: CostModel) -> None:
        self._limits = limits
        self._times = times
        self._credit_us = math.inf

    def steps_in_flight(self, load: DecodeLoad) -> int:
        """How many steps to spread the work over."""
        return self._decode_steps(load) if load.num_sequences else self._prefill_steps()

    def chunk_tokens(self, load: DecodeLoad, prefill: PrefillLoad, *, start: int, end: int) -> int:
        """The most tokens of the next chunk of a step, for positions [start, end) of its prompt.

        Beside decodes, prefill saves up what decodes may be slowed down by, until it suffices for a chunk
        that is worth it: many small ones would cost more, and make every token late instead of some. Without
        decodes the chunks of a step share the tokens that bring the whole burst through the pipeline soonest,
        and a chunk takes about as long as one of so many tokens at the start of a prompt, so that the chunks
        of a long prompt follow each other without gaps.
        """
        slowest, most = self._times.slowest, self._limits.max_step_tokens
        if load.num_sequences:
            if not slowest.knows_decodes or not slowest.knows_chunks:
                return most
            peak_us = self._peak_us(load)
            affordable_us = min(self._credit_us, peak_us)
            wanted_us = min(peak_us, self.chunk_us(start=start, num_tokens=end - start))
            if affordable_us < SAME_RATE * wanted_us:
                return 0
            return int(min(most, max(1.0, slowest.chunk_tokens_within(affordable_us, start))))
        size = self._soonest(prefill.num_tokens)
        left = max(0, size - prefill.step_tokens)
        if end - start <= left + SPARE * size:
            return end - start
        if prefill.step_tokens >= (1 - SPARE) * size:
            return 0
        full_us = slowest.chunk_us(size, size * size / 2)
        if slowest.chunk_us(left, chunk_pairs(start, left)) <= EQUAL_TIME * full_us:
            return left
        return max(1, int(min(left, slowest.chunk_tokens_within(full_us, start))))

    def note_step(self, load: DecodeLoad, *, prefill_us: float) -> None:
        """A step has been handed out, whose chunks are expected to take so long."""
        if not load.num_sequences:
            self._credit_us = math.inf
            return
        cycle_us = self._cycle_us(load)
        steps = min(self._decode_steps(load), load.num_sequences)
        saved_us = min(self._credit_us, self._peak_us(load)) - prefill_us
        self._credit_us = saved_us + (self._limits.max_decode_slowdown - 1) * cycle_us / steps

    def chunk_us(self, *, start: int, num_tokens: int) -> float:
        """What a chunk adds to the slowest stage's time of a step."""
        slowest = self._times.slowest
        return slowest.chunk_us(num_tokens, chunk_pairs(start, num_tokens))

    def _decode_steps(self, load: DecodeLoad) -> int:
        """The number that serves most sequences per second.

        More steps keep more stages busy and let slow transfers overlap, but as soon as the slowest stage is
        busy all the time, they only make steps smaller, of which each costs the reading of all weights.
        """
        limits = self._limits
        least, most = limits.least_in_flight, limits.max_steps_in_flight
        slowest = self._times.slowest
        if least == most or not slowest.knows_decodes:
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
        slowest = self._times.slowest
        slowest_us = slowest.chunk_us(size, size * size / 2)
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

    def _peak_us(self, load: DecodeLoad) -> float:
        """The most that is saved up for prefill: what may be used must have room beside what was not."""
        return max(PEAK, 2 * (self._limits.max_decode_slowdown - 1)) * self._cycle_us(load)

    def _cycle_us(self, load: DecodeLoad) -> float:
        """The time between two tokens of a sequence without prefill."""
        number = self._decode_steps(load)
        size = min(max(1.0, load.num_sequences / number), self._limits.max_step_sequences)
        return self._times.decode_cycle_us(number, load.cost / load.num_sequences * size)
