"""The engine: connects requests, the scheduler and the pipeline.

All methods run on the event loop without awaiting, so no lock is needed. After each event the engine sends
steps until the scheduler has none.

After a result, the next steps leave first. What does not decide them waits for the next turn of the loop, or
for the next call of the engine if that comes earlier: text and stop strings, readers, observers, KV events
(`Engine.deliver`). So other calls find every result delivered.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from coordinator.engine.admission import Admission, AdmissionLimits, RetryAfterEstimator, plan_limit_error
from coordinator.engine.durability import SUSPENDED, Durability, RequestEnd
from coordinator.engine.observer import EndCause, EngineObserver, EngineSnapshot
from coordinator.engine.output_stream import CallSoon, OpenStream, OutputStream, Positions, ReaderWakeups
from coordinator.engine.request import (
    Abandonment,
    Choice,
    Request,
    RequestRegistry,
    RequestTotals,
    check_attach_secret,
)
from coordinator.journal.records import AcceptedRequest
from coordinator.recovery.policy import RecoveryPolicy
from coordinator.scheduler.batch import SequenceUpdate
from coordinator.scheduler.in_flight import OverdueStep
from coordinator.scheduler.kv_events import KvEventPublisher
from coordinator.scheduler.kv_manager import KvCacheManager
from coordinator.scheduler.policy import SchedulerLimits
from coordinator.scheduler.scheduler import Scheduler
from coordinator.scheduler.sequence import FinishReason, Sequence, SequenceState
from wire.errors import (
    ClusterUnavailable,
    DeadlinePassed,
    InvariantBroken,
    RequestCancelled,
    RequestSuspended,
    ServingError,
)
from wire.ids import RequestId, id_text
from wire.log_context import log_context
from wire.steps import Step, StepResult

log = logging.getLogger(__name__)


UPDATES_PER_TURN = 64
"""Sequences whose output is stored per turn of the event loop, at some 5 us each with stop strings."""

DEADLINE_SLACK_S = 0.05
"""Difference allowed between gRPC's deadline timer and the engine's clock."""


def _call_soon(callback: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(callback)


class Engine:
    """Owns the scheduler and the requests."""

    def __init__(
        self,
        limits: AdmissionLimits,
        *,
        policy: RecoveryPolicy,
        clock: Callable[[], float] = time.monotonic,
        call_soon: CallSoon = _call_soon,
        durability: Durability | None = None,
        observer: EngineObserver | None = None,
    ) -> None:
        """`call_soon` calls a function in the next turn of the event loop."""
        self._limits = limits
        self._durability = durability or Durability(policy=policy)
        self._clock = clock
        self._scheduler = Scheduler(policy)
        self._registry = RequestRegistry()
        self._retry_after = RetryAfterEstimator()
        self.admission = Admission(limits, self._registry, self._retry_after)
        self._observer = observer or EngineObserver()
        self._send: Callable[[Step], None] | None = None
        self._sent_s = deque[float]()
        self._undelivered = deque[SequenceUpdate]()
        self._facts = deque[Callable[[], None]]()
        self._call_soon = call_soon
        self._is_delivery_due = self._has_freed_blocks = False
        self._readers = ReaderWakeups(call_soon, is_delivering=self._has_deliverable)
        self._max_sequence_tokens: int | None = None
        self.totals = RequestTotals()
        self._abandonment = Abandonment(self.totals)
        self.kv_events = KvEventPublisher(before_snapshot=self.publish_kv_events)

    def now_s(self) -> float:
        """Current time on the clock of deadlines."""
        return self._clock()

    @property
    def durability(self) -> Durability:
        """The controller journals epochs through it."""
        return self._durability

    @property
    def scheduler(self) -> Scheduler:
        """For reading only."""
        return self._scheduler

    @property
    def registry(self) -> RequestRegistry:
        """For reading only."""
        return self._registry

    @property
    def live_requests(self) -> list[Request]:
        """Live requests in the order of acceptance."""
        return self._registry.live

    @property
    def has_live_requests(self) -> bool:
        return bool(self._registry.live)

    def snapshot(self) -> EngineSnapshot:
        """Numbers for status and metrics."""
        requests, states = self._registry.live, [sequence.state for sequence in self.live_sequences]
        return EngineSnapshot(
            num_preparing=self.admission.num_preparing,
            num_queued=sum(state.is_queued for state in states),
            num_prefilling=states.count(SequenceState.PREFILL),
            num_decoding=states.count(SequenceState.DECODE),
            num_detached=sum(request.is_detached for request in requests),
            num_kept=self._registry.num_kept,
            num_steps_in_flight=self._scheduler.num_steps_in_flight,
            ended=replace(self.totals),
            scheduled=replace(self._scheduler.counts),
        )

    def preparing(
        self, client: str, num_sequences: int = 1, *, client_limit: int | None = None
    ) -> AbstractContextManager[None]:
        """See `Admission.preparing`."""
        return self.admission.preparing(client, num_sequences, client_limit=client_limit)

    def check_accepts(self, name: RequestId, tenant: str = "") -> None:
        """Raise JournalUnavailable or RequestSuspended, and RequestExists if the tenant uses this name."""
        self._durability.check()
        self._registry.check_new(name, tenant)

    def uses_id(self, request_id: RequestId, tenant: str = "") -> bool:
        """Whether a request has this id: a live or kept one, or a finished one of another tenant in the
        journal.
        """
        return self._registry.has(request_id) or self._durability.retains_for_another(request_id, tenant)

    @property
    def has_journal(self) -> bool:
        return self._durability.journal is not None

    @property
    def num_unwritten_records(self) -> int:
        """Records that are buffered while journal writes fail."""
        return self._durability.num_unwritten

    def is_live(self, request_id: RequestId) -> bool:
        return self._registry.live_request(request_id) is not None

    @property
    def journal_failure(self) -> str | None:
        """Error of the last journal write, until one succeeds; None without a journal."""
        return self._durability.failure

    @property
    def live_sequences(self) -> list[Sequence]:
        return [sequence for request in self._registry.live for sequence in request.live_sequences]

    def submit(
        self,
        request: Request,
        *,
        deadline_s: float | None = None,
        accepted: AcceptedRequest | None = None,
        open_stream: OpenStream = OutputStream,
    ) -> OutputStream:
        """Accept a request and queue its sequences.

        Args:
            request: a new request.
            deadline_s: time on the engine's clock at which the request is cancelled.
            accepted: the record to journal, so that the request survives a restart; None without a journal.
            open_stream: makes the stream.

        Returns:
            The stream of the request's output.

        Raises:
            RequestExists: the id is in use.
            Overloaded: the queue is full.
            ClusterUnavailable: the request is too long for the current plan.
            JournalUnavailable: the record could not be written.
        """
        self.deliver()
        self._registry.check_new(request.name, request.tenant)
        self.admission.check_queue(request.client, len(request.choices))
        if (error := plan_limit_error(request, self._max_sequence_tokens)) is not None:
            raise error
        self._durability.accept(request, accepted)
        self._registry.add(request)
        stream = self._attach(open_stream(request, Positions()), deadline_s)
        request.accepted_s = self._clock()
        self._observer.accepted(request, request.accepted_s)
        for choice in request.choices:
            self._scheduler.add(choice.sequence)
        self._send_steps()
        return stream

    def attach(
        self,
        request_id: RequestId,
        positions: Positions,
        *,
        deadline_s: float | None = None,
        observes: bool = False,
        open_stream: OpenStream = OutputStream,
    ) -> OutputStream:
        """Open a new output stream of a request.

        It supersedes the previous one between two steps, or `observes` beside it. Raises RequestNotFound,
        InvalidRequest for positions beyond the output, and Overloaded for too many observers.
        """
        self.deliver()
        self._durability.check_not_suspended()
        request = self._registry.find(request_id)
        if observes:
            return request.observe(lambda: open_stream(request, positions))
        stream = self._attach(open_stream(request, positions), deadline_s)
        self._durability.set_deadline(stream.request, deadline_s, now_s=self._clock())
        return stream

    def check_secret(self, name: RequestId, secret: str, *, tenant: str = "") -> RequestId:
        """Return the id of a tenant's request. Raises RequestNotFound and AttachSecretMismatch."""
        self._durability.check_not_suspended()
        request = self._registry.find_named(name, tenant)
        check_attach_secret(secret, request.attach_digest, tenant)
        return request.id

    def restore(self, request: Request, *, ended: RequestEnd | None) -> None:
        """Add a request that was restored from the journal, without a reader.

        `ended`, in time of the engine's clock, is set if the request has ended and only its output is kept.
        """
        request.accepted_s = request.detached_s = self._clock()
        self._registry.add(request)
        self._durability.restored(request)
        if ended is not None:
            request.end(ended.at_s, ended.error)
            self._registry.end(request)
        else:
            self._observer.accepted(request, self._clock())
        for sequence in request.live_sequences:
            self._scheduler.add(sequence)
        self._send_steps()

    def suspend(self) -> None:
        """End live requests with RequestSuspended; the journal lets a restarted coordinator continue."""
        self.deliver()
        if self._durability.suspend():
            for request in self._registry.live:
                self.fail(request, RequestSuspended(SUSPENDED))

    def detach(self, stream: OutputStream) -> None:
        """Close `stream`. Its request continues without a reader if it is kept, else it is cancelled."""
        self.deliver()
        request = stream.request
        request.drop_observer(stream)
        if request.stream is not stream:
            return
        request.stream, request.detached_s = None, self._clock()
        if request.is_live and not self._cancel_if_late(request) and not request.is_kept:
            self._cancel(request, RequestCancelled("the client disconnected"))
        self._send_steps()

    def cancel(self, request_id: RequestId) -> None:
        """Cancel a live request, or remove an ended one that is kept. Raises RequestNotFound.

        The request's blocks are freed with the next step.
        """
        self.deliver()
        request = self._registry.find(request_id)
        if request.is_live:
            self._cancel(request, RequestCancelled("the request was cancelled"))
            self._send_steps()
        else:
            self._registry.forget(request_id)

    def stop_choice(self, request: Request, index: int, *, after_token: int) -> Choice:
        """End a choice, if it is live, after its first `after_token` tokens. Raises InvalidRequest."""
        self.deliver()
        choice = request.choice_to_stop(index, after_token)
        if not request.is_live or choice.buffer.is_finished:
            return choice
        sequence = choice.sequence
        if sequence.state.is_live:
            self._scheduler.finish(sequence, FinishReason.STOP)
        self._undelivered = deque(each for each in self._undelivered if each.sequence is not sequence)
        choice.stop(after_token, now_s=self._clock())
        self._durability.rewrite(request)
        self._end_if_finished(request)
        self._send_steps()
        return choice

    def start_epoch(
        self,
        epoch: int,
        kv: KvCacheManager,
        limits: SchedulerLimits,
        send: Callable[[Step], None],
        *,
        max_sequence_tokens: int,
        admits_new: bool = True,
    ) -> None:
        """Start to send steps through `send`, which must not block.

        Without `admits_new`, only sequences that have started continue. A live request that is too long for
        this plan fails, because at the head of the queue it would block all others.
        """
        self._max_sequence_tokens = max_sequence_tokens
        for request in self._registry.live:
            if (error := plan_limit_error(request, max_sequence_tokens)) is not None:
                self.fail(request, error)
        self._scheduler.begin_epoch(epoch, kv, limits, admits_new=admits_new)
        self.kv_events.begin_epoch(epoch, block_size=kv.block_size, cached_blocks=kv.cached_blocks)
        self._observer.epoch_started(epoch, self._clock())
        self._send = send
        self._send_steps()

    def stop_admitting(self) -> None:
        """Start no new sequence for the rest of the epoch; drains the pipeline."""
        self._scheduler.stop_admitting()

    @property
    def is_idle(self) -> bool:
        """No sequence is running or preempted."""
        queued = (sequence.state is SequenceState.PREEMPTED for sequence in self._scheduler.queue)
        return not self._scheduler.running and not any(queued)

    def lend_epoch(self) -> tuple[KvCacheManager, int] | None:
        """See `Scheduler.lend_epoch`. New requests wait until `reclaim_epoch`."""
        return None if self._registry.live else self._scheduler.lend_epoch()

    def record_lent_step(self, step: Step) -> None:
        """Track a sent step of the lent epoch in `overdue_step`, and publish its evictions."""
        self._scheduler.add_lent_step(step, self._clock())
        self.publish_kv_events()

    def record_lent_result(self) -> None:
        """Record the result of the oldest step of the lent epoch."""
        self._scheduler.record_lent_result(self._clock())

    def reclaim_epoch(self, *, next_step_id: int) -> None:
        """Resume serving with step `next_step_id`."""
        self._scheduler.reclaim_epoch(next_step_id=next_step_id)
        self._send_steps()

    def stop_epoch(self, cause: EndCause | None = None, reason: str = "") -> None:
        """Stop sending steps; running sequences return to the queue with their tokens."""
        self._send = self._max_sequence_tokens = None
        self.deliver()
        self._sent_s.clear()
        self._scheduler.end_epoch()
        self.kv_events.end_epoch()
        self._observer.epoch_stopped(cause, reason, self._clock())

    def overdue_step(self, *, unknown_s: float) -> OverdueStep | None:
        """The step whose result is overdue; `unknown_s` is the limit before steps were measured."""
        return self._scheduler.overdue_step(self._clock(), unknown_s=unknown_s)

    def sequences_in_step(self, step_id: int) -> list[Sequence]:
        """The sequences of a step in flight; empty if no such step is in flight."""
        return self._scheduler.sequences_in_step(step_id)

    def step_in_flight(self, step_id: int) -> Step | None:
        return self._scheduler.step_in_flight(step_id)

    def fail_all(self, reason: str) -> None:
        """Fail every live request with ClusterUnavailable."""
        self.deliver()
        for request in self._registry.live:
            self.fail(request, ClusterUnavailable(reason))

    def fail_waiting(self, since_s: float, reason: str) -> None:
        """Fail live requests accepted at or before `since_s` (engine clock) with ClusterUnavailable."""
        self.deliver()
        for request in self._registry.live:
            if request.accepted_s <= since_s:
                self.fail(request, ClusterUnavailable(reason))

    def complete(self, result: StepResult) -> int:
        """Apply the result of the oldest step and send the next ones; `deliver` does the rest soon after.

        Returns its number of new tokens. Raises ResultMismatch. The journal, some 70 us for 64 tokens, comes
        before the next steps: a write that fails pauses them.
        """
        self.deliver()
        now_s = self._clock()
        updates = self._scheduler.complete(result, now_s)
        sent_s = self._sent_s.popleft()
        self._facts.append(partial(self._observer.step_completed, result, updates, sent_s, now_s))
        if requeued := self._scheduler.take_requeued():
            self._record_facts()  # before the next start: the observer decides whether stages trace it
            self._observer.requeued(requeued, now_s)
        self._undelivered += updates
        self._durability.add_step(updates)
        self._send_steps()
        return sum(update.token is not None for update in updates)

    def deliver(self) -> None:
        """Hand completed results to observers, requests and readers.

        Output waits while journal writes fail. A sequence that a stop string ends may be in a step that was
        sent meanwhile: that token is discarded when it arrives, as after a cancellation.
        """
        self._is_delivery_due = False
        self._record_facts()
        self._deliver_updates(len(self._undelivered))
        self.publish_kv_events()

    def _deliver_some(self) -> None:
        """`deliver`, in turns of at most `UPDATES_PER_TURN`."""
        self._is_delivery_due = False
        self._record_facts()
        self._deliver_updates(UPDATES_PER_TURN)
        if self._has_deliverable():
            self._deliver_soon()
        else:
            self.publish_kv_events()

    def _deliver_updates(self, count: int) -> None:
        """Deliver the oldest updates, unless journal writes fail."""
        if not self._has_deliverable():
            return
        for _ in range(min(count, len(self._undelivered))):
            self._deliver(self._undelivered.popleft())
        if self._has_freed_blocks:
            self._send_steps()

    def _has_deliverable(self) -> bool:
        return bool(self._undelivered) and self._durability.failure is None

    def sweep(self) -> None:
        """End expired requests. Call periodically.

        Removes expired output, and cancels requests at their deadline and what nobody waits for, so that its
        blocks are freed.
        """
        now_s = self._clock()
        self._registry.expire(now_s)
        self._durability.retry(now_s)
        self.deliver()
        self._durability.sweep(self._registry)
        for request in self._registry.live:
            if self._cancel_if_late(request):
                continue
            if (error := self._abandonment.error_of(request, now_s)) is not None:
                self._cancel(request, error)
        queued_or_running = (*self._scheduler.running, *self._scheduler.queue)
        for sequence in self._abandonment.orphans(queued_or_running, self._registry):
            self._scheduler.drop(sequence, SequenceState.CANCELLED)
        self._send_steps()

    def _attach(self, stream: OutputStream, deadline_s: float | None) -> OutputStream:
        request = stream.request
        previous, request.stream = request.stream, stream
        request.deadline_s, request.reattach_until_s = deadline_s, None
        if previous is not None:
            previous.supersede()
        return stream

    def _deliver(self, update: SequenceUpdate) -> None:
        key = update.sequence.key
        request = self._registry.live_request(key.request_id)
        if request is None:
            return  # another choice of this request failed earlier in this step
        if update.error is not None:
            self.fail(request, update.error)
            return
        if update.token is not None:
            request.failures.on_token()
        try:
            if update.prompt_logprobs:
                request.add_prompt_logprobs(update.prompt_logprobs)
            self._write(request.choices[key.choice], update)
        except Exception as error:  # any: nobody waits for this delivery, and the others must go on
            log.exception(
                "request %s failed: %s", id_text(request.id), error, extra=log_context(request_id=request.id)
            )
            known = error if isinstance(error, InvariantBroken) else None
            self.fail(request, known or InvariantBroken("output could not be stored"))
            return
        if not self._end_if_finished(request):
            self._notify(request, num_tokens=int(update.token is not None))

    def _end_if_finished(self, request: Request) -> bool:
        if is_finished := request.is_finished:
            self.totals.finished += 1
            self._end(request)
        return is_finished

    def _notify(self, request: Request, *, num_tokens: int) -> None:
        """Wake reader and observers; cancel the request if the reader lags too far behind."""
        self._readers.add(*request.streams)
        if (stream := request.stream) is None:
            return
        stream.num_unread_tokens += num_tokens
        if (unread := stream.num_unread_tokens) > (limit := self._limits.max_unread_tokens):
            text = f"the client reads too slowly: {unread} tokens are unread, the limit is {limit}"
            self._cancel(request, RequestCancelled(text))

    def _write(self, choice: Choice, update: SequenceUpdate) -> None:
        """Append an update to the choice's buffer. A stop string in the text also finishes the sequence."""
        reason = update.finish_reason
        if update.token is not None and choice.buffer.append(update.token, update.logprobs):
            if reason is None:
                self._scheduler.finish(choice.sequence, FinishReason.STOP)
                self._has_freed_blocks = True
            reason = FinishReason.STOP
        if reason is not None:
            choice.buffer.finish(reason)
        if update.token is not None and (reason is not None or choice.times.first_token_s is None):
            choice.times.on_token(self._clock())

    def _cancel_if_late(self, request: Request) -> bool:
        """Cancel a request whose deadline has passed; return whether it was cancelled."""
        if request.deadline_s is None or self._clock() < request.deadline_s - DEADLINE_SLACK_S:
            return False
        self._cancel(request, DeadlinePassed("the request deadline has passed"))
        return True

    def _cancel(self, request: Request, error: ServingError) -> None:
        self.totals.cancelled += 1
        self._drop(request, SequenceState.CANCELLED)
        self._end(request, error)

    def fail(self, request: Request, error: ServingError) -> None:
        """End a live request with `error`."""
        self.totals.failed += 1
        self._drop(request, SequenceState.FAILED)
        self._end(request, error)

    def _drop(self, request: Request, state: SequenceState) -> None:
        for sequence in request.live_sequences:
            self._scheduler.drop(sequence, state)
            self._has_freed_blocks = True

    def _end(self, request: Request, error: ServingError | None = None) -> None:
        now_s = self._clock()
        self._retry_after.record_end(now_s)
        request.end(now_s, error)
        self._readers.add(*request.streams)
        self._registry.end(request)
        self._durability.end(request)
        self._observer.ended(request, error, now_s)

    def _send_steps(self) -> None:
        """Send all steps that the scheduler has.

        Nothing is sent while journal writes fail, because new tokens could not be delivered. So at most the
        steps that were in flight are buffered, with at most one token per sequence each.
        """
        if self._send is None:
            return
        self._deliver_soon()
        self._has_freed_blocks = False
        if self._durability.failure is not None:
            return
        while (step := self._scheduler.next_step(started_s := self._clock())) is not None:
            sent_s = self._clock()
            if preempted := self._scheduler.take_preempted():
                self._record_facts()
                self._observer.preempted(preempted, sent_s)
            self._sent_s.append(sent_s)
            self._send(step)
            self._registry.note_starts(step.starts, sent_s)
            self._facts.append(partial(self._observer.step_scheduled, sent_s - started_s))
            self._facts.append(partial(self._observer.step_sent, step, sent_s))

    def _deliver_soon(self) -> None:
        if not self._is_delivery_due:
            self._is_delivery_due = True
            self._call_soon(self._deliver_some)

    def _record_facts(self) -> None:
        """Report the facts so far to the observer, in their order."""
        while self._facts:
            self._facts.popleft()()

    def publish_kv_events(self) -> None:
        """Publish the KV events of the ledger. Call after each change, so that snapshots are consistent."""
        if (kv := self._scheduler.kv) is not None:
            self.kv_events.publish(kv.take_events())
