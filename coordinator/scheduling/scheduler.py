"""Decides what the next step computes. Pure: no clock, no ids of its own, no I/O.

A step is filled with decodes first, then with prompt chunks up to the token budget:

* Decodes are shared out evenly over the steps that the pipeline needs in flight, so that sequences which
  arrived together do not stay in one step while the other stages idle.
* Prompt chunks follow each other without waiting for results; the oldest prompt takes all it can get before
  the next one is admitted, so two half-admitted prompts can never wait for each other's blocks.
* A decode that finds no block preempts the sequence that is last in order, and tries again in the same pass.
  The first in order therefore always gets on, and every load ends.
"""

from bisect import insort
from dataclasses import dataclass

from coordinator.scheduling.generations import UsedGenerations
from coordinator.scheduling.in_flight import ResultMismatch, StepsInFlight
from coordinator.scheduling.kv_log import KvLog
from coordinator.scheduling.lifecycle import SequenceState
from coordinator.scheduling.order import QueueOrder
from coordinator.scheduling.sequence import FinishReason, Release, Sequence
from kvcache import OutOfBlocks
from wire.errors import ServingError, SliceFailed
from wire.ids import SequenceKey
from wire.steps import (
    Decode,
    EndRecord,
    Prefill,
    Slice,
    SliceError,
    SliceResult,
    StartRecord,
    Step,
    StepResult,
    TokenLogprobs,
)

__all__ = ["Progress", "ResultMismatch", "Scheduler", "SchedulerCounts", "SchedulerLimits"]


MAX_RECORD_BYTES = 4 * 1024 * 1024
"""Of the start records of a step, which travels in one message; beyond it no further sequence is started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of a step and of the pipeline. `max_steps_in_flight` is at least the number of stages."""

    max_step_tokens: int
    max_step_sequences: int
    max_steps_in_flight: int

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_step_sequences", "max_steps_in_flight"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Progress:
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


@dataclass(slots=True)
class _Draft:
    """The step that is being put together."""

    slices: list[Slice]
    starts: list[StartRecord]
    num_tokens: int = 0
    record_bytes: int = 0

    def add(self, sequence: Sequence, tokens: tuple[int, ...], inference_step: Prefill | Decode) -> None:
        start = sequence.take_start_record()
        if start is not None:
            self.starts.append(start)
            self.record_bytes += start.most_bytes
        self.slices.append(Slice(sequence.key, sequence.generation, tokens, inference_step))
        self.num_tokens += len(tokens)


class Scheduler:
    """Owns the queue, the running sequences, the ledger and the steps in flight, epoch after epoch."""

    def __init__(self) -> None:
        self._queue: list[Sequence] = []
        self._running: dict[SequenceKey, Sequence] = {}
        self._in_flight = StepsInFlight()
        self._ends: list[EndRecord] = []
        self._used = UsedGenerations()
        self._epoch = 0
        self._next_step_id = 0
        self._kv: KvLog | None = None
        self._limits: SchedulerLimits | None = None
        self.counts = SchedulerCounts()

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def queue(self) -> tuple[Sequence, ...]:
        """Sequences that hold no blocks, first to be served first."""
        return tuple(self._queue)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that hold blocks, in the order of their start."""
        return tuple(self._running.values())

    @property
    def kv(self) -> KvLog | None:
        """The ledger of the present epoch; None between epochs."""
        return self._kv

    def begin_epoch(self, epoch: int, kv: KvLog, limits: SchedulerLimits) -> None:
        """Starts with an empty ledger; every sequence is in the queue, oldest first.

        Raises ValueError for an epoch that is not above the last one, and for steps that hold less than a
        block: a prompt that is longer than a step could never begin.
        """
        if epoch <= self._epoch:
            raise ValueError(f"epoch {epoch} does not follow epoch {self._epoch}")
        if limits.max_step_tokens < kv.block_size:
            raise ValueError(
                f"max_step_tokens {limits.max_step_tokens} is less than one block of {kv.block_size} tokens"
            )
        assert not self._running and not self._in_flight, "end_epoch comes first"
        self._epoch, self._kv, self._limits = epoch, kv, limits
        self._next_step_id = 0

    def end_epoch(self) -> None:
        """Voids all steps in flight; running sequences go back to the queue with their tokens."""
        for sequence in self._running.values():
            sequence.preempt()
        self._queue = sorted((*self._running.values(), *self._queue), key=_order)
        self._running.clear()
        self._in_flight.clear()
        self._ends.clear()
        self._used.clear()
        self._kv = None

    def add(self, sequence: Sequence) -> None:
        """Puts a WAITING sequence into the queue, where its order says."""
        assert sequence.state is SequenceState.WAITING
        sequence.start_at_generation(self._used.next_of(sequence.key))
        insort(self._queue, sequence, key=_order)

    def drop(self, sequence: Sequence, state: SequenceState) -> None:
        """Ends a live sequence as CANCELLED or FAILED; its blocks are freed with the next step that is handed
        out.
        """
        sequence.end(state)
        if sequence.key in self._running:
            self._leave(sequence)
        else:
            self._used.note_ended(sequence.key, sequence.generation)
            self._queue.remove(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a running sequence as FINISHED, for a reason that its text gives and its tokens do not."""
        sequence.finish(reason)
        self._leave(sequence)

    def sequences_in_step(self, step_id: int) -> list[Sequence]:
        """Live sequences that have a slice of their present generation in the step in flight with this id."""
        step = self._in_flight.find(step_id)
        owners = (
            (self._running.get(part.sequence), part.generation) for part in (step.slices if step else ())
        )
        return [each for each, generation in owners if each and each.generation == generation]

    def next_step(self) -> Step | None:
        """The next step to send, or None when there is nothing to do or enough is in flight.

        A step without slices carries only records and frees.
        """
        kv, limits = self._kv, self._limits
        if kv is None or limits is None or len(self._in_flight) >= limits.max_steps_in_flight:
            return None
        draft = _Draft([], [])
        self._add_decodes(draft, kv, limits)
        self._add_chunks(draft, kv, limits)
        if not draft.slices and not self._ends and not kv.has_pending:
            return None
        step = Step(
            epoch=self._epoch,
            step_id=self._next_step_id,
            slices=tuple(draft.slices),
            starts=tuple(draft.starts),
            ends=tuple(self._ends),
            signals=kv.take_pending(),
            digest=kv.digest,
        )
        self._ends.clear()
        self._next_step_id += 1
        self._in_flight.add(step)
        return step

    def complete(self, result: StepResult) -> list[Progress]:
        """Applies the answer to the oldest step in flight.

        Results of an older generation are discarded. Raises ResultMismatch when the answer does not fit the
        step.
        """
        answers = [
            (sequence, part, entry)
            for part, entry in self._in_flight.take(result)
            if (sequence := self._running.get(part.sequence)) and sequence.generation == part.generation
        ]
        for sequence, part, entry in answers:
            _check_logprobs(sequence, part, entry)
        return [self._advance(sequence, part, entry, result.step_id) for sequence, part, entry in answers]

    def _advance(self, sequence: Sequence, part: Slice, entry: SliceResult, step_id: int) -> Progress:
        outcome = entry.outcome
        if isinstance(outcome, SliceError):
            sequence.end(SequenceState.FAILED)
            self._leave(sequence, keep_content=False)
            where = f"stage {outcome.stage}, step {step_id}"
            return Progress(sequence, error=SliceFailed(f"{where}: {outcome.message}"))
        scores = sequence.accept_prompt_logprobs(part.first_position, entry.prompt_logprobs)
        if outcome is None:
            return Progress(sequence, prompt_logprobs=scores)
        reason = sequence.accept_token(outcome)
        if reason is not None:
            self._leave(sequence)
        if sequence.max_tokens == 0:
            return Progress(sequence, prompt_logprobs=scores, finish_reason=reason)
        return Progress(sequence, outcome, entry.logprobs, scores, reason)

    def _leave(self, sequence: Sequence, *, keep_content: bool = True) -> None:
        """A running sequence has ended: its blocks are freed with the next step."""
        del self._running[sequence.key]
        self._used.note_ended(sequence.key, sequence.generation)
        self._release(sequence.release(keep_content=keep_content))

    def _release(self, release: Release) -> None:
        assert self._kv is not None
        if release.end is not None:
            self._ends.append(release.end)
        if release.active is not None:
            self._kv.free(release.key, release.active, release.signals)

    def _add_decodes(self, draft: _Draft, kv: KvLog, limits: SchedulerLimits) -> None:
        num_decoding = sum(each.state is SequenceState.DECODE for each in self._running.values())
        share = -(-num_decoding // limits.max_steps_in_flight)
        room = min(share, limits.max_step_sequences, limits.max_step_tokens)
        ready = sorted((each for each in self._running.values() if each.can_decode), key=_order)
        for sequence in ready:
            if len(draft.slices) == room:
                break
            # An earlier one in this loop may have preempted it.
            if sequence.can_decode and self._grow(sequence, kv):
                token = sequence.take_decode_token()
                draft.add(sequence, (token,), Decode(sequence.num_computed_tokens - 1))

    def _grow(self, sequence: Sequence, kv: KvLog) -> bool:
        """Room for the newest token of `sequence`; False when the sequence itself had to be preempted."""
        while True:
            try:
                kv.append(sequence.key, sequence.kv, sequence.newest_token)
            except OutOfBlocks:
                victim = max(self._running.values(), key=_order)
                self._preempt(victim)
                if victim is sequence:
                    return False
            else:
                return True

    def _preempt(self, victim: Sequence) -> None:
        del self._running[victim.key]
        self._release(victim.preempt())
        insort(self._queue, victim, key=_order)
        self.counts.num_preemptions += 1

    def _add_chunks(self, draft: _Draft, kv: KvLog, limits: SchedulerLimits) -> None:
        while (
            len(draft.slices) < limits.max_step_sequences
            and draft.num_tokens < limits.max_step_tokens
            and draft.record_bytes < MAX_RECORD_BYTES
        ):
            sequence = next((each for each in self._running.values() if each.can_prefill), None)
            if sequence is None:
                sequence = self._admit(kv, limits.max_step_tokens - draft.num_tokens)
            if sequence is None or not self._add_chunk(sequence, draft, kv, limits):
                return

    def _admit(self, kv: KvLog, budget: int) -> Sequence | None:
        """Takes the head of the queue if the whole of it fits now. Nobody overtakes it.

        Its first chunk must fit into `budget` tokens: cached blocks are the sequence's own from its first
        chunk on, and until then whoever grows may evict them.
        """
        if not self._queue:
            return None
        sequence = self._queue[0]
        plan = kv.plan(sequence)
        if not kv.can_admit(plan, is_alone=not self._running):
            return None
        if not kv.chunk_size(plan.num_cached_tokens, sequence.num_tokens, budget):
            return None
        del self._queue[0]
        self._running[sequence.key] = sequence
        sequence.begin_prefill(plan.active, num_cached_tokens=plan.num_cached_tokens)
        if sequence.num_restarts == 0:
            self.counts.num_prompt_tokens += sequence.num_prompt_tokens
            self.counts.num_cached_tokens += sequence.num_cached_tokens
        return sequence

    def _add_chunk(self, sequence: Sequence, draft: _Draft, kv: KvLog, limits: SchedulerLimits) -> bool:
        """One more chunk of `sequence`; False when the budget or the blocks do not allow any."""
        start = sequence.num_computed_tokens
        size = kv.chunk_size(start, sequence.num_prefill_tokens, limits.max_step_tokens - draft.num_tokens)
        if size == 0:
            return False
        try:
            kv.allocate(sequence.key, sequence.kv, start + size, first_query=start)
        except OutOfBlocks:
            return False
        draft.add(sequence, *sequence.take_chunk(size))
        return True


def _check_logprobs(sequence: Sequence, part: Slice, entry: SliceResult) -> None:
    """Raises ResultMismatch before anything has changed."""
    if isinstance(entry.outcome, int) and (entry.logprobs is None) != (sequence.sampling.logprobs is None):
        asked = "none were" if sequence.sampling.logprobs is None else "they were"
        raise ResultMismatch(f"log-probabilities of a token of {part.sequence}: {asked} asked for")
    if not part.is_scored or isinstance(entry.outcome, SliceError):
        return
    wanted = sequence.num_prompt_logprobs(part.first_position, len(part.tokens))
    if len(entry.prompt_logprobs) != wanted:
        raise ResultMismatch(
            f"{part.sequence} got {len(entry.prompt_logprobs)} prompt log-probabilities for "
            f"{len(part.tokens)} tokens from {part.first_position} on, expected {wanted}"
        )


def _order(sequence: Sequence) -> QueueOrder:
    return sequence.order
