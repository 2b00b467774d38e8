"""Pipeline depth and prefill chunk size. Pure; times in microseconds unless the name has another unit.

Prompts end as soon as possible while the time between two tokens of a sequence, a *lap*, stays in a budget.
With k steps in flight each may take a k-th of the lap: first its decodes, then prompts. Steps are equally
long, because one long step delays every sequence behind it on every stage, as if all steps were that long.
While prompts wait, decodes cost little: their steps read all weights anyway.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from coordinator.scheduler.cost_model import CostModel, StepCost, StepTimeModel, chunk_pairs

RATE_TOLERANCE = 0.98
"""Of depths with rates closer than this, decodes take the largest (slow transfers), prompts the smallest."""
CHUNK_TIME_TOLERANCE = 1.15
"""Time of a chunk relative to a full one at the start of a prompt, above which it is cut."""
STEP_SIZE_TOLERANCE = 0.3
"""Relative deviation from the step size allowed to end a step with a prompt, instead of splitting it."""
MIN_STEP_TOKENS = 64
"""Minimum tokens of a prefill step that is split to fill the pipeline."""
UNMEASURED_STEP_TOKENS = 128
"""Maximum prompt tokens of a step while no step with a prompt was measured."""
MAX_LAP_OF_DECODES = 3.0
"""Maximum lap relative to one without prompts, where that is longer than the target."""
WAITING_LAPS = 4.0
"""Laps in which waiting prompts are computed if the target is too short for them."""
PLANNED_SHARE = 0.85
"""Share of the lap budget that steps are planned for; the rest is for times above the prediction."""
MAX_SAVED_TOKENS = 16
"""Prompt tokens that a step may add because the one before ended on a block boundary."""
MAX_DECODE_SHARE = 2 / 3
"""Maximum share of a step's time for its decodes while prompts wait."""
MAX_PREFILL_SHARE = 0.85
"""With `max_decode_slowdown`: maximum delay of a decode step by the chunks of one step, relative to the time
between two tokens without prefill. A `max_decode_slowdown` of 1.43 and more allows more.
"""

DEFAULT_ITL_TARGET_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Limits of steps and of the pipeline depth.

    Attributes:
        max_steps_in_flight: maximum pipeline depth, bound by memory.
        min_steps_in_flight: minimum depth, the number of stages; measured times decide between the two. None
            fixes the depth to the maximum.
        itl_target_s: maximum time between two tokens of a sequence while prompts are computed.
        max_decode_slowdown: maximum mean slowdown of decode steps by prefill chunks, above 1; replaces
            `itl_target_s`.
        hop_us: time of a token's hidden state on each hop between hosts, as measured.
    """

    max_step_tokens: int
    max_step_sequences: int
    max_steps_in_flight: int
    min_steps_in_flight: int | None = None
    itl_target_s: float = DEFAULT_ITL_TARGET_S
    max_decode_slowdown: float | None = None
    hop_us: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_step_sequences", "max_steps_in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be in [1, inf)")
        if not 1 <= self.min_in_flight <= self.max_steps_in_flight:
            raise ValueError(
                f"min_steps_in_flight is {self.min_in_flight}, must be in [1, {self.max_steps_in_flight}]"
            )
        if not 0 < self.itl_target_s < math.inf:
            raise ValueError(f"itl_target_s is {self.itl_target_s}, must be in (0, inf)")
        if self.max_decode_slowdown is not None and not 1 < self.max_decode_slowdown < math.inf:
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
    """Tokens of the current burst of prompts, how many wait, and whether they are the only sequence."""

    num_tokens: int
    num_waiting: int
    is_alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the next step may take.

    Attributes:
        slowest: predicts times on the slowest stage, to which all times here refer.
        num_steps: steps to keep in flight.
        num_shares: steps over which the decodes are spread.
        prefill_tokens: wanted tokens of prefill.
        max_step_us: maximum time of the step.
        max_chunks_us: maximum time that chunks add to the step.
        min_chunk_us: a shorter chunk waits for a later step, unless it ends its prompt.
    """

    slowest: StepTimeModel
    num_steps: int
    num_shares: int
    prefill_tokens: int = 0
    max_step_us: float = math.inf
    max_chunks_us: float = math.inf
    min_chunk_us: float = 0.0

    def chunk_tokens(self, step: StepCost, *, start: int, end: int) -> int:
        """Maximum tokens of the next chunk of `step`, from positions [start, end) of its prompt."""
        size = self._wanted_tokens(step, start=start, end=end)
        left_us = self.time_left_us(step)
        needed_us = self._chunk_us(start, size)
        if needed_us <= left_us:
            return size
        if self.min_chunk_us and left_us < RATE_TOLERANCE * min(self.min_chunk_us, needed_us):
            return 0
        within = int(min(size, self.slowest.chunk_tokens_within(max(0.0, left_us), start)))
        # Prompts progress in every step, however slow the decodes are.
        return within if step.chunk_tokens else max(1, within)

    def time_left_us(self, step: StepCost) -> float:
        for_chunks_us = min(self.max_step_us - self.slowest.decode_us(step.decode_cost), self.max_chunks_us)
        return for_chunks_us - self.slowest.chunk_us(step.chunk_tokens, step.chunk_pairs)

    def _wanted_tokens(self, step: StepCost, *, start: int, end: int) -> int:
        """Tokens of the next chunk without a limit on its time.

        A step ends with a prompt where it can; the chunks of a long prompt take equal times.
        """
        size = self.prefill_tokens
        left = max(0, size - step.chunk_tokens)
        if end - start <= left + STEP_SIZE_TOLERANCE * size:
            return end - start
        if step.chunk_tokens >= (1 - STEP_SIZE_TOLERANCE) * size:
            return 0
        full_us = self.slowest.chunk_us(size, size * size / 2)
        if self._chunk_us(start, left) <= CHUNK_TIME_TOLERANCE * full_us:
            return left
        return max(1, int(min(left, self.slowest.chunk_tokens_within(full_us, start))))

    def _chunk_us(self, start: int, num_tokens: int) -> float:
        return self.slowest.chunk_us(num_tokens, chunk_pairs(start, num_tokens))


class SentSteps:
    """Steps in flight with predicted times on the slowest stage."""

    def __init__(self) -> None:
        self._steps = deque[_SentStep]()

    def add(self, step: StepCost, step_us: float, sent_us: float) -> None:
        self._steps.append(_SentStep(sent_us, step_us, step.chunk_tokens > 0))

    def drop_completed(self, *, num_in_flight: int) -> None:
        while len(self._steps) > num_in_flight:
            self._steps.popleft()

    @property
    def num_with_prefill(self) -> int:
        return sum(step.has_prefill for step in self._steps)

    def wait_us(self, now_us: float) -> float:
        """Time that a step sent now waits for these steps."""
        free_us = -math.inf
        for step in self._steps:
            free_us = max(free_us, step.sent_us) + step.step_us
        return max(0.0, free_us - now_us)


@dataclass(frozen=True, slots=True)
class _SentStep:
    sent_us: float
    step_us: float
    has_prefill: bool


class BatchingPolicy:
    """Chooses pipeline depth and chunk sizes of one plan from measured times."""

    def __init__(self, limits: SchedulerLimits, cost_model: CostModel) -> None:
        self._limits = limits
        self._cost_model = cost_model
        self._slowest = cost_model.slowest
        self._sent = SentSteps()
        self._target_us = PLANNED_SHARE * limits.itl_target_s * 1e6
        self._credit_us = math.inf
        self._unused_us = 0.0
        self._is_blocked = False

    def steps_in_flight(self, load: DecodeLoad, prefill: PrefillLoad) -> int:
        slowdown = self._limits.max_decode_slowdown
        if not prefill.num_waiting or self._is_blocked:
            return self._decode_steps(load) if load.num_sequences else self._limits.min_in_flight
        if not load.num_sequences and (prefill.is_alone or slowdown is not None):
            return self._prefill_steps()
        return self._mixed_steps(load, prefill) if slowdown is None else self._decode_steps(load)

    def plan_step(
        self, load: DecodeLoad, prefill: PrefillLoad, *, num_in_flight: int, now_s: float
    ) -> StepPlan | None:
        """Plan the next step beside `num_in_flight` others; None if the pipeline is full."""
        num_steps = self.steps_in_flight(load, prefill)
        if num_in_flight >= num_steps:
            return None
        self._sent.drop_completed(num_in_flight=num_in_flight)
        if not prefill.num_waiting:
            return self._plan(num_steps)
        slowdown = self._limits.max_decode_slowdown
        if not load.num_sequences and (prefill.is_alone or slowdown is not None):
            return self._plan(num_steps, prefill_tokens=self._prefill_step_tokens(prefill.num_tokens))
        if slowdown is not None:
            return self._slowed_plan(load, num_steps)
        return self._mixed_plan(load, prefill, num_steps, now_us=now_s * 1e6)

    def record_step(self, load: DecodeLoad, plan: StepPlan, step: StepCost, now_s: float) -> None:
        """Record a sent step, and save the time that it left of its plan."""
        self._sent.add(step, self.predicted_us(step), now_s * 1e6)
        if self._limits.max_decode_slowdown is not None:
            self._save_credit(load, step)
            return
        # A plan always has room for a chunk, so the prompts wait for KV blocks.
        self._is_blocked = plan.prefill_tokens > 0 and not step.chunk_tokens
        if plan.max_step_us < math.inf:
            left_us = plan.time_left_us(step) if step.chunk_tokens else 0.0
            self._unused_us = min(max(0.0, left_us), self._slowest.chunk_us(MAX_SAVED_TOKENS, 0))

    def predicted_us(self, step: StepCost) -> float:
        """Predicted time of `step` on the slowest stage."""
        if step.is_empty:
            return 0.0
        slowest = self._slowest
        return slowest.decode_us(step.decode_cost) + slowest.chunk_us(step.chunk_tokens, step.chunk_pairs)

    def lap_budget_us(self, load: DecodeLoad, prefill: PrefillLoad) -> float:
        """Planned time between two tokens; above the target only if the waiting prompts need it."""
        decodes_us = self._decode_lap_us(load)
        waiting_us = self._slowest.chunk_us(prefill.num_waiting, 0)
        needed_us = decodes_us + waiting_us / WAITING_LAPS
        return max(self._target_us, min(needed_us, MAX_LAP_OF_DECODES * decodes_us))

    def _plan(self, num_steps: int, **values: Any) -> StepPlan:
        return StepPlan(slowest=self._slowest, num_steps=num_steps, num_shares=num_steps, **values)

    def _mixed_plan(
        self, load: DecodeLoad, prefill: PrefillLoad, num_steps: int, *, now_us: float
    ) -> StepPlan:
        slowest = self._slowest
        lap_us = self.lap_budget_us(load, prefill)
        step_us = self._even_step_us(num_steps, lap_us)
        if load.num_sequences:
            step_us = min(step_us, self._next_step_us(num_steps, lap_us, now_us))
        return StepPlan(
            slowest=slowest,
            num_steps=num_steps,
            num_shares=num_steps if self._is_blocked else self._decode_shares(load, num_steps, step_us),
            prefill_tokens=self._prefill_step_tokens(prefill.num_tokens),
            max_step_us=step_us + (self._unused_us if lap_us > self._target_us else 0.0),
        )

    def _decode_shares(self, load: DecodeLoad, num_steps: int, step_us: float) -> int:
        """Fewest steps that take all decodes and leave time for prompts, so that decodes wait least."""
        slowest = self._slowest
        room_us = MAX_DECODE_SHARE * step_us - slowest.decode_us(0)
        if not slowest.knows_decodes or room_us <= 0:
            return num_steps
        decodes_us = slowest.decode_us(load.cost) - slowest.decode_us(0)
        return min(num_steps, max(1, math.ceil(decodes_us / room_us)))

    def _next_step_us(self, num_steps: int, lap_us: float, now_us: float) -> float:
        """Maximum time of the next step, for the decodes in it and behind it.

        They wait for all steps until the pipeline is full of prompts, then pass it behind the longest one.
        """
        num_free = max(1, num_steps - self._sent.num_with_prefill)
        left_us = lap_us - self._cost_model.chunk_transfer_us - self._sent.wait_us(now_us)
        return left_us / (self._cost_model.latency_ratio + num_free - 1)

    def _mixed_steps(self, load: DecodeLoad, prefill: PrefillLoad) -> int:
        """Fewest steps in flight with about the highest prefill rate, if all of a lap are equally long."""
        slowest, model = self._slowest, self._cost_model
        lap_us = self.lap_budget_us(load, prefill)
        wanted = self._prefill_step_tokens(prefill.num_tokens)
        base_us = slowest.decode_us(0)
        decodes_us = slowest.decode_us(load.cost) - base_us
        rates = dict[int, float]()
        for number in range(self._limits.min_in_flight, self._limits.max_steps_in_flight + 1):
            fixed_us = base_us + decodes_us / number
            left_us = max(0.0, self._even_step_us(number, lap_us) - fixed_us)
            tokens = min(wanted, slowest.chunk_tokens_within(left_us, 0))
            busy_us = fixed_us + slowest.chunk_us(tokens, 0)
            latency_us = model.latency_ratio * busy_us + model.chunk_transfer_us
            rates[number] = number * tokens / max(number * busy_us, latency_us, 1.0)
            if number * busy_us > latency_us:
                break
        best = max(rates.values())
        return min(number for number, rate in rates.items() if rate >= RATE_TOLERANCE * best)

    def _even_step_us(self, num_steps: int, lap_us: float) -> float:
        model = self._cost_model
        return min(lap_us / num_steps, (lap_us - model.chunk_transfer_us) / model.latency_ratio)

    def _save_credit(self, load: DecodeLoad, step: StepCost) -> None:
        if not load.num_sequences:
            self._credit_us = math.inf
            return
        slowdown = (self._limits.max_decode_slowdown or 1.0) - 1
        num_steps = min(self._decode_steps(load), load.num_sequences)
        prefill_us = self._slowest.chunk_us(step.chunk_tokens, step.chunk_pairs)
        saved_us = min(self._credit_us, self._max_credit_us(load)) - prefill_us
        self._credit_us = saved_us + slowdown * self._decode_lap_us(load) / num_steps

    def _slowed_plan(self, load: DecodeLoad, num_steps: int) -> StepPlan:
        """Prefill within the credit of `max_decode_slowdown`, saved until it allows a useful chunk."""
        max_tokens, slowest = self._limits.max_step_tokens, self._slowest
        if not slowest.knows_decodes or not slowest.knows_chunks:
            return self._plan(num_steps, prefill_tokens=max_tokens)
        max_us = self._max_credit_us(load)
        credit_us = min(self._credit_us, max_us)
        return self._plan(num_steps, prefill_tokens=max_tokens, max_chunks_us=credit_us, min_chunk_us=max_us)

    def _decode_steps(self, load: DecodeLoad) -> int:
        """Pipeline depth with the highest decode rate.

        More steps keep more stages busy and overlap slow transfers. Once the slowest stage is always busy,
        more steps are only smaller, and each of them reads all weights.
        """
        limits = self._limits
        min_depth, max_depth = limits.min_in_flight, limits.max_steps_in_flight
        slowest = self._slowest
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
        slowest = self._slowest
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
        large steps pay their fixed cost less often. The last step also passes each hop, which takes x * hop:
        the sum of hops adds to the rate of the other stages. No hop takes longer than a stage computes,
        x * hop <= base + x * rate: a longer transfer is not hidden, and larger steps do not shorten it.
        """
        max_tokens, slowest = self._limits.max_step_tokens, self._slowest
        if not slowest.knows_chunks:
            return min(max_tokens, UNMEASURED_STEP_TOKENS)
        num_stages = self._cost_model.num_stages
        base_us, token_us = slowest.decode_us(0), slowest.chunk_us(1, 0)
        if num_stages == 1 or base_us <= 0 or token_us <= 0:
            return max_tokens
        hops = self._limits.hop_us
        best = math.sqrt(num_tokens * base_us / (token_us * (num_stages - 1) + sum(hops)))
        if (slower_us := max(hops, default=0.0) - token_us) > 0:
            best = min(best, base_us / slower_us)
        num_steps = max(1, round(num_tokens / best))
        return min(max_tokens, max(MIN_STEP_TOKENS, math.ceil(num_tokens / num_steps)))

    def _max_credit_us(self, load: DecodeLoad) -> float:
        """Maximum credit for prefill. Twice the mean slowdown leaves room for unused credit."""
        slowdown = self._limits.max_decode_slowdown or 1.0
        return max(MAX_PREFILL_SHARE, 2 * (slowdown - 1)) * self._decode_lap_us(load)

    def _decode_lap_us(self, load: DecodeLoad) -> float:
        """Predicted time between two tokens of a sequence without prefill; of an empty step without load."""
        if not load.num_sequences:
            return self._cost_model.decode_cycle_us(self._limits.min_in_flight, 0)
        number = self._decode_steps(load)
        size = min(max(1.0, load.num_sequences / number), self._limits.max_step_sequences)
        return self._cost_model.decode_cycle_us(number, load.cost / load.num_sequences * size)
