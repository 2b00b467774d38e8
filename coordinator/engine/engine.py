"""Binds scheduler, pipeline and clients: events in, steps and tokens out.

Everything here runs on the event loop without awaiting, so there is one owner and no lock. After each event
the engine hands out steps for as long as the scheduler has any.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items

from coordinator.engine.admission import Admission, AdmissionLimits, RetryAfterEstimator, misfit
from coordinator.engine.durability import SUSPENDED, Durability, Ended
from coordinator.engine.observer import EngineObserver, Observers
from coordinator.engine.output_stream import OutputStream, Positions
from coordinator.engine.request import Choice, Request, RequestRegistry, RequestTotals, check_attach_secret
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


DEADLINE_SLACK_S = 0.05


class Engine:
    """Owner of the scheduler and of the requests."""

    def __init__(
        self,
        limits: AdmissionLimits,
        *,
        policy: RecoveryPolicy,
        clock: Callable[[], float] = time.monotonic,
        durability: Durability | None = None,
        observers: Items[EngineObserver] = (),
    ) -> None:
        self._limits = limits
        self._durability = durability or Durability(policy=policy)
        self._clock = clock
        self._scheduler = Scheduler(policy)
        self._registry = RequestRegistry()
        self._pace = RetryAfterEstimator()
        self.admission = Admission(limits, self._registry, self._pace)
        self._observers = Observers(observers)
        self._send: Callable[[Step], None] | None = None
        self._sent_s = deque[float]()
        self._held = list[SequenceUpdate]()
        self._max_sequence_tokens: int | None = None
        self.totals = RequestTotals()
        self.kv_feed = KvEventPublisher()

    def now_s(self) -> float:
        """The clock that deadlines are on."""
        return self._clock()

    @property
    def durability(self) -> Durability:
        """Also fed by the controller, with epochs."""
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
    def has_live_requests(self) -> bool:
        return bool(self._registry.live)

    @property
    def journal_failure(self) -> str | None:
        """Why the journal cannot be written; None while it can, and without one."""
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
    ) -> OutputStream:
        """Accepts a request, which the caller reads. `accepted` is what makes it survive this process.

        `deadline_s`, on the engine's clock, cancels it. Raises RequestExists, Overloaded when the queue is
        full, ClusterUnavailable when the plan has become too small for it, and JournalUnavailable.
        """
        self._registry.check_new(request.id)
        self.admission.check_queue(len(request.choices))
        if (error := misfit(request, self._max_sequence_tokens)) is not None:
            raise error
        self._durability.accept(accepted)
        self._registry.add(request)
        attachment = self._attach(request, Positions(), deadline_s)
        request.accepted_s = self._clock()
        self._observers.accepted(request, request.accepted_s)
        for choice in request.choices:
            self._scheduler.add(choice.sequence)
        self._pump()
        return attachment

    def attach(
        self, request_id: RequestId, positions: Positions, *, deadline_s: float | None = None
    ) -> OutputStream:
        """Reads a request from now on; the previous reader is superseded. Raises RequestNotFound, and
        InvalidRequest for positions that it does not have.

        Nothing here awaits, so this happens between two steps, and the old reader gets nothing after it.
        """
        self._durability.check_here()
        attachment = self._attach(self._registry.find(request_id), positions, deadline_s)
        self._durability.read_until(attachment.request, deadline_s, now_s=self._clock())
        return attachment

    def check_secret(self, request_id: RequestId, secret: str) -> None:
        """Raises RequestNotFound, and AttachSecretMismatch for a caller that may not have this request."""
        self._durability.check_here()
        check_attach_secret(secret, self._registry.find(request_id).attach_digest)

    def resume(self, request: Request, *, ended: Ended | None) -> None:
        """Takes a request of a former coordinator, which nobody reads yet. `ended`, on the engine's clock: it
        is kept only.
        """
        request.accepted_s = request.left_s = self._clock()
        self._registry.add(request)
        if ended is not None:
            request.end(ended.at_s, ended.error)
            self._registry.end(request)
        else:
            self._observers.accepted(request, self._clock())
        for sequence in request.live_sequences:
            self._scheduler.add(sequence)
        self._pump()

    def suspend(self) -> None:
        """Leaves what is live to the next coordinator, if there is a journal to leave it in."""
        if self._durability.suspend():
            for request in self._registry.live:
                self.fail(request, RequestSuspended(SUSPENDED))

    def leave(self, attachment: OutputStream) -> None:
        """The call of this reader has ended: the request goes on without one, or is cancelled."""
        request = attachment.request
        if request.attachment is not attachment:
            return
        request.attachment, request.left_s = None, self._clock()
        if not request.is_live:
            return
        if not self._cancel_if_late(request) and not request.is_kept:
            self._cancel(request, RequestCancelled("the client has left"))
        self._pump()

    def cancel(self, request_id: RequestId) -> None:
        """Ends a live request, whose pages are freed with the next step; forgets a kept one. Raises
        RequestNotFound.
        """
        request = self._registry.find(request_id)
        if request.is_live:
            self._cancel(request, RequestCancelled("the request was cancelled"))
            self._pump()
        else:
            self._registry.forget(request_id)

    def start_epoch(
        self,
        epoch: int,
        kv: KvCacheManager,
        limits: SchedulerLimits,
        send: Callable[[Step], None],
        *,
        max_sequence_tokens: int,
        starts_new: bool = True,
    ) -> None:
        """Begins to hand out steps through `send`, which must not block; without `starts_new`, only those of
        requests that have begun.

        A live request that was accepted under a larger plan, and can never fit under this one, fails: at the
        head of the queue it would block all others.
        """
        self._max_sequence_tokens = max_sequence_tokens
        for request in self._registry.live:
            if (error := misfit(request, max_sequence_tokens)) is not None:
                self.fail(request, error)
        self._scheduler.begin_epoch(epoch, kv, limits, starts_new=starts_new)
        self.kv_feed.begin_epoch(epoch, block_size=kv.block_size, cached_blocks=kv.cached_blocks)
        self._observers.epoch_started(epoch, self._clock())
        self._send = send
        self._pump()

    def finish_running(self) -> None:
        """Starts no queued sequence for the rest of the epoch."""
        self._scheduler.finish_running()

    @property
    def is_idle(self) -> bool:
        """Every request that has begun has ended."""
        queued = (sequence.state is SequenceState.PREEMPTED for sequence in self._scheduler.queue)
        return not self._scheduler.running and not any(queued)

    def lend_epoch(self) -> tuple[KvCacheManager, int] | None:
        """See `Scheduler.lend_epoch`. Requests that arrive wait for `take_epoch_back`."""
        return None if self._registry.live else self._scheduler.lend_epoch()

    def note_lent_step(self, step: Step) -> None:
        """A step of the lent epoch is sent: `overdue_step` judges it from now on, and subscribers learn what
        it has evicted.
        """
        self._scheduler.add_lent_step(step, self._clock())
        self.publish_kv_events()

    def note_lent_answer(self) -> None:
        """The oldest step of the lent epoch is answered."""
        self._scheduler.note_lent_answer(self._clock())

    def take_epoch_back(self, *, next_step_id: int) -> None:
        """Resumes serving."""
        self._scheduler.take_epoch_back(next_step_id=next_step_id)
        self._pump()

    def stop_epoch(self, reason: str = "") -> None:
        """Stops handing out steps; live requests go back to the queue with their tokens."""
        self._send = self._max_sequence_tokens = None
        self._sent_s.clear()
        self._scheduler.end_epoch()
        self.kv_feed.end_epoch()
        self._observers.epoch_stopped(reason, self._clock())

    def overdue_step(self, *, unknown_s: float) -> OverdueStep | None:
        """The step whose answer should have come; `unknown_s` is the limit while steps are not known."""
        return self._scheduler.overdue_step(self._clock(), unknown_s=unknown_s)

    def sequences_in_step(self, step_id: int) -> list[Sequence]:
        """The sequences of a step in flight; empty where there is no such step."""
        return self._scheduler.sequences_in_step(step_id)

    def step_in_flight(self, step_id: int) -> Step | None:
        return self._scheduler.step_in_flight(step_id)

    def fail_all(self, reason: str) -> None:
        """Fails every live request as UNAVAILABLE."""
        for request in self._registry.live:
            self.fail(request, ClusterUnavailable(reason))

    def fail_waiting(self, since_s: float, reason: str) -> None:
        """Fails as UNAVAILABLE those live requests that have been here `since_s`, on this engine's clock."""
        for request in self._registry.live:
            if request.accepted_s <= since_s:
                self.fail(request, ClusterUnavailable(reason))

    def complete(self, result: StepResult) -> int:
        """Takes the answer of LAST to the oldest step. Returns how many tokens it has brought. Raises
        ResultMismatch.
        """
        now_s = self._clock()
        progress = self._scheduler.complete(result, now_s)
        self._observers.step_answered(result, progress, self._sent_s.popleft(), now_s)
        if requeued := self._scheduler.take_requeued():
            self._observers.requeued(requeued, now_s)
        self._held += progress
        if self._durability.add_step(progress):
            self._deliver_held()
        self._pump()
        return sum(update.token is not None for update in progress)

    def sweep(self) -> None:
        """Ends expired requests; called periodically.

        Forgets output that was kept long enough, and cancels detached requests at their deadline. What nobody
        reads and nobody asked to keep is an orphan: there is no way to make one, so each is a defect that is
        counted, and its pages come back all the same.
        """
        now_s = self._clock()
        self._registry.expire(now_s)
        self._durability.retry(now_s)
        if self._durability.failure is None:
            self._deliver_held()
        self._durability.sweep(self._registry)
        for request in self._registry.live:
            if self._cancel_if_late(request) or request.attachment is not None or request.keep_s is not None:
                continue
            if request.awaited_until_s is not None:
                if request.awaited_until_s <= now_s:
                    self._cancel(request, RequestCancelled("the client did not reattach in time"))
                continue
            self._count_orphan(f"request {id_text(request.id)}", request.id)
            self._cancel(request, RequestCancelled("the request has no reader"))
        for sequence in (*self._scheduler.running, *self._scheduler.queue):
            if self._registry.live_request(sequence.key.request_id) is None:
                self._count_orphan(f"sequence {sequence.key}", sequence.key.request_id)
                self._scheduler.drop(sequence, SequenceState.CANCELLED)
        self._pump()

    def _attach(self, request: Request, positions: Positions, deadline_s: float | None) -> OutputStream:
        attachment = OutputStream(request, positions)
        if request.attachment is not None:
            request.attachment.supersede()
        request.attachment, request.deadline_s, request.awaited_until_s = attachment, deadline_s, None
        return attachment

    def _deliver_held(self) -> None:
        """Delivers what is in the journal by now."""
        held, self._held = self._held, []
        for update in held:
            self._deliver(update)

    def _deliver(self, progress: SequenceUpdate) -> None:
        key = progress.sequence.key
        request = self._registry.live_request(key.request_id)
        if request is None:
            return  # a choice of this request has failed earlier in this step
        if progress.error is not None:
            self.fail(request, progress.error)
            return
        if progress.token is not None:
            request.failures.on_token()
        try:
            request.add_prompt_logprobs(progress.prompt_logprobs)
            self._write(request.choices[key.choice], progress)
        except InvariantBroken as error:
            log.exception(
                "request %s fails: %s", id_text(request.id), error, extra=log_context(request_id=request.id)
            )
            self.fail(request, error)
            return
        if request.is_finished:
            self.totals.finished += 1
            self._end(request)
        elif (reader := request.attachment) is not None:
            reader.num_unread_tokens += progress.token is not None
            reader.wake()
            if reader.num_unread_tokens > self._limits.max_unread_tokens:
                unread, limit = reader.num_unread_tokens, self._limits.max_unread_tokens
                text = f"the client reads too slowly: {unread} tokens are unread, the limit is {limit}"
                self._cancel(request, RequestCancelled(text))

    def _write(self, choice: Choice, progress: SequenceUpdate) -> None:
        """Puts what is new into the choice's transcript; the text may end what the tokens do not."""
        reason = progress.finish_reason
        if progress.token is not None and choice.transcript.append(progress.token, progress.logprobs):
            if reason is None:
                self._scheduler.finish(choice.sequence, FinishReason.STOP)
            reason = FinishReason.STOP
        if reason is not None:
            choice.transcript.finish(reason)

    def _cancel_if_late(self, request: Request) -> bool:
        """Of a reader that leaves at its deadline, the timer and the news may be some milliseconds apart."""
        if request.deadline_s is None or self._clock() < request.deadline_s - DEADLINE_SLACK_S:
            return False
        self._cancel(request, DeadlinePassed("the request's deadline has passed"))
        return True

    def _cancel(self, request: Request, error: ServingError) -> None:
        self.totals.cancelled += 1
        self._drop(request, SequenceState.CANCELLED)
        self._end(request, error)

    def fail(self, request: Request, error: ServingError) -> None:
        """Ends a live request with `error`."""
        self.totals.failed += 1
        self._drop(request, SequenceState.FAILED)
        self._end(request, error)

    def _drop(self, request: Request, state: SequenceState) -> None:
        for sequence in request.live_sequences:
            self._scheduler.drop(sequence, state)

    def _end(self, request: Request, error: ServingError | None = None) -> None:
        now_s = self._clock()
        self._pace.note_end(now_s)
        request.end(now_s, error)
        self._registry.end(request)
        self._durability.end(request)
        self._observers.ended(request, error, now_s)

    def _count_orphan(self, what: str, request_id: RequestId) -> None:
        log.error("%s had nobody to end it: this is a defect", what, extra=log_context(request_id=request_id))
        self.totals.orphaned += 1

    def _pump(self) -> None:
        """Hands out steps, but none while the journal cannot be written: their tokens would have to wait. So
        what waits is bounded by the steps that were in flight, with one token of each sequence at most.
        """
        if self._send is None or self._durability.failure is not None:
            return
        while (step := self._scheduler.next_step(asked_s := self._clock())) is not None:
            sent_s = self._clock()
            self._observers.step_scheduled(sent_s - asked_s)
            if preempted := self._scheduler.take_preempted():
                self._observers.preempted(preempted, sent_s)
            self._observers.step_sent(step, sent_s)
            self._sent_s.append(sent_s)
            self._send(step)
        self.publish_kv_events()

    def publish_kv_events(self) -> None:
        """Tells subscribers what has entered and left the cache; needed after each change of the ledger, so
        that a snapshot and the events after it fit together.
        """
        if (kv := self._scheduler.kv) is not None:
            self.kv_feed.publish(kv.take_events())
