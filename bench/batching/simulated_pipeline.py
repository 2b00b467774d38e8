"""The coordinator's scheduler over stages with known times, on a virtual clock.

A stage computes one step at a time, first in first out, so the times of a step on all stages are known when
it is sent. Transfers and stages have no other delays. Times are seconds.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from coordinator.recovery.policy import DEFAULT_POLICY
from coordinator.scheduler.cost_model import StepCost, cost_of_step
from coordinator.scheduler.kv_manager import KvCacheManager
from coordinator.scheduler.policy import SchedulerLimits
from coordinator.scheduler.scheduler import Scheduler
from coordinator.scheduler.sequence import Priority, queue_order
from coordinator.scheduler.sequence import Sequence as ScheduledSequence
from wire.ids import RequestId, SequenceKey
from wire.sampling import StepSampling
from wire.steps import SliceResult, StageTime, Step, StepResult

GREEDY = StepSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
BLOCK_SIZE = 16
KV_TOKENS = 2**20
PRIORITY_AGE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Time of a step on a stage of slowness 1. A decode with 1,024 tokens of context counts twice."""

    base_ms: float
    decode_ms: float = 0.0
    token_ms: float = 0.0
    million_pairs_ms: float = 0.0

    def step_s(self, cost: StepCost) -> float:
        if cost.is_empty:
            return 0.0
        decodes_ms = self.decode_ms * cost.decode_cost / 1024
        chunks_ms = self.token_ms * cost.chunk_tokens + self.million_pairs_ms * cost.chunk_pairs / 1e6
        return (self.base_ms + decodes_ms + chunks_ms) / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Stages in order: their slowness, and the time of a transfer to the next one or the coordinator.

    `noise` is the relative standard deviation of a step's time on a stage.
    """

    times: StepTimes
    slowness: tuple[float, ...]
    hop_ms: float = 0.5
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request at `at_s`; `at_s` is ignored in a closed loop."""

    at_s: float
    num_prompt_tokens: int
    max_tokens: int
    priority: Priority = Priority.NORMAL


@dataclass(slots=True)
class ServedRequest:
    """A request and when its tokens arrived."""

    arrival: Arrival
    at_s: float
    tokens_s: list[float] = field(default_factory=list)

    @property
    def first_token_s(self) -> float:
        """Time to the first token."""
        return self.tokens_s[0] - self.at_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between consecutive tokens."""
        return [after - before for before, after in zip(self.tokens_s, self.tokens_s[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class SentStep:
    """A sent step: when it was sent, its time on each stage, and when its result arrives."""

    step: Step
    cost: StepCost
    sent_s: float
    result: StepResult
    done_s: float

    @property
    def num_decodes(self) -> int:
        """Decoding sequences in the step."""
        return len(self.step.decodes)


class SimulatedPipeline:
    """Serves arrivals with a scheduler; `steps` are all steps in the order they were sent."""

    def __init__(
        self,
        stages: Stages,
        limits: SchedulerLimits,
        *,
        new_scheduler: Callable[[], Scheduler] = lambda: Scheduler(DEFAULT_POLICY),
        seed: int = 0,
    ) -> None:
        self.now_s = 0.0
        self.steps: list[SentStep] = []
        self.requests: list[ServedRequest] = []
        self.scheduler = new_scheduler()
        kv = KvCacheManager(num_blocks=KV_TOKENS // BLOCK_SIZE, block_size=BLOCK_SIZE, prefix_caching=False)
        self.scheduler.begin_epoch(1, kv, limits)
        self._stages = stages
        self._free_s = [0.0] * len(stages.slowness)
        self._random = random.Random(seed)
        self._in_flight: deque[SentStep] = deque()
        self._live: dict[SequenceKey, ServedRequest] = {}

    def serve(self, arrivals: Iterable[Arrival]) -> list[ServedRequest]:
        """Serve requests at their times, relative to now, until all have ended."""
        began_s, first = self.now_s, len(self.requests)
        waiting = [(began_s + arrival.at_s, number, arrival) for number, arrival in enumerate(arrivals)]
        heapq.heapify(waiting)
        while waiting or self._in_flight:
            if waiting and (not self._in_flight or waiting[0][0] <= self._in_flight[0].done_s):
                self.now_s, _, arrival = heapq.heappop(waiting)
                self._submit(arrival)
            else:
                self._complete()
        return self.requests[first:]

    def serve_in_turn(self, arrivals: Sequence[Arrival], *, at_once: int) -> list[ServedRequest]:
        """Serve requests as a closed loop of `at_once`: the end of one starts the next."""
        first, waiting = len(self.requests), deque(arrivals)
        while waiting or self._in_flight:
            while waiting and len(self._live) < at_once:
                self._submit(waiting.popleft())
            self._complete()
        return self.requests[first:]

    def _submit(self, arrival: Arrival) -> None:
        number = len(self.requests)
        order = queue_order(arrival.priority, arrived_s=self.now_s, arrival=number, age_s=PRIORITY_AGE_S)
        sequence = ScheduledSequence(
            SequenceKey(RequestId(number.to_bytes(16, "big")), 0),
            (1,) * arrival.num_prompt_tokens,
            max_tokens=arrival.max_tokens,
            sampling=GREEDY,
            stop_token_ids=frozenset(),
            order=order,
        )
        request = ServedRequest(arrival, self.now_s)
        self.requests.append(request)
        self._live[sequence.key] = request
        self.scheduler.add(sequence)
        self._send()

    def _complete(self) -> None:
        oldest = self._in_flight.popleft()
        self.now_s = oldest.done_s
        for update in self.scheduler.complete(oldest.result, self.now_s):
            request = self._live[update.sequence.key]
            if update.token is not None:
                request.tokens_s.append(self.now_s)
            if update.finish_reason is not None:
                del self._live[update.sequence.key]
        self._send()

    def _send(self) -> None:
        while (step := self.scheduler.next_step(self.now_s)) is not None:
            sent = self._timed(step)
            self.steps.append(sent)
            self._in_flight.append(sent)

    def _timed(self, step: Step) -> SentStep:
        cost = cost_of_step(step)
        step_s, hop_s, times = self._stages.times.step_s(cost), self._stages.hop_ms / 1e3, []
        at_s = self.now_s + hop_s
        for stage, slowness in enumerate(self._stages.slowness):
            begin_s = max(at_s, self._free_s[stage])
            compute_s = step_s * slowness * max(0.2, self._random.gauss(1.0, self._stages.noise))
            times.append(StageTime(round((begin_s - at_s) * 1e6), round(compute_s * 1e6)))
            self._free_s[stage] = begin_s + compute_s
            at_s = self._free_s[stage] + hop_s
        results = tuple(
            SliceResult(part.sequence, part.restart_count, 1) for part in step.slices if part.is_sampled
        )
        result = StepResult.of(step.epoch, step.step_id, results, tuple(times))
        return SentStep(step, cost, self.now_s, result, at_s)
