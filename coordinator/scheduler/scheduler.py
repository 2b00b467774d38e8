"""Decides what the next step computes. Pure: no clock, no random ids, no I/O.

A step is filled with decodes first, then with prompt chunks up to the token budget:

* Decodes are shared out evenly by cost over the steps that the pipeline needs in flight, so that sequences
  which arrived together do not stay in one step while the other stages idle.
* Prompt chunks follow each other without waiting for results; the oldest prompt takes all it can get before
  the next one is admitted, so two half-admitted prompts can never wait for each other's blocks. How long a
  chunk may take depends on the decodes that wait behind it (`coordinator.scheduler.policy`).
* A decode that finds no block preempts the sequence that is last in order, and tries again in the same pass.
  The first in order therefore always gets on, and every load ends.
* After the death of a worker, what it left unfinished runs first, apart from everything else
  (`coordinator.scheduler.isolation`).
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable
from operator import attrgetter

from coordinator.recovery.policy import RecoveryPolicy
from coordinator.scheduler.batch import (
    DecodeQueue,
    SchedulerCounts,
    SequenceUpdate,
    StepBuilder,
    check_logprobs,
)
from coordinator.scheduler.cost_model import CostModel, work_of
from coordinator.scheduler.in_flight import OverdueStep, StepsInFlight
from coordinator.scheduler.isolation import Isolation
from coordinator.scheduler.kv_manager import KvCacheManager
from coordinator.scheduler.policy import BatchingPolicy, PrefillLoad, SchedulerLimits
from coordinator.scheduler.sequence import FinishReason, Release, Sequence, SequenceState
from kvcache import OutOfBlocks
from wire.errors import SliceFailed, require
from wire.ids import SequenceKey
from wire.steps import EndRecord, SliceError, SliceResult, Step, StepResult, StepSlice

REMEMBERED = 8192
"""Ended sequences that are remembered (some 270 bytes each): more than a stage remembers, and more than can
end while a result is in flight."""


class UsedRestartCounts:
    """A request id may come again when its request has ended, and then it must not meet its own past.

    Results of the first one may still be in flight, and a stage rejects a second start with the same count.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[SequenceKey, int] = OrderedDict()

    def next_of(self, key: SequenceKey) -> int:
        """The lowest unused restart count of `key`."""
        return self._last.get(key, -1) + 1

    def note_ended(self, key: SequenceKey, restart_count: int) -> None:
        """`restart_count` was the last one of the sequence that has ended."""
        self._last[key] = restart_count
        self._last.move_to_end(key)
        if len(self._last) > REMEMBERED:
            self._last.popitem(last=False)

    def clear(self) -> None:
        """Another epoch knows nothing of this one."""
        self._last.clear()


MAX_RECORD_BYTES = 4 * 1024 * 1024
"""Of the start records of a step, which travels in one message; beyond it no further sequence is started."""

QUEUE_LOOKAHEAD = 64
"""Queued sequences that count as work to come; so many are far more than a step."""

_ORDER = attrgetter("order")


class Scheduler:
    """Owns the queue, the running sequences, the ledger and the steps in flight, epoch after epoch."""

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._queue: list[Sequence] = []
        self._preempted: list[Sequence] = []
        self._requeued: list[Sequence] = []
        self._running: dict[SequenceKey, Sequence] = {}
        self._prefilling: dict[SequenceKey, Sequence] = {}
        self._decoding = DecodeQueue()
        self._burst_tokens = 0
        self._in_flight = StepsInFlight(policy)
        self.isolation = Isolation()
        self._starts_new = True
        self._ends: list[EndRecord] = []
        self._used = UsedRestartCounts()
        self._epoch = 0
        self._next_step_id = 0
        self._is_lent = False
        self._kv: KvCacheManager | None = None
        self._limits: SchedulerLimits | None = None
        self._pace: BatchingPolicy | None = None
        self.times = CostModel()
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
    def kv(self) -> KvCacheManager | None:
        """The ledger of the present epoch; None between epochs."""
        return self._kv

    def begin_epoch(
        self, epoch: int, kv: KvCacheManager, limits: SchedulerLimits, *, starts_new: bool = True
    ) -> None:
        """Starts with an empty ledger; every sequence is in the queue, oldest first. Without `starts_new`,
        only what has begun goes on.

        Raises ValueError for an epoch that is not above the last one, and for steps that hold less than a
        block: a prompt that is longer than a step could never begin.
        """
        if epoch <= self._epoch:
            raise ValueError(f"epoch {epoch} does not follow epoch {self._epoch}")
        if limits.max_step_tokens < kv.block_size:
            raise ValueError(
                f"max_step_tokens {limits.max_step_tokens} is less than one block of {kv.block_size} tokens"
            )
        require(not self._running and not self._in_flight, "an epoch begins before the last one has ended")
        self._epoch, self._kv, self._limits = epoch, kv, limits
        self._pace = BatchingPolicy(limits, self.times)
        self._next_step_id = 0
        self._starts_new = starts_new

    def lend_epoch(self) -> tuple[KvCacheManager, int] | None:
        """The ledger and the next step's id, for steps that serve no sequence; None unless nothing waits,
        runs or is in flight. No step is handed out until `take_epoch_back`.
        """
        is_busy = self._queue or self._running or self._in_flight or self._ends
        if self._kv is None or self._is_lent or is_busy or self._kv.has_pending:
            return None
        self._is_lent = True
        return self._kv, self._next_step_id

    def add_lent_step(self, step: Step, now_s: float) -> None:
        """A step of the lent epoch is sent now; from here on `overdue_step` judges it like any other."""
        assert self._is_lent
        self._in_flight.add(step, work_of(step), now_s)

    def note_lent_answer(self, now_s: float) -> None:
        """The oldest step of the lent epoch is answered now. Nothing is learnt from it: steps that score
        every position take longer than those of most requests.
        """
        assert self._is_lent
        self._in_flight.take_unchecked(now_s)

    def take_epoch_back(self, *, next_step_id: int) -> None:
        """The steps before `next_step_id` are answered, and hold no blocks."""
        assert self._is_lent and self._kv is not None and not self._kv.has_pending and not self._in_flight
        self._is_lent, self._next_step_id = False, next_step_id

    @property
    def isolated_sequence(self) -> Sequence | None:
        """The suspect that runs now, alone; None while none does."""
        return next(filter(self.isolation.is_alone, self._running.values()), None)

    def finish_running(self) -> None:
        """From now on, in this epoch, only what has begun goes on."""
        self._starts_new = False

    def end_epoch(self) -> None:
        """Voids all steps in flight; running sequences go back to the queue with their tokens."""
        for sequence in self._running.values():
            sequence.preempt()
        self._queue = sorted((*self._running.values(), *self._queue), key=_ORDER)
        self._preempted.clear()
        self._requeued.clear()
        self._running.clear()
        self._prefilling.clear()
        self._decoding.clear()
        self._in_flight.clear()
        self._ends.clear()
        self._used.clear()
        self._kv = self._limits = self._pace = None
        self._is_lent = False

    def add(self, sequence: Sequence) -> None:
        """Puts a queued sequence into the queue, where its order says."""
        require(sequence.state.is_queued, f"sequence {sequence.key} is queued in state {sequence.state.name}")
        sequence.start_at_restart_count(self._used.next_of(sequence.key))
        insort(self._queue, sequence, key=_ORDER)

    def drop(self, sequence: Sequence, state: SequenceState) -> None:
        """Ends a live sequence as CANCELLED or FAILED; its blocks are freed with the next step that is handed
        out.
        """
        sequence.end(state)
        self._remove(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence as FINISHED, for a reason that its text gives and its tokens do not.

        It may be queued: with its last token it made way for a suspect, or that token waited for the journal.
        """
        sequence.finish(reason)
        self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        if sequence.key in self._running:
            self._leave(sequence)
        else:
            self.isolation.discard(sequence)
            self._used.note_ended(sequence.key, sequence.restart_count)
            self._queue.remove(sequence)

    def step_in_flight(self, step_id: int) -> Step | None:
        """The step with this id, if it is in flight."""
        return self._in_flight.find(step_id)

    def sequences_in_step(self, step_id: int) -> list[Sequence]:
        """Live sequences that have a slice of their present start in the step in flight with this id."""
        step = self._in_flight.find(step_id)
        return [] if step is None else self._owners([step])

    @property
    def unfinished(self) -> list[Sequence]:
        """Live sequences that have a slice of their present start in any step in flight."""
        return self._owners(self._in_flight.steps)

    def overdue_step(self, now_s: float, *, unknown_s: float) -> OverdueStep | None:
        """The oldest step in flight, if its answer should have come; `unknown_s` is for the first steps."""
        return self._in_flight.overdue(now_s, self.times.step_us, unknown_s=unknown_s)

    def _owners(self, steps: Iterable[Step]) -> list[Sequence]:
        owners = (
            (self._running.get(part.sequence), part.restart_count) for step in steps for part in step.slices
        )
        found = (
            sequence
            for sequence, restart_count in owners
            if sequence and sequence.restart_count == restart_count
        )
        return list(dict.fromkeys(found))

    @property
    def max_steps_in_flight(self) -> int:
        """How many steps the work at hand is spread over now; 0 between epochs."""
        return 0 if self._pace is None else self._pace.steps_in_flight(self._decoding.load)

    def next_step(self, now_s: float) -> Step | None:
        """The next step to send, or None when there is nothing to do or enough is in flight.

        A step without slices carries only records and frees.
        """
        kv, limits, pace = self._kv, self._limits, self._pace
        if kv is None or limits is None or pace is None or self._is_lent:
            return None
        num_steps = pace.steps_in_flight(self._decoding.load)
        if len(self._in_flight) >= num_steps:
            return None
        draft = StepBuilder()
        waiting = self._num_waiting_tokens
        self._burst_tokens = max(self._burst_tokens, waiting) if waiting else 0
        # Decodes that fill every step would leave no place for a prompt until one of them ends.
        most = min(limits.max_step_sequences, limits.max_step_tokens) - bool(waiting)
        self._add_decodes(draft, kv, num_steps, most=max(1, most))
        self._add_chunks(draft, kv, limits, pace)
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
        self._in_flight.add(step, draft.work, now_s)
        pace.note_step(self._decoding.load, prefill_us=draft.prefill_us)
        return step

    def complete(self, result: StepResult, now_s: float) -> list[SequenceUpdate]:
        """Applies the answer to the oldest step in flight, which came now.

        Results of an earlier start are discarded. Raises ResultMismatch when the answer does not fit the
        step.
        """
        answered = self._in_flight.take(result, now_s)
        answers = [
            (sequence, part, entry)
            for part, entry in answered.pairs
            if (sequence := self._running.get(part.sequence)) and sequence.restart_count == part.restart_count
        ]
        for sequence, part, entry in answers:
            check_logprobs(sequence, part, entry)
        self._in_flight.note_answer(answered, self.times.step_us(answered.work))
        self.times.observe(answered.work, result.stage_times, (now_s - answered.sent_s) * 1e6)
        return [self._advance(sequence, part, entry, result.step_id) for sequence, part, entry in answers]

    def _advance(
        self, sequence: Sequence, part: StepSlice, entry: SliceResult, step_id: int
    ) -> SequenceUpdate:
        outcome = entry.outcome
        if isinstance(outcome, SliceError):
            sequence.end(SequenceState.FAILED)
            self._leave(sequence, keep_content=False)
            where = f"stage {outcome.stage}, step {step_id}"
            return SequenceUpdate(sequence, error=SliceFailed(f"{where}: {outcome.message}"))
        scores = entry.prompt_logprobs
        if scores:
            scores = sequence.accept_prompt_logprobs(part.first_position, scores)
        if outcome is None:
            return SequenceUpdate(sequence, prompt_logprobs=scores)
        reason = sequence.accept_token(outcome)
        if reason is not None:
            self._leave(sequence)
        elif self.isolation.must_requeue(sequence):
            self._requeue(sequence)
            self._requeued.append(sequence)
        else:
            self._decoding.make_ready(sequence)
        if sequence.max_tokens == 0:
            return SequenceUpdate(sequence, prompt_logprobs=scores, finish_reason=reason)
        return SequenceUpdate(sequence, outcome, entry.logprobs, scores, reason)

    def _leave(self, sequence: Sequence, *, keep_content: bool = True) -> None:
        """A running sequence has ended: its blocks are freed with the next step."""
        self._stop_running(sequence)
        self.isolation.discard(sequence)
        self._used.note_ended(sequence.key, sequence.restart_count)
        self._release(sequence.release(), keep_content=keep_content)

    def take_preempted(self) -> list[Sequence]:
        """Those that had to give up their blocks since this was asked last."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def take_requeued(self) -> list[Sequence]:
        """Those that wait again, so that suspects run alone, since this was asked last."""
        requeued, self._requeued = self._requeued, []
        return requeued

    def _requeue(self, sequence: Sequence) -> None:
        """A running sequence waits again, with its tokens."""
        self._stop_running(sequence)
        self._release(sequence.preempt())
        insort(self._queue, sequence, key=_ORDER)

    def _stop_running(self, sequence: Sequence) -> None:
        del self._running[sequence.key]
        self._prefilling.pop(sequence.key, None)
        self._decoding.discard(sequence)

    def _release(self, release: Release, *, keep_content: bool = True) -> None:
        assert self._kv is not None
        if release.end is not None:
            self._ends.append(release.end)
        if release.active is not None:
            self._kv.release(release.key, release.active, keep_content=keep_content)

    def _add_decodes(self, draft: StepBuilder, kv: KvCacheManager, num_steps: int, *, most: int) -> None:
        slices, context = draft.slices, 0
        for sequence in self._decoding.take(num_steps, most=most):
            # An earlier one in this loop may have preempted it.
            if sequence.can_decode:
                try:
                    kv.append(sequence)
                except OutOfBlocks:
                    if not self._make_room(sequence, kv):
                        continue
                slices.append(sequence.take_decode())
                context += sequence.num_tokens
        draft.count_decodes(context)

    def _make_room(self, sequence: Sequence, kv: KvCacheManager) -> bool:
        """A block for the newest token of `sequence`; False when the sequence itself had to be preempted."""
        while True:
            victim = max(self._running.values(), key=_ORDER)
            self._preempt(victim)
            if victim is sequence:
                return False
            try:
                kv.append(sequence)
                return True
            except OutOfBlocks:
                continue

    def _preempt(self, victim: Sequence) -> None:
        self._requeue(victim)
        self._preempted.append(victim)
        self.counts.num_preemptions += 1

    def _add_chunks(
        self, draft: StepBuilder, kv: KvCacheManager, limits: SchedulerLimits, pace: BatchingPolicy
    ) -> None:
        while (
            len(draft.slices) < limits.max_step_sequences
            and draft.num_tokens < limits.max_step_tokens
            and draft.record_bytes < MAX_RECORD_BYTES
        ):
            room = limits.max_step_tokens - draft.num_tokens
            sequence = next(iter(self._prefilling.values()), None)
            if sequence is None:
                sequence = self._admit(draft, kv, pace, room)
            if sequence is None or not self._add_chunk(sequence, draft, kv, pace, room):
                return
            if sequence.can_prefill:
                return  # its pace, not the room, ends the chunk: what follows is for the next step

    def _admit(
        self, draft: StepBuilder, kv: KvCacheManager, pace: BatchingPolicy, room: int
    ) -> Sequence | None:
        """Takes the head of the queue, or a suspect, if the whole of it fits now. Nobody overtakes it.

        Its first chunk must fit into this step: cached blocks are the sequence's own from its first chunk on,
        and until then a growing sequence may evict them.
        """
        sequence = self._next_in_queue()
        if sequence is None:
            return None
        plan = kv.plan(sequence)
        if not kv.can_admit(plan, is_alone=not self._running):
            return None
        if not self._chunk_size(plan.num_cached_tokens, sequence.num_tokens, draft, kv, pace, room):
            return None
        self._queue.remove(sequence)
        self._running[sequence.key] = self._prefilling[sequence.key] = sequence
        sequence.begin_prefill(plan.active, num_cached_tokens=plan.num_cached_tokens)
        if sequence.num_restarts == 0:
            self.counts.num_prompt_tokens += sequence.num_prompt_tokens
            self.counts.num_cached_tokens += sequence.num_cached_tokens
        return sequence

    def _next_in_queue(self) -> Sequence | None:
        if self.isolation.is_active:
            return self.isolation.next_of(self._queue, is_busy=bool(self._running or self._in_flight))
        if self._starts_new:
            return self._queue[0] if self._queue else None
        return next((sequence for sequence in self._queue if sequence.state is SequenceState.PREEMPTED), None)

    def _add_chunk(
        self, sequence: Sequence, draft: StepBuilder, kv: KvCacheManager, pace: BatchingPolicy, room: int
    ) -> bool:
        """One more chunk of `sequence`; False when the budget or the blocks do not allow any."""
        start = sequence.num_computed_tokens
        size = self._chunk_size(start, sequence.num_prefill_tokens, draft, kv, pace, room)
        if size == 0:
            return False
        try:
            size = kv.allocate(sequence.key, sequence.kv, start + size, first_query=start) - start
        except OutOfBlocks:
            return False
        draft.add_chunk(sequence, *sequence.take_chunk(size))
        draft.prefill_us += pace.chunk_us(start=start, num_tokens=size)
        if not sequence.can_prefill:
            del self._prefilling[sequence.key]
        return True

    def _chunk_size(
        self, start: int, end: int, draft: StepBuilder, kv: KvCacheManager, pace: BatchingPolicy, room: int
    ) -> int:
        """Tokens of the next chunk of a prefill at `start` that ends at `end`; 0 when it does not fit now.

        Decodes may leave little time for it, but the first chunk of a step reaches the next block boundary.
        """
        prefill = PrefillLoad(self._burst_tokens, draft.work.chunk_tokens)
        allowed = pace.chunk_tokens(self._decoding.load, prefill, start=start, end=end)
        if allowed and not draft.work.chunk_tokens:
            allowed = max(allowed, kv.block_size - start % kv.block_size)
        return kv.chunk_size(start, end, min(room, allowed))

    @property
    def _num_waiting_tokens(self) -> int:
        """Prefill that is to come, as far as the first of the queue tell."""
        queued = sum(sequence.num_tokens for sequence in self._queue[:QUEUE_LOOKAHEAD])
        return queued + sum(sequence.num_uncomputed_prefill_tokens for sequence in self._prefilling.values())
