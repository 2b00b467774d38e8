"""Step building, the decode queue, and sequence updates. Pure."""

from dataclasses import dataclass, field
from operator import attrgetter

from coordinator.scheduler.cost_model import StepCost, decodes_cost
from coordinator.scheduler.in_flight import ResultMismatch
from coordinator.scheduler.policy import DecodeLoad
from coordinator.scheduler.sequence import FinishReason, Sequence
from wire.errors import ServingError
from wire.steps import Prefill, SliceError, SliceResult, StartRecord, StepSlice, TokenLogprobs


@dataclass(slots=True)
class StepBuilder:
    """A step under construction. `prefill_us` is the expected time of its chunks."""

    slices: list[StepSlice] = field(default_factory=list)
    starts: list[StartRecord] = field(default_factory=list)
    cost: StepCost = field(default_factory=StepCost)
    num_tokens: int = 0
    record_bytes: int = 0
    prefill_us: float = 0.0

    def count_decodes(self, context: int) -> None:
        """Count the cost of the slices so far, which are decodes with `context` tokens in total."""
        self.num_tokens = len(self.slices)
        self.cost.decode_cost = decodes_cost(self.num_tokens, context)

    def add_chunk(self, sequence: Sequence, tokens: tuple[int, ...], prefill: Prefill) -> None:
        """Add a chunk of `sequence`, and its start record before the first chunk."""
        start = sequence.take_start_record()
        if start is not None:
            self.starts.append(start)
            self.record_bytes += start.most_bytes
        self.slices.append(StepSlice(sequence.key, sequence.restart_count, tokens, prefill))
        self.cost.add_chunk(prefill.start, prefill.num_tokens)
        self.num_tokens += len(tokens)


_ORDER = attrgetter("order")


class DecodeQueue:
    """The sequences in state DECODE. A sequence is *ready* if its newest token is not in a step yet.

    Sequences that became ready together must not stay in one step while other stages idle. So each step
    takes ready sequences, first in first out, up to an even share of the total cost. The next step makes up
    for the difference to that share.
    """

    def __init__(self) -> None:
        self._costs: dict[Sequence, int] = {}
        self._total = 0
        self._ready: list[Sequence] = []
        self._deficit = 0.0

    @property
    def load(self) -> DecodeLoad:
        return DecodeLoad(len(self._costs), self._total)

    def make_ready(self, sequence: Sequence) -> None:
        """Mark `sequence` ready after a new token."""
        cost = decodes_cost(1, sequence.num_tokens)
        self._total += cost - self._costs.get(sequence, 0)
        self._costs[sequence] = cost
        self._ready.append(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Remove `sequence` if it is in the queue."""
        cost = self._costs.pop(sequence, None)
        if cost is None:
            return
        self._total -= cost
        if sequence in self._ready:
            self._ready.remove(sequence)

    def take(self, num_steps: int, *, max_sequences: int) -> list[Sequence]:
        """Take the ready sequences of the next of `num_steps` steps, in queue order."""
        share, count = self._total / num_steps, 0
        budget = share + self._deficit
        for sequence in self._ready:
            cost = self._costs[sequence]
            if count == max_sequences or (count and budget < cost / 2):
                break
            budget -= cost
            count += 1
        taken, self._ready = self._ready[:count], self._ready[count:]
        self._deficit = max(-share, budget) if self._ready and count < max_sequences else 0.0
        taken.sort(key=_ORDER)
        return taken

    def clear(self) -> None:
        self._deficit = 0.0
        self._costs.clear()
        self._ready.clear()
        self._total = 0


@dataclass(slots=True)
class SequenceUpdate:
    """Changes of one sequence by a step result: new token, prompt log-probabilities, finish or failure.

    `prompt_logprobs` continue earlier updates; the first entry is the second prompt token's.
    """

    sequence: Sequence
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: ServingError | None = None


@dataclass(slots=True)
class SchedulerCounts:
    """Totals since the coordinator started.

    `num_prompt_tokens` counts the prompt of every started sequence once; `num_cached_tokens` of them were
    cache hits.
    """

    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


def check_logprobs(sequence: Sequence, step_slice: StepSlice, entry: SliceResult) -> None:
    """Raise ResultMismatch unless the result has exactly the requested log-probabilities."""
    outcome = entry.outcome
    if isinstance(outcome, int) and (entry.logprobs is None) != (sequence.sampling.logprobs is None):
        problem = "unexpected" if sequence.sampling.logprobs is None else "missing"
        raise ResultMismatch(f"{problem} log-probabilities for a token of {step_slice.sequence}")
    if not step_slice.is_scored or isinstance(outcome, SliceError):
        return
    wanted = sequence.num_prompt_logprobs(step_slice.first_position, len(step_slice.tokens))
    if len(entry.prompt_logprobs) != wanted:
        raise ResultMismatch(
            f"{step_slice.sequence} got {len(entry.prompt_logprobs)} prompt log-probabilities for "
            f"{len(step_slice.tokens)} tokens from {step_slice.first_position} on, expected {wanted}"
        )
