"""The scheduler: decides what the next step computes. Pure: no clock, no random ids, no I/O.

A step takes decodes first, then prompt chunks up to the token budget:

* Decodes are distributed evenly by cost over the steps in flight, so that sequences that arrived together do
  not stay in one step while other stages idle.
* Chunks of a prompt follow each other without waiting for results. The next prompt is admitted only after
  the last chunk of the previous one, but a shorter one of another client alternates with a long one, step by
  step. Its blocks must be available beside those of the long one, so two partly admitted prompts never wait
  for each other's blocks. The chunk size depends on the decodes in the pipeline
  (`coordinator.scheduler.policy`).
* Clients of one priority take turns: the next sequence is one of the client with the fewest running, and of
  several such clients the one whose last turn is the longest ago.
* A decode without a free block preempts a sequence of the priority that is last in queue order, the last one
  of the client with the most running there, and tries again in the same pass. So the first sequence in queue
  order always progresses.
* A sequence whose token is late, because the mask of its grammar is, waits for a later result. If no step is
  in flight, an empty one asks for it.
* After a worker loss, the sequences of unfinished steps run apart (`coordinator.scheduler.isolation`).
"""

from collections import Counter
from collections.abc import Iterable

from coordinator.recovery.policy import RecoveryPolicy
from coordinator.scheduler.batch import (
    DecodeQueue,
    SchedulerCounts,
    SequenceUpdate,
    StepBuilder,
    check_logprobs,
)
from coordinator.scheduler.cost_model import CostModel, cost_of_step
from coordinator.scheduler.in_flight import OverdueStep, StepsInFlight
from coordinator.scheduler.isolation import Isolation
from coordinator.scheduler.kv_manager import KvCacheManager
from coordinator.scheduler.policy import BatchingPolicy, PrefillLoad, SchedulerLimits, StepPlan
from coordinator.scheduler.sequence import (
    FinishReason,
    Release,
    Sequence,
    SequenceState,
    UsedRestartCounts,
)
from coordinator.scheduler.sequence_queue import SequenceQueue
from kvcache import ActiveSequence, OutOfBlocks
from stageline_rpc.internal.v1 import step_pb2
from wire.errors import GrammarFailed, SliceFailed, require
from wire.ids import SequenceKey
from wire.steps import (
    EndRecord,
    RowDetail,
    SliceError,
    Step,
    StepResult,
    StepSlice,
    identity_of,
    split_identities,
)

MAX_RECORD_BYTES = 4 * 1024 * 1024
"""Size of the start records of a step above which it starts no further sequence."""

QUEUE_LOOKAHEAD = 64
"""Queued sequences that count as waiting prefill, far more than one step takes."""


class Scheduler:
    """Owns the queue, the running sequences, the KV ledger and the steps in flight, across epochs."""

    def __init__(self, policy: RecoveryPolicy) -> None:
        self._queue = SequenceQueue()
        self._preempted: list[Sequence] = []
        self._requeued: list[Sequence] = []
        self._running: dict[SequenceKey, Sequence] = {}
        self._prefilling: dict[SequenceKey, Sequence] = {}
        self._has_given_way = False
        self._decoding = DecodeQueue()
        self._late: dict[SequenceKey, Sequence] = {}
        self._burst_tokens = 0
        self._in_flight = StepsInFlight(policy)
        self.isolation = Isolation()
        self._admits_new = True
        self._ends: list[EndRecord] = []
        self._used = UsedRestartCounts()
        self._epoch = 0
        self._next_step_id = 0
        self._is_lent = False
        self._kv: KvCacheManager | None = None
        self._limits: SchedulerLimits | None = None
        self._batching: BatchingPolicy | None = None
        self.cost_model = CostModel()
        self.counts = SchedulerCounts()

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def queue(self) -> tuple[Sequence, ...]:
        """Sequences without blocks, in queue order."""
        return tuple(self._queue)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences with blocks, in the order of their start."""
        return tuple(self._running.values())

    @property
    def kv(self) -> KvCacheManager | None:
        """The KV ledger of the current epoch; None between epochs."""
        return self._kv

    def begin_epoch(
        self, epoch: int, kv: KvCacheManager, limits: SchedulerLimits, *, admits_new: bool = True
    ) -> None:
        """Start an epoch with an empty ledger and all sequences in the queue.

        Without `admits_new`, only preempted sequences run.

        Raises:
            ValueError: `epoch` is not above the last one, or a step holds less than one block, so that a
                prompt longer than a step could never start.
        """
        if epoch <= self._epoch:
            raise ValueError(f"epoch {epoch} does not follow epoch {self._epoch}")
        if limits.max_step_tokens < kv.block_size:
            raise ValueError(
                f"max_step_tokens {limits.max_step_tokens} is less than one block of {kv.block_size} tokens"
            )
        require(not self._running and not self._in_flight, "epoch started before the last one ended")
        self._epoch, self._kv, self._limits = epoch, kv, limits
        self._batching = BatchingPolicy(limits, self.cost_model)
        self._next_step_id = 0
        self._admits_new = admits_new

    def lend_epoch(self) -> tuple[KvCacheManager, int] | None:
        """Lend the ledger and the next step id, for steps without sequences of requests.

        None unless the scheduler is idle. `next_step` returns None until `reclaim_epoch`.
        """
        is_busy = self._queue or self._running or self._in_flight or self._ends
        if self._kv is None or self._is_lent or is_busy or self._kv.has_pending:
            return None
        self._is_lent = True
        return self._kv, self._next_step_id

    def add_lent_step(self, step: Step, now_s: float) -> None:
        """Track a sent step of the lent epoch in `overdue_step`."""
        assert self._is_lent
        self._in_flight.add(step, cost_of_step(step), now_s)

    def record_lent_result(self, now_s: float) -> None:
        """Record the result of the oldest step of the lent epoch.

        Its time is not learned: steps that score every position take longer than most.
        """
        assert self._is_lent
        self._in_flight.pop_unchecked(now_s)

    def reclaim_epoch(self, *, next_step_id: int) -> None:
        """End the loan after all results before `next_step_id`; no block may be in use."""
        assert self._is_lent and self._kv is not None and not self._kv.has_pending and not self._in_flight
        self._is_lent, self._next_step_id = False, next_step_id

    @property
    def isolated_sequence(self) -> Sequence | None:
        """The suspect that runs alone now, or None."""
        return next(filter(self.isolation.is_alone, self._running.values()), None)

    def stop_admitting(self) -> None:
        """Start no new sequence for the rest of the epoch."""
        self._admits_new = False

    def end_epoch(self) -> None:
        """Discard all steps in flight; running sequences return to the queue with their tokens."""
        for sequence in self._running.values():
            sequence.preempt()
            self._queue.add(sequence)
        self._preempted.clear()
        self._requeued.clear()
        self._running.clear()
        self._prefilling.clear()
        self._decoding.clear()
        self._late.clear()
        self._in_flight.clear()
        self._ends.clear()
        self._used.clear()
        self._kv = self._limits = self._batching = None
        self._is_lent = False

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence into the queue by its order."""
        require(sequence.state.is_queued, f"sequence {sequence.key} queued in state {sequence.state.name}")
        sequence.start_at_restart_count(self._used.first_unused(sequence.key))
        self._queue.add(sequence)

    def drop(self, sequence: Sequence, state: SequenceState) -> None:
        """End a live sequence as CANCELLED or FAILED; its blocks are freed with the next step."""
        sequence.end(state)
        self._remove(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence as FINISHED because of its text.

        It may be in a step that was sent after its last token, whose token is then discarded. Or queued: it
        was requeued after its last token, or that token was buffered for the journal.
        """
        sequence.finish(reason)
        self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        if sequence.key in self._running:
            self._end_running(sequence)
        else:
            self.isolation.discard(sequence)
            self._used.record_end(sequence.key, sequence.restart_count)
            self._queue.remove(sequence)

    def step_in_flight(self, step_id: int) -> Step | None:
        """The step with this id, or None if it is not in flight."""
        return self._in_flight.find(step_id)

    def sequences_in_step(self, step_id: int) -> list[Sequence]:
        """Live sequences with a slice of their current start in a step in flight."""
        step = self._in_flight.find(step_id)
        return [] if step is None else self._owners([step])

    @property
    def unfinished(self) -> list[Sequence]:
        """Live sequences with a slice of their current start in any step in flight, or with a late token."""
        in_flight = self._owners(self._in_flight.steps)
        return [*in_flight, *(late for late in self._late.values() if late not in in_flight)]

    def overdue_step(self, now_s: float, *, unknown_s: float) -> OverdueStep | None:
        """The oldest step in flight if it is overdue; `unknown_s` is the limit before steps were measured."""
        return self._in_flight.overdue(now_s, self.cost_model.step_us, unknown_s=unknown_s)

    def _owners(self, steps: Iterable[Step]) -> list[Sequence]:
        identities = dict.fromkeys(
            identity for step in steps for identity in split_identities(step.decodes.identities)
        )
        chunks = (chunk for step in steps for chunk in step.chunks)
        identities |= dict.fromkeys(identity_of(chunk.sequence, chunk.restart_count) for chunk in chunks)
        return [sequence for sequence in self._running.values() if sequence.identity in identities]

    @property
    def max_steps_in_flight(self) -> int:
        """Current pipeline depth; 0 between epochs."""
        if self._batching is None:
            return 0
        return self._batching.steps_in_flight(self._decoding.load, self._prefill_load)

    @property
    def _prefill_load(self) -> PrefillLoad:
        waiting = self._num_waiting_tokens
        is_alone = len(self._running) + len(self._queue) == 1
        return PrefillLoad(max(self._burst_tokens, waiting), waiting, is_alone)

    def next_step(self, now_s: float) -> Step | None:
        """Build the next step; None if there is no work or the pipeline is full.

        A step without slices carries only records and KV signals, or asks for late tokens.
        """
        kv, limits, batching = self._kv, self._limits, self._batching
        if kv is None or limits is None or batching is None or self._is_lent:
            return None
        prefill = self._prefill_load
        self._burst_tokens = prefill.num_tokens if prefill.num_waiting else 0
        plan = batching.plan_step(
            self._decoding.load, prefill, num_in_flight=len(self._in_flight), now_s=now_s
        )
        if plan is None:
            return None
        builder = StepBuilder()
        # Leave room for a block: decodes that fill every step would block prompts until one of them ends.
        chunks = (1, kv.block_size) if prefill.num_waiting else (0, 0)
        max_decodes = min(limits.max_step_sequences - chunks[0], limits.max_step_tokens - chunks[1])
        self._add_decodes(builder, kv, plan.num_shares, max_decodes=max(1, max_decodes))
        self._add_chunks(builder, kv, limits, plan)
        asks_for_late = bool(self._late) and not self._in_flight
        if not builder.num_slices and not self._ends and not kv.has_pending and not asks_for_late:
            return None
        step = Step(
            epoch=self._epoch,
            step_id=self._next_step_id,
            decodes=builder.decodes,
            chunks=tuple(builder.chunks),
            starts=tuple(builder.starts),
            ends=tuple(self._ends),
            signals=kv.take_pending(),
            grows=kv.take_grows(),
            digest=kv.digest,
        )
        self._ends.clear()
        self._next_step_id += 1
        self._in_flight.add(step, builder.cost, now_s, builder.answered)
        batching.record_step(self._decoding.load, plan, builder.cost, now_s)
        return step

    def complete(self, result: StepResult, now_s: float) -> list[SequenceUpdate]:
        """Apply the result of the oldest step in flight.

        Results of earlier starts are discarded. Raises ResultMismatch if the result does not fit the step.
        """
        completed = self._in_flight.take(result, now_s)
        tokens = None if self.isolation.is_active else completed.plain_tokens
        rows = list(completed.rows()) if tokens is None else []
        self._late |= {sequence.key: sequence for sequence, entry, _ in rows if entry.is_late}
        rows += self._take_late(result)
        for sequence, entry, chunk in rows:
            check_logprobs(sequence, entry, chunk)
        cost = completed.sent.cost
        if not cost.is_empty:  # its result waits for masks, which says nothing of other steps
            self._in_flight.record_result(completed, self.cost_model.step_us(cost))
        self.cost_model.observe(cost, result.stage_times, (now_s - completed.sent.sent_s) * 1e6)
        updates = [] if tokens is None else self._accept_tokens(completed.sent.answered, tokens)
        news = [row for row in rows if not row[1].is_late or row[1].prompt_logprobs]
        return updates + [self._advance(*row, result.step_id) for row in news]

    def _take_late(self, result: StepResult) -> list[tuple[Sequence, RowDetail, StepSlice | None]]:
        """Late rows of sequences that wait for them; those of earlier starts are left out."""
        taken: list[tuple[Sequence, RowDetail, StepSlice | None]] = []
        for late in result.late_rows:
            sequence = self._late.get(late.sequence)
            if sequence is not None and sequence.identity == late.identity:
                del self._late[late.sequence]
                taken.append((sequence, late.detail(), None))
        return taken

    def _accept_tokens(self, sequences: list[Sequence], tokens: tuple[int, ...]) -> list[SequenceUpdate]:
        reasons = Sequence.accept_tokens(sequences, tokens)
        self._decoding.make_ready(sequences)
        if not any(reasons):
            return list(map(SequenceUpdate, sequences, tokens))
        rows = list(zip(sequences, tokens, reasons, strict=True))
        for sequence, _, reason in rows:
            if reason is not None:
                self._end_running(sequence)
        return [
            SequenceUpdate(sequence, token if sequence.max_tokens else None, finish_reason=reason)
            for sequence, token, reason in rows
        ]

    def _advance(
        self,
        sequence: Sequence,
        entry: RowDetail,
        chunk: StepSlice | None,
        step_id: int,
    ) -> SequenceUpdate:
        outcome = entry.outcome
        if isinstance(outcome, SliceError):
            return self._fail(sequence, outcome, step_id)
        scores = entry.prompt_logprobs
        if scores and chunk is not None:
            scores = sequence.accept_prompt_logprobs(chunk.first_position, scores)
        if outcome is None:
            return SequenceUpdate(sequence, prompt_logprobs=scores)
        reason = sequence.accept_token(outcome)
        self._decoding.make_ready([sequence])
        if reason is not None:
            self._end_running(sequence)
        elif self.isolation.on_token(sequence):
            self._requeue(sequence)
            self._requeued.append(sequence)
        if sequence.max_tokens == 0:
            return SequenceUpdate(sequence, prompt_logprobs=scores, finish_reason=reason)
        return SequenceUpdate(sequence, outcome, entry.logprobs, scores, reason)

    def _fail(self, sequence: Sequence, error: SliceError, step_id: int) -> SequenceUpdate:
        sequence.end(SequenceState.FAILED)
        self._end_running(sequence, keep_content=False)
        is_grammar = error.kind == step_pb2.SliceError.KIND_GRAMMAR
        kind = GrammarFailed if is_grammar else SliceFailed
        return SequenceUpdate(sequence, error=kind(f"stage {error.stage}, step {step_id}: {error.message}"))

    def _end_running(self, sequence: Sequence, *, keep_content: bool = True) -> None:
        """Remove a running sequence that ended; its blocks are freed with the next step."""
        self._stop_running(sequence)
        self.isolation.discard(sequence)
        self._used.record_end(sequence.key, sequence.restart_count)
        self._release(sequence.release(), keep_content=keep_content)

    def take_preempted(self) -> list[Sequence]:
        """Take the sequences that were preempted for blocks since the last call."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def take_requeued(self) -> list[Sequence]:
        """Take the sequences that were requeued for suspects since the last call."""
        requeued, self._requeued = self._requeued, []
        return requeued

    def _requeue(self, sequence: Sequence) -> None:
        """Return a running sequence to the queue with its tokens."""
        self._stop_running(sequence)
        self._release(sequence.preempt())
        self._queue.add(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        del self._running[sequence.key]
        self._late.pop(sequence.key, None)
        self._prefilling.pop(sequence.key, None)
        self._decoding.discard(sequence)

    def _release(self, release: Release, *, keep_content: bool = True) -> None:
        assert self._kv is not None
        if release.end is not None:
            self._ends.append(release.end)
        if release.active is not None:
            self._kv.release(release.key, release.active, keep_content=keep_content)

    def _add_decodes(
        self, builder: StepBuilder, kv: KvCacheManager, num_steps: int, *, max_decodes: int
    ) -> None:
        taken = self._decoding.take(num_steps, max_sequences=max_decodes)
        num_preemptions = self.counts.num_preemptions
        needy = Sequence.without_slot(taken)
        for sequence in kv.grow(needy) if needy else ():
            # A sequence may have been preempted for an earlier one of this loop.
            if sequence.can_decode:
                self._allocate_slot(sequence, kv)
        if self.counts.num_preemptions > num_preemptions:
            taken = [sequence for sequence in taken if sequence.can_decode]
        builder.add_decodes(taken)

    def _allocate_slot(self, sequence: Sequence, kv: KvCacheManager) -> None:
        """Allocate a slot for the newest token, unless `sequence` itself must be preempted."""
        try:
            kv.append(sequence)
        except OutOfBlocks:
            self._make_room(sequence, kv)

    def _make_room(self, sequence: Sequence, kv: KvCacheManager) -> None:
        """Preempt until the newest token of `sequence` has a block, or `sequence` is preempted."""
        while True:
            victim = self._victim()
            self._preempt(victim)
            if victim is sequence:
                return
            try:
                kv.append(sequence)
                return
            except OutOfBlocks:
                continue

    def _victim(self) -> Sequence:
        """Of the priority of the last sequence in queue order: the last one of the client with the most.

        So the first one in queue order is preempted only if no other is running.
        """
        last = max(sequence.order for sequence in self._running.values()).priority
        running = [sequence for sequence in self._running.values() if sequence.order.priority is last]
        num_of = Counter(sequence.client for sequence in running)
        return max(running, key=lambda sequence: (num_of[sequence.client], sequence.order))

    def _num_running_of(self) -> Counter[str]:
        return Counter(sequence.client for sequence in self._running.values())

    def _preempt(self, victim: Sequence) -> None:
        self._requeue(victim)
        self._preempted.append(victim)
        self.counts.num_preemptions += 1

    def _add_chunks(
        self, builder: StepBuilder, kv: KvCacheManager, limits: SchedulerLimits, plan: StepPlan
    ) -> None:
        while (
            builder.num_slices < limits.max_step_sequences
            and builder.num_tokens < limits.max_step_tokens
            and builder.record_bytes < MAX_RECORD_BYTES
        ):
            room = limits.max_step_tokens - builder.num_tokens
            sequence = self._next_prefill(builder, kv, plan, room)
            if sequence is None or not self._add_chunk(sequence, builder, kv, plan, room):
                return
            if sequence.can_prefill:
                # The policy ended the chunk: the rest is for the next step, or for the one after it.
                self._prefilling[sequence.key] = self._prefilling.pop(sequence.key)
                return

    def _next_prefill(
        self, builder: StepBuilder, kv: KvCacheManager, plan: StepPlan, room: int
    ) -> Sequence | None:
        """The sequence of the next chunk. At most every second step begins with a prompt that was admitted
        beside an unfinished one.
        """
        first = next(iter(self._prefilling.values()), None)
        if first is None:
            return self._admit(self._next_in_queue(), builder, kv, plan, room)
        if not builder.chunks:
            self._has_given_way = not self._has_given_way and self._gives_way(first)
            if self._has_given_way:
                shorter = self._admit(self._next_in_queue(), builder, kv, plan, room)
                return first if shorter is None else shorter
        return first

    def _gives_way(self, first: Sequence) -> bool:
        """Whether the next of the queue is a shorter prompt of another client, and `first` the only one."""
        if len(self._prefilling) > 1 or not self._admits_new or self.isolation.is_active:
            return False
        shorter = self._queue.fairest(self._num_running_of())
        return (
            shorter is not None
            and shorter.client != first.client
            and shorter.order.priority >= first.order.priority
            and shorter.num_tokens < first.num_uncomputed_prefill_tokens
        )

    def _admit(
        self, sequence: Sequence | None, builder: StepBuilder, kv: KvCacheManager, plan: StepPlan, room: int
    ) -> Sequence | None:
        """Admit `sequence` of the queue, if all its blocks are available; no other overtakes it.

        Its first chunk must fit into this step, because a sequence owns its cached blocks only from its first
        chunk on, and other sequences may evict them before.
        """
        if sequence is None:
            return None
        admission = kv.plan(sequence)
        prefilling = self._prefilling.values()
        if not kv.can_admit(admission, is_alone=not self._running, prefilling=prefilling):
            return None
        first, end = admission.num_cached_tokens, sequence.num_tokens
        if not self._chunk_size(admission.active, first, end, builder, kv, plan, room):
            return None
        self._queue.admit(sequence)
        self._running[sequence.key] = self._prefilling[sequence.key] = sequence
        sequence.begin_prefill(admission.active, num_cached_tokens=admission.num_cached_tokens)
        if sequence.num_restarts == 0:
            self.counts.num_prompt_tokens += sequence.num_prompt_tokens
            self.counts.num_cached_tokens += sequence.num_cached_tokens
        return sequence

    def _next_in_queue(self) -> Sequence | None:
        if self.isolation.is_active:
            return self.isolation.next_sequence(self._queue, is_busy=bool(self._running or self._in_flight))
        if self._admits_new:
            return self._queue.fairest(self._num_running_of())
        return next((sequence for sequence in self._queue if sequence.state is SequenceState.PREEMPTED), None)

    def _add_chunk(
        self,
        sequence: Sequence,
        builder: StepBuilder,
        kv: KvCacheManager,
        plan: StepPlan,
        room: int,
    ) -> bool:
        """Add a chunk of `sequence`; False if the budget or the blocks do not allow one."""
        start = sequence.num_computed_tokens
        end = sequence.num_prefill_tokens
        size = self._chunk_size(sequence.kv, start, end, builder, kv, plan, room)
        if size == 0:
            return False
        try:
            size = kv.allocate(sequence.key, sequence.kv, start + size, first_query=start) - start
        except OutOfBlocks:
            return False
        builder.add_chunk(sequence, *sequence.take_chunk(size))
        if not sequence.can_prefill:
            del self._prefilling[sequence.key]
        return True

    def _chunk_size(
        self,
        active: ActiveSequence,
        start: int,
        end: int,
        builder: StepBuilder,
        kv: KvCacheManager,
        plan: StepPlan,
        room: int,
    ) -> int:
        """Tokens of the next chunk of a prefill from `start` to `end`; 0 if it does not fit.

        The first chunk of a step reaches at least the next block boundary.
        """
        allowed = plan.chunk_tokens(builder.cost, start=start, end=end)
        if allowed and not builder.cost.chunk_tokens:
            allowed = max(allowed, kv.block_size - start % kv.block_size)
        return kv.chunk_size(active, start, end, min(room, allowed))

    @property
    def _num_waiting_tokens(self) -> int:
        """Tokens of waiting prefill, over the first sequences of the queue."""
        queued = sum(sequence.num_tokens for sequence in self._queue.first(QUEUE_LOOKAHEAD))
        return queued + sum(sequence.num_uncomputed_prefill_tokens for sequence in self._prefilling.values())
