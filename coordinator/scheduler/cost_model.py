"""Cost of steps, and their duration learned from measured stage times. Pure; times in microseconds."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from wire.steps import StageTime, Step, unpack_column

_DECAY = 0.97
"""Decay of older measurements per new one: the weight halves after 23 measurements."""
_MIN_SPREAD = 0.01
"""Below this relative determinant the two features are collinear."""
_MIN_MEASUREMENTS = 8
_MAX_OUTLIER_RATIO = 4.0


class OnlineLeastSquares:
    """Fits y = first * x1 + second * x2 with non-negative coefficients, by decayed least squares.

    While the features are collinear, x1 explains everything. A value is capped at `_MAX_OUTLIER_RATIO` times
    the prediction, so that one page fault or descheduled thread has little effect; a lasting change of speed
    is learned after a few measurements.
    """

    def __init__(self) -> None:
        self._s11 = self._s12 = self._s22 = self._s1y = self._s2y = 0.0
        self._count = 0
        self.first = 0.0
        self.second = 0.0

    @property
    def is_known(self) -> bool:
        """Whether there is a measurement."""
        return self._count > 0

    def predict(self, x1: float, x2: float) -> float:
        """Predicted y; 0 without measurements."""
        return self.first * x1 + self.second * x2

    def add(self, x1: float, x2: float, y: float) -> None:
        """Add the measurement `y` for features `x1` > 0 and `x2`."""
        if self._count >= _MIN_MEASUREMENTS:
            y = min(y, _MAX_OUTLIER_RATIO * self.predict(x1, x2))
        self._count += 1
        self._s11 = _DECAY * self._s11 + x1 * x1
        self._s12 = _DECAY * self._s12 + x1 * x2
        self._s22 = _DECAY * self._s22 + x2 * x2
        self._s1y = _DECAY * self._s1y + x1 * y
        self._s2y = _DECAY * self._s2y + x2 * y
        self._solve()

    def _solve(self) -> None:
        determinant = self._s11 * self._s22 - self._s12 * self._s12
        if determinant <= _MIN_SPREAD * self._s11 * self._s22:
            self.first, self.second = self._s1y / self._s11, 0.0
            return
        first = (self._s1y * self._s22 - self._s2y * self._s12) / determinant
        second = (self._s2y * self._s11 - self._s1y * self._s12) / determinant
        if second < 0:
            first, second = self._s1y / self._s11, 0.0
        elif first < 0:
            first, second = 0.0, self._s2y / self._s22
        self.first, self.second = first, second


class RecentMedian:
    """Median of the last `size` values, the lower one of an even number."""

    def __init__(self, size: int = 64) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self._value: float | None = None

    @property
    def value(self) -> float:
        """The median; 0 without values."""
        if self._value is None:
            ordered = sorted(self._values)
            self._value = ordered[(len(ordered) - 1) // 2] if ordered else 0.0
        return self._value

    def add(self, value: float) -> None:
        self._values.append(value)
        self._value = None


CONTEXT_PER_SEQUENCE = 1024
"""Fixed cost of decoding one sequence, in tokens of context.

It only balances the cost between steps; durations are measured.
"""


def decodes_cost(num_sequences: int, context: int) -> int:
    """Cost of decoding sequences with `context` tokens in total, in tokens of context."""
    return num_sequences * CONTEXT_PER_SEQUENCE + context


CONTEXT_ROWS = 32
"""Reading the keys and values of a context costs as much as attending to them with this many tokens."""


def chunk_pairs(start: int, num_tokens: float) -> float:
    """Attention cost of a prefill chunk from position `start`, in query-key pairs."""
    return (num_tokens + CONTEXT_ROWS) * start + num_tokens * (num_tokens + 1) / 2


@dataclass(slots=True)
class StepCost:
    """Cost of a step: its decodes in tokens of context, its chunks in tokens and query-key pairs."""

    decode_cost: int = 0
    chunk_tokens: int = 0
    chunk_pairs: float = 0

    def add_chunk(self, start: int, num_tokens: int) -> None:
        self.chunk_tokens += num_tokens
        self.chunk_pairs += chunk_pairs(start, num_tokens)

    @property
    def is_empty(self) -> bool:
        """The step computes nothing; it carries only records and KV signals."""
        return not self.decode_cost and not self.chunk_tokens


def cost_of_step(step: Step) -> StepCost:
    """Cost of `step`, computed from its slices."""
    cost = StepCost()
    for chunk in step.chunks:
        cost.add_chunk(chunk.first_position, len(chunk.tokens))
    if step.decodes:
        context = sum(unpack_column(step.decodes.positions)) + len(step.decodes)
        cost.decode_cost = decodes_cost(len(step.decodes), context)
    return cost


HANDLING_US = 500.0
"""Minimum time of a step on a stage: receiving and sending it."""


class StepTimeModel:
    """Models the time of a step as base + decode cost + chunk tokens + query-key pairs, each with a rate.

    The decode terms are learned from steps without chunks, the chunk terms from the remaining time of steps
    with chunks. So each is kept while only the other is measured.
    """

    def __init__(self) -> None:
        self._decodes = OnlineLeastSquares()
        self._chunks = OnlineLeastSquares()

    @property
    def knows_decodes(self) -> bool:
        return self._decodes.is_known

    @property
    def knows_chunks(self) -> bool:
        return self._chunks.is_known

    def observe(self, cost: StepCost, time_us: float) -> None:
        """Add the measured time of a step with a non-empty cost."""
        if not cost.chunk_tokens:
            self._decodes.add(1.0, cost.decode_cost, time_us)
        else:
            extra_us = max(0.0, time_us - self.decode_us(cost.decode_cost))
            self._chunks.add(cost.chunk_tokens, cost.chunk_pairs, extra_us)

    def decode_us(self, cost: float) -> float:
        """Predicted time of a step without chunks."""
        return self._decodes.predict(1.0, cost)

    def chunk_us(self, num_tokens: float, pairs: float) -> float:
        """Predicted additional time of chunks in a step."""
        return self._chunks.predict(num_tokens, pairs)

    def chunk_tokens_within(self, time_us: float, start: int) -> float:
        """Length of the longest chunk at position `start` that adds at most `time_us`, 0 if none does.

        The root of pairs * x^2 / 2 + (tokens + pairs * start) * x = time - pairs * CONTEXT_ROWS * start.
        """
        per_token, per_pair = self._chunks.first, self._chunks.second
        linear, quadratic = per_token + per_pair * start, per_pair / 2
        if linear <= 0:
            return math.inf
        time_us = max(0.0, time_us - per_pair * CONTEXT_ROWS * start)
        return 2 * time_us / (linear + math.sqrt(linear * linear + 4 * quadratic * time_us))


class CostModel:
    """Predicts step times of the pipeline from its slowest stage, the sum of its stages, and transfers.

    The transfer time of a step is its latency without compute and queue times of the stages.
    """

    def __init__(self) -> None:
        self.slowest = StepTimeModel()
        self.total = StepTimeModel()
        self.num_stages = 1
        self._decode_transfer = RecentMedian()
        self._chunk_transfer = RecentMedian()

    def observe(self, cost: StepCost, stage_times: Sequence[StageTime], elapsed_us: float) -> None:
        """Add the measured latency and stage times of a step; ignored without cost or stage times."""
        if cost.is_empty or not stage_times:
            return
        computing = [stage_time.compute_us for stage_time in stage_times]
        self.num_stages = len(computing)
        self.slowest.observe(cost, max(computing))
        self.total.observe(cost, sum(computing))
        transfer_us = elapsed_us - sum(computing) - sum(stage_time.wait_us for stage_time in stage_times)
        transfer = self._chunk_transfer if cost.chunk_tokens else self._decode_transfer
        transfer.add(max(0.0, transfer_us))

    def step_us(self, cost: StepCost) -> float:
        """Predicted latency of a step in an empty pipeline; 0 if unknown."""
        if cost.decode_cost and not self.total.knows_decodes:
            return 0.0
        if cost.chunk_tokens and not self.total.knows_chunks:
            return 0.0
        transfer = self._chunk_transfer if cost.chunk_tokens else self._decode_transfer
        computing = self.total.chunk_us(cost.chunk_tokens, cost.chunk_pairs) if cost.chunk_tokens else 0.0
        if cost.decode_cost:
            computing += self.total.decode_us(cost.decode_cost)
        return computing + transfer.value

    def decode_cycle_us(self, num_steps: int, cost: float) -> float:
        """Predicted time between two steps of the same sequences, with `num_steps` such steps in flight."""
        busy_us = max(self.slowest.decode_us(cost), HANDLING_US)
        return max(num_steps * busy_us, self.decode_latency_us(cost))

    def decode_latency_us(self, cost: float) -> float:
        """Predicted latency of a decode step in an empty pipeline."""
        return self.total.decode_us(cost) + self._decode_transfer.value

    @property
    def chunk_transfer_us(self) -> float:
        return self._chunk_transfer.value

    @property
    def latency_ratio(self) -> float:
        """Compute time of a chunk on all stages, relative to the slowest one."""
        slowest_us = self.slowest.chunk_us(1, 0)
        return max(1.0, self.total.chunk_us(1, 0) / slowest_us) if slowest_us > 0 else float(self.num_stages)

    def chunk_latency_us(self, num_tokens: int) -> float:
        """Predicted latency of a chunk at the start of a prompt in an empty pipeline."""
        pairs = num_tokens * num_tokens / 2
        return self.total.chunk_us(num_tokens, pairs) + self._chunk_transfer.value
