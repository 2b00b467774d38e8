"""How long steps take, learnt from what stages and results say. Pure; all times in microseconds."""

import math
from collections.abc import Sequence

from coordinator.scheduling.fits import RecentMedian, TwoTermFit
from coordinator.scheduling.work import CONTEXT_ROWS, StepWork
from wire.steps import StageTime

HANDLING_US = 500.0
"""What receiving and sending a step takes a stage, while it computes others: no step is ever free."""


class WorkTime:
    """The time of a step as base + decode cost + chunk tokens + query-key pairs, each with its rate.

    The decode terms are learnt from steps without chunks, those of chunks from what a step with chunks takes
    beyond them; so neither is forgotten while there is only the other.
    """

    def __init__(self) -> None:
        self._decodes = TwoTermFit()
        self._chunks = TwoTermFit()

    @property
    def knows_decodes(self) -> bool:
        return self._decodes.is_known

    @property
    def knows_chunks(self) -> bool:
        return self._chunks.is_known

    def observe(self, work: StepWork, time_us: float) -> None:
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


class StepTimes:
    """What is known of the pipeline: its slowest stage, all its stages one after another, and the transfers.

    Transfers are all that passes between handing out a step and its result in which no stage computes it or
    has it waiting.
    """

    def __init__(self) -> None:
        self.slowest = WorkTime()
        self.total = WorkTime()
        self._decode_transfer = RecentMedian()
        self._chunk_transfer = RecentMedian()

    def observe(self, work: StepWork, stage_times: Sequence[StageTime], elapsed_us: float) -> None:
        """A step was answered `elapsed_us` after it was handed out. Says nothing without work or times."""
        if work.is_empty or not stage_times:
            return
        computing = [each.compute_us for each in stage_times]
        self.slowest.observe(work, max(computing))
        self.total.observe(work, sum(computing))
        on_the_way = elapsed_us - sum(computing) - sum(each.wait_us for each in stage_times)
        transfer = self._chunk_transfer if work.chunk_tokens else self._decode_transfer
        transfer.add(max(0.0, on_the_way))

    def step_us(self, work: StepWork) -> float:
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
