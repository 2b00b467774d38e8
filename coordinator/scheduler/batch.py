"""Step building, the decode queue, and the meaning of a step result. Pure."""

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
    """Slices and start records so far. `prefill_us`: what its chunks are expected to take."""

    slices: list[StepSlice] = field(default_factory=list)
    starts: list[StartRecord] = field(default_factory=list)
    work: StepCost = field(default_factory=StepCost)
    num_tokens: int = 0
    record_bytes: int = 0
    prefill_us: float = 0.0

    def count_decodes(self, context: int) -> None:
        """All slices so far are decodes, which attend to `context` tokens in all."""
        self.num_tokens = len(self.slices)
        self.work.decode_cost = decodes_cost(self.num_tokens, context)

    def add_chunk(self, sequence: Sequence, tokens: tuple[int, ...], prefill: Prefill) -> None:
        """A chunk that was taken from `sequence`; its start record goes before the first."""
        start = sequence.take_start_record()
        if start is not None:
            self.starts.append(start)
            self.record_bytes += start.most_bytes
        self.slices.append(StepSlice(sequence.key, sequence.restart_count, tokens, prefill))
        self.work.add_chunk(prefill.start, prefill.num_tokens)
        self.num_tokens += len(tokens)


_ORDER = attrgetter("order")


class DecodeQueue:
    """All sequences in DECODE, of which some are *ready*: their newest token is here and in no step yet.

    Those that came together must not stay in one step while the other stages idle, so a step takes ready
    ones, first come, first served, until it has its even share of the cost of all. What it takes less, or
    more, than that is made up for by the next step.
    """

    def __init__(self) -> None:
        self._costs: dict[Sequence, int] = {}
        self._total = 0
        self._ready: list[Sequence] = []
        self._owed = 0.0

    @property
    def load(self) -> DecodeLoad:
        return DecodeLoad(len(self._costs), self._total)

    def make_ready(self, sequence: Sequence) -> None:
        """`sequence` decodes, and a token of it has come."""
        cost = decodes_cost(1, sequence.num_tokens)
        self._total += cost - self._costs.get(sequence, 0)
        self._costs[sequence] = cost
        self._ready.append(sequence)

    def discard(self, sequence: Sequence) -> None:
        """`sequence` decodes no more, if it did."""
        cost = self._costs.pop(sequence, None)
        if cost is None:
            return
        self._total -= cost
        if sequence in self._ready:
            self._ready.remove(sequence)

    def take(self, num_steps: int, *, most: int) -> list[Sequence]:
        """What belongs into the next of `num_steps` steps, at most `most` sequences, first in order first."""
        share, count = self._total / num_steps, 0
        owed = share + self._owed
        for sequence in self._ready:
            cost = self._costs[sequence]
            if count == most or (count and owed < cost / 2):
                break
            owed -= cost
            count += 1
        taken, self._ready = self._ready[:count], self._ready[count:]
        self._owed = max(-share, owed) if self._ready and count < most else 0.0
        taken.sort(key=_ORDER)
        return taken

    def clear(self) -> None:
        """Nobody decodes."""
        self._owed = 0.0
        self._costs.clear()
        self._ready.clear()
        self._total = 0


@dataclass(slots=True)
class SequenceUpdate:
    """What a result changed for one sequence: a new token, prompt scores, the end of it, or its failure.

    `prompt_logprobs` follow those that came before, from the prompt's second token on.
    """

    sequence: Sequence
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: ServingError | None = None


@dataclass(slots=True)
class SchedulerCounts:
    """Since the coordinator started: preemptions, and what prompts had to compute.

    `num_prompt_tokens` are those of all sequences that were started, each once; `num_cached_tokens` of them
    came from the cache.
    """

    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


def check_logprobs(sequence: Sequence, part: StepSlice, entry: SliceResult) -> None:
    """Raises ResultMismatch before anything has changed."""
    outcome = entry.outcome
    if isinstance(outcome, int) and (entry.logprobs is None) != (sequence.sampling.logprobs is None):
        asked = "none were" if sequence.sampling.logprobs is None else "they were"
        raise ResultMismatch(f"log-probabilities of a token of {part.sequence}: {asked} asked for")
    if not part.is_scored or isinstance(outcome, SliceError):
        return
    wanted = sequence.num_prompt_logprobs(part.first_position, len(part.tokens))
    if len(entry.prompt_logprobs) != wanted:
        raise ResultMismatch(
            f"{part.sequence} got {len(entry.prompt_logprobs)} prompt log-probabilities for "
            f"{len(part.tokens)} tokens from {part.first_position} on, expected {wanted}"
        )
