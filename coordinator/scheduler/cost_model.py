"""Step cost and duration, learnt from measured stage times. Pure; microseconds."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from wire.steps import Prefill, StageTime, Step

_DECAY = 0.97
"""Weight of what was known, each time something is measured: half of it is gone after 23 measurements."""
_LEAST_SPREAD = 0.01
"""Below it, the two features of all measurements are as good as proportional and cannot be told apart."""
_FEW = 8
_OUTLIER = 4.0


class OnlineLeastSquares:
    """y = first * x1 + second * x2 with coefficients that are not negative, by weighted least squares.

    New measurements weigh more than old ones. As long as the features cannot be told apart, x1 explains all.
    A value far above what is expected counts as far as `_OUTLIER` times the expected: one page fault or
    stolen core is no new speed, and a new speed is believed after a few.
    """

    def __init__(self) -> None:
        self._s11 = self._s12 = self._s22 = self._s1y = self._s2y = 0.0
        self._count = 0
        self.first = 0.0
        self.second = 0.0

    @property
    def is_known(self) -> bool:
        """Something was measured."""
        return self._count > 0

    def predict(self, x1: float, x2: float) -> float:
        """What is expected; 0 before anything was measured."""
        return self.first * x1 + self.second * x2

    def add(self, x1: float, x2: float, y: float) -> None:
        """`y` was measured where the features were `x1`, which is positive, and `x2`."""
        if self._count >= _FEW:
            y = min(y, _OUTLIER * self.predict(x1, x2))
        self._count += 1
        self._s11 = _DECAY * self._s11 + x1 * x1
        self._s12 = _DECAY * self._s12 + x1 * x2
        self._s22 = _DECAY * self._s22 + x2 * x2
        self._s1y = _DECAY * self._s1y + x1 * y
        self._s2y = _DECAY * self._s2y + x2 * y
        self._solve()

    def _solve(self) -> None:
        determinant = self._s11 * self._s22 - self._s12 * self._s12
        if determinant <= _LEAST_SPREAD * self._s11 * self._s22:
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
    """The median of the last `size` values; of an even number of them the lower one."""

    def __init__(self, size: int = 64) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self._value: float | None = None

    @property
    def value(self) -> float:
        """0 before anything was measured."""
        if self._value is None:
            ordered = sorted(self._values)
            self._value = ordered[(len(ordered) - 1) // 2] if ordered else 0.0
        return self._value

    def add(self, value: float) -> None:
        self._values.append(value)
        self._value = None


CONTEXT_PER_SEQUENCE = 1024
"""Tokens of context whose keys and values cost a decode as much as everything else about one sequence.

Only the balance between steps depends on it; how long a step takes is measured.
"""


def decodes_cost(num_sequences: int, context: int) -> int:
    """The cost of decodes of sequences with `context` tokens in all, in tokens of context."""
    return num_sequences * CONTEXT_PER_SEQUENCE + context


CONTEXT_ROWS = 32
"""To get at the keys and values of a context takes as long as attending to them with so many tokens."""


def chunk_pairs(start: int, num_tokens: float) -> float:
    """What attention costs a prefill chunk whose first token is at position `start`, in query-key pairs."""
    return (num_tokens + CONTEXT_ROWS) * start + num_tokens * (num_tokens + 1) / 2


@dataclass(slots=True)
class StepCost:
    """The decodes of a step by their cost, its prefill chunks by tokens and query-key pairs."""

    decode_cost: int = 0
    chunk_tokens: int = 0
    chunk_pairs: float = 0

    def add_chunk(self, start: int, num_tokens: int) -> None:
        self.chunk_tokens += num_tokens
        self.chunk_pairs += chunk_pairs(start, num_tokens)

    @property
    def is_empty(self) -> bool:
        """Nothing is computed: the step carries records and frees only."""
        return not self.decode_cost and not self.chunk_tokens


def work_of(step: Step) -> StepCost:
    """What `step` computes, as its slices say."""
    work = StepCost()
    num_decodes = context = 0
    for part in step.slices:
        if isinstance(part.inference_step, Prefill):
            work.add_chunk(part.first_position, len(part.tokens))
        else:
            num_decodes += 1
            context += part.first_position + 1
    if num_decodes:
        work.decode_cost = decodes_cost(num_decodes, context)
    return work


HANDLING_US = 500.0
"""What receiving and sending a step takes a stage, while it computes others: no step is ever free."""


class WorkTime:
    """The time of a step as base + decode cost + chunk tokens + query-key pairs, each with its rate.

    The decode terms are learnt from steps without chunks, those of chunks from what a step with chunks takes
    beyond them; so neither is forgotten while there is only the other.
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

    def observe(self, work: StepCost, time_us: float) -> None:
        """A step with this work, which is not empty, took so long."""
        if not work.chunk_tokens:
            self._decodes.add(1.0, work.decode_cost, time_us)
        else:
            beyond = max(0.0, time_us - self.decode_us(work.decode_cost))
            self._chunks.add(work.chunk_tokens, work.chunk_pairs, beyond)

    def decode_us(self, cost: float) -> float:
        """Of a step that only decodes, sequences of this cost together."""
        return self._decodes.predict(1.0, cost)

    def chunk_us(self, num_tokens: float, pairs: float) -> float:
        """What chunks of so many tokens and query-key pairs add to a step."""
        return self._chunks.predict(num_tokens, pairs)

    def chunk_tokens_within(self, time_us: float, start: int) -> float:
        """The longest chunk at position `start` that adds at most `time_us`, 0 if none does: the root of
        pairs * x^2 / 2 + (tokens + pairs * start) * x = time - pairs * CONTEXT_ROWS * start.
        """
        per_token, per_pair = self._chunks.first, self._chunks.second
        linear, quadratic = per_token + per_pair * start, per_pair / 2
        if linear <= 0:
            return math.inf
        time_us = max(0.0, time_us - per_pair * CONTEXT_ROWS * start)
        return 2 * time_us / (linear + math.sqrt(linear * linear + 4 * quadratic * time_us))


class CostModel:
    """What is known of the pipeline: its slowest stage, all its stages one after another, and the transfers.

    Transfers are all that passes between handing out a step and its result in which no stage computes it or
    has it waiting.
    """

    def __init__(self) -> None:
        self.slowest = WorkTime()
        self.total = WorkTime()
        self._decode_transfer = RecentMedian()
        self._chunk_transfer = RecentMedian()

    def observe(self, work: StepCost, stage_times: Sequence[StageTime], elapsed_us: float) -> None:
        """A step was answered `elapsed_us` after it was handed out. Says nothing without work or times."""
        if work.is_empty or not stage_times:
            return
        computing = [stage_time.compute_us for stage_time in stage_times]
        self.slowest.observe(work, max(computing))
        self.total.observe(work, sum(computing))
        on_the_way = elapsed_us - sum(computing) - sum(stage_time.wait_us for stage_time in stage_times)
        transfer = self._chunk_transfer if work.chunk_tokens else self._decode_transfer
        transfer.add(max(0.0, on_the_way))

    def step_us(self, work: StepCost) -> float:
        """From handing out a step with this work to its result, waiting for nothing; 0 while unknown."""
        if work.decode_cost and not self.total.knows_decodes:
            return 0.0
        if work.chunk_tokens and not self.total.knows_chunks:
            return 0.0
        transfer = self._chunk_transfer if work.chunk_tokens else self._decode_transfer
        computing = self.total.chunk_us(work.chunk_tokens, work.chunk_pairs) if work.chunk_tokens else 0.0
        if work.decode_cost:
            computing += self.total.decode_us(work.decode_cost)
        return computing + transfer.value

    def decode_cycle_us(self, num_steps: int, cost: float) -> float:
        """How long each of `num_steps` steps, with decodes of this cost each, takes from one to the next."""
        busy_us = max(self.slowest.decode_us(cost), HANDLING_US)
        return max(num_steps * busy_us, self.decode_way_us(cost))

    def decode_way_us(self, cost: float) -> float:
        """From handing out a step with decodes of this cost to its result, when it waits for nothing."""
        return self.total.decode_us(cost) + self._decode_transfer.value

    def chunk_way_us(self, num_tokens: int) -> float:
        """The same for a prefill chunk of so many tokens at the start of a prompt."""
        pairs = num_tokens * num_tokens / 2
        return self.total.chunk_us(num_tokens, pairs) + self._chunk_transfer.value
