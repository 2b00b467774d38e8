"""Step building, the decode queue, and sequence updates. Pure."""

from dataclasses import dataclass, field
from operator import attrgetter

from coordinator.scheduler.cost_model import StepCost, decodes_cost
from coordinator.scheduler.in_flight import ResultMismatch
from coordinator.scheduler.policy import DecodeLoad
from coordinator.scheduler.sequence import FinishReason, Sequence
from wire.errors import ServingError
from wire.steps import (
    NO_DECODES,
    Decodes,
    Prefill,
    RowDetail,
    SliceError,
    StartRecord,
    StepSlice,
    TokenLogprobs,
    pack_column,
)


@dataclass(slots=True)
class StepBuilder:
    """A step under construction. `prefill_us` is the expected time of its chunks.

    `answered` are the sequences of the rows of its result, in order.
    """

    decodes: Decodes = NO_DECODES
    chunks: list[StepSlice] = field(default_factory=list)
    starts: list[StartRecord] = field(default_factory=list)
    answered: list[Sequence] = field(default_factory=list)
    cost: StepCost = field(default_factory=StepCost)
    num_tokens: int = 0
    record_bytes: int = 0
    prefill_us: float = 0.0

    @property
    def num_slices(self) -> int:
        return len(self.decodes) + len(self.chunks)

    def add_decodes(self, sequences: list[Sequence]) -> None:
        """Add the newest token of each of `sequences`, which have a slot for it."""
        tokens, positions = Sequence.take_decodes(sequences)
        self.decodes = Decodes(
            b"".join([sequence.identity for sequence in sequences]),
            pack_column(tokens),
            pack_column(positions),
        )
        self.answered = sequences
        self.num_tokens = len(sequences)
        self.cost.decode_cost = decodes_cost(len(sequences), sum(positions) + len(sequences))

    def add_chunk(self, sequence: Sequence, tokens: tuple[int, ...], prefill: Prefill) -> None:
        """Add a chunk of `sequence`, and its start record before the first chunk."""
        start = sequence.take_start_record()
        if start is not None:
            self.starts.append(start)
            self.record_bytes += start.most_bytes
        chunk = StepSlice(sequence.key, sequence.restart_count, tokens, prefill)
        self.chunks.append(chunk)
        if chunk.is_answered:
            self.answered.append(sequence)
        self.cost.add_chunk(prefill.start, prefill.num_tokens)
        self.num_tokens += len(tokens)


_ORDER = attrgetter("order")


def _cost(sequence: Sequence) -> int:
    return decodes_cost(1, sequence.num_tokens)


class DecodeQueue:
    """The sequences in state DECODE. A sequence is *ready* if its newest token is not in a step yet.

    Sequences that became ready together must not stay in one step while other stages idle. So each step
    takes ready sequences, first in first out, up to an even share of the total cost. The next step makes up
    for the difference to that share.
    """

    def __init__(self) -> None:
        self._members: set[Sequence] = set()
        self._total = 0
        self._ready: list[Sequence] = []
        self._deficit = 0.0

    @property
    def load(self) -> DecodeLoad:
        return DecodeLoad(len(self._members), self._total)

    def make_ready(self, sequences: list[Sequence]) -> None:
        """Mark `sequences` ready; call it for every new token, before anything else happens to them."""
        if self._members.issuperset(sequences):
            self._total += decodes_cost(0, len(sequences))
        else:
            new = [sequence for sequence in sequences if sequence not in self._members]
            self._total += sum(map(_cost, new)) + decodes_cost(0, len(sequences) - len(new))
            self._members.update(new)
        self._ready += sequences

    def discard(self, sequence: Sequence) -> None:
        """Remove `sequence` if it is in the queue."""
        if sequence not in self._members:
            return
        self._members.remove(sequence)
        self._total -= _cost(sequence)
        if sequence in self._ready:
            self._ready.remove(sequence)

    def take(self, num_steps: int, *, max_sequences: int) -> list[Sequence]:
        """Take the ready sequences of the next of `num_steps` steps, in queue order."""
        share = self._total / num_steps
        count, budget = self._count_in(share + self._deficit, max_sequences)
        taken, self._ready = self._ready[:count], self._ready[count:]
        self._deficit = max(-share, budget) if self._ready and count < max_sequences else 0.0
        taken.sort(key=_ORDER)
        return taken

    def _count_in(self, budget: float, max_sequences: int) -> tuple[int, float]:
        """Return how many of the first ready sequences fit, and the rest of the budget."""
        if len(self._ready) <= max_sequences and budget >= self._total:
            return len(self._ready), budget
        count = 0
        for sequence in self._ready:
            cost = _cost(sequence)
            if count == max_sequences or (count and budget < cost / 2):
                break
            budget -= cost
            count += 1
        return count, budget

    def clear(self) -> None:
        self._deficit = 0.0
        self._members.clear()
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


def check_logprobs(sequence: Sequence, entry: RowDetail, chunk: StepSlice | None) -> None:
    """Raise ResultMismatch unless the row of `sequence` has exactly the requested log-probabilities.

    `chunk` is the row's slice, or None for a decode.
    """
    outcome = entry.outcome
    if isinstance(outcome, int) and (entry.logprobs is None) == sequence.wants_logprobs:
        problem = "missing" if sequence.wants_logprobs else "unexpected"
        raise ResultMismatch(f"{problem} log-probabilities for a token of {sequence.key}")
    if chunk is None or not chunk.is_scored or isinstance(outcome, SliceError):
        return
    wanted = sequence.num_prompt_logprobs(chunk.first_position, len(chunk.tokens))
    if len(entry.prompt_logprobs) != wanted:
        raise ResultMismatch(
            f"{sequence.key} got {len(entry.prompt_logprobs)} prompt log-probabilities for "
            f"{len(chunk.tokens)} tokens from {chunk.first_position} on, expected {wanted}"
        )
