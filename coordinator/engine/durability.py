"""Journals requests before clients see them, and restores them after a restart."""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from coordinator.engine.request import Choice, Request, RequestRegistry
from coordinator.journal.journal import Journal
from coordinator.journal.records import AcceptedRequest, ChoiceProgress, End, Entry, RequestProgress
from coordinator.journal.writer import JournalWriter
from coordinator.recovery.policy import RecoveryPolicy
from coordinator.scheduler.batch import SequenceUpdate
from coordinator.scheduler.sequence import FinishReason, SequenceState
from wire.errors import STATUS_OF_ERROR, JournalUnavailable, RequestSuspended, ServingError
from wire.ids import RequestId


@dataclass(frozen=True, slots=True)
class Ended:
    """When a request ended, and the error that ended it, if it did not finish."""

    at_s: float
    error: ServingError | None = None

    def on_clock(self, ahead_s: float) -> "Ended":
        """The same on a clock that shows `ahead_s` more."""
        return Ended(self.at_s + ahead_s, self.error)


def restore(request: Request, progress: RequestProgress, end: End | None) -> Ended | None:
    """Writes it into a request that has no output yet. Returns how it ended, on the wall's clock, or None:
    it is live.
    """
    request.add_prompt_logprobs(progress.prompt_logprobs)
    for choice in request.choices:
        known = progress.choices.get(choice.index, ChoiceProgress())
        _take_up(choice, known, num_scored=0 if choice.index else len(progress.prompt_logprobs))
    if end is not None:
        for sequence in request.live_sequences:
            sequence.end(SequenceState.FAILED)
        return Ended(end.at, _error(end))
    return Ended(progress.last_at) if request.is_finished else None


def _take_up(choice: Choice, known: ChoiceProgress, *, num_scored: int) -> None:
    tokens, reason = tuple(known.tokens), known.finish_reason
    for index, token in enumerate(tokens):
        # A stop string is found again where it was found before: at the last token.
        if choice.transcript.append(token, known.logprobs[index] if known.logprobs else None):
            reason = FinishReason.STOP
    counts = {"num_cached_tokens": known.num_cached_tokens, "num_restarts": known.num_restarts}
    if reason is None:
        choice.sequence.restore(tokens, num_scored=num_scored, **counts)
    else:
        choice.transcript.finish(reason)
        choice.sequence.restore_finished(tokens, reason=reason, **counts)


def _error(end: End) -> ServingError:
    kinds = {kind.__name__: kind for kind in STATUS_OF_ERROR}
    return kinds.get(end.kind, ServingError)(end.text)


SUSPENDED = "the coordinator is stopping; the request goes on when it is back"


class Durability:
    """Without a `journal` it does nothing. While the journal cannot be written (`failure` says why), no new
    request is accepted, and the records of running ones wait.

    The tokens of a request that has finished may still be on their way to its client when this process ends,
    so it stays in the journal for `reattach_timeout_s` although nobody asked to keep it.
    """

    def __init__(
        self,
        journal: Journal | None = None,
        reattach_timeout_s: float = 60.0,
        *,
        policy: RecoveryPolicy,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.journal = journal
        self.reattach_timeout_s = reattach_timeout_s
        self.wall_clock = wall_clock
        self.is_suspended = False
        self.on_change: Callable[[], None] = lambda: None
        """Called when `failure` has been set or cleared."""
        self._writer = None if journal is None else JournalWriter(journal, lambda: self.on_change(), policy)
        self._leaving: dict[RequestId, float] = {}
        self._num_steps = 0

    @property
    def failure(self) -> str | None:
        """Why the journal cannot be written now; None while it can, and without one."""
        return None if self._writer is None else self._writer.failure

    @property
    def num_unwritten(self) -> int:
        """Records of running requests that wait for the journal."""
        return 0 if self._writer is None else self._writer.num_waiting

    def check_here(self) -> None:
        """Raises RequestSuspended when requests are left to the next coordinator."""
        if self.is_suspended:
            raise RequestSuspended(SUSPENDED)

    def check(self) -> None:
        """Raises JournalUnavailable while no request can be accepted, and RequestSuspended."""
        self.check_here()
        if self.failure is not None:
            raise JournalUnavailable(
                f"no request is accepted until the journal can be written: {self.failure}"
            )

    def accept(self, accepted: AcceptedRequest | None) -> None:
        """Writes a request that is about to be accepted. Raises JournalUnavailable, and then it is not."""
        self.check()
        journal, writer = self.journal, self._writer
        if journal is not None and writer is not None and accepted is not None:
            self._leaving.pop(accepted.request_id, None)
            writer.try_write(lambda: journal.accept(accepted))
            self.check()

    def read_until(self, request: Request, deadline_s: float | None, *, now_s: float) -> None:
        """A call reads this request from now on, with its own deadline, on the clock that `now_s` is of."""
        journal = self._journal_of(request)
        if journal is not None:
            deadline_at = self.at(deadline_s, now_s=now_s)
            self._write(("deadline", request.id), lambda: journal.set_deadline(request.id, deadline_at))

    def at(self, time_s: float | None, *, now_s: float) -> float | None:
        """A time of the clock that `now_s` is of, on that of the wall."""
        return None if time_s is None else self.wall_clock() + time_s - now_s

    def add_step(self, progress: Sequence[SequenceUpdate]) -> bool:
        """Writes all that a step has brought. False: it waits to be written, and nobody may see it before."""
        journal = self.journal
        if journal is None:
            return True
        known = (update for update in progress if journal.has(update.sequence.key.request_id))
        entries = [_entry(update) for update in known if update.error is None]
        if entries:
            at = self.wall_clock()
            self._num_steps += 1
            self._write(("step", self._num_steps), lambda: journal.add_step(entries, at=at))
        return self.failure is None

    def end(self, request: Request) -> None:
        """A request has ended."""
        journal, writer = self._journal_of(request), self._writer
        if journal is None or writer is None:
            return
        if request.error is None:
            if request.keep_s is None:
                self._leaving[request.id] = self.wall_clock() + self.reattach_timeout_s
        elif request.is_kept:
            end = End(self.wall_clock(), type(request.error).__name__, str(request.error))
            self._write(("end", request.id), lambda: journal.end(request.id, end))
        else:
            writer.try_write(lambda: journal.forget([request.id]))  # else the next `sweep` does it

    def begin_epoch(self, epoch: int) -> None:
        """No coordinator after this one begins an epoch that is not above it."""
        journal = self.journal
        if journal is not None:
            self._write("epoch", lambda: journal.set_epoch(epoch))

    def note_served(self) -> None:
        """Notes that the cluster has served: the next coordinator need not wait for all stages."""
        journal = self.journal
        if journal is not None:
            self._write("served", journal.set_served)

    def retry(self, now_s: float) -> None:
        """Writes what waits, if there is room again; to be called now and then."""
        if self._writer is not None:
            self._writer.retry(now_s)

    def sweep(self, registry: RequestRegistry) -> None:
        """Forgets what the registry has forgotten, and keeps the journal short; to be called now and then."""
        journal, writer = self.journal, self._writer
        if journal is not None and writer is not None:
            writer.try_write(lambda: self._tidy(journal, registry))

    def suspend(self) -> bool:
        """Leaves journaled requests to the next coordinator. False without a journal."""
        journal, writer = self.journal, self._writer
        self.journal = self._writer = None
        if journal is None or writer is None:
            return False
        writer.flush()
        journal.close()
        self.is_suspended = True
        return True

    def _tidy(self, journal: Journal, registry: RequestRegistry) -> None:
        now_at = self.wall_clock()
        for request_id in [record for record, until_at in self._leaving.items() if until_at <= now_at]:
            del self._leaving[request_id]
        journal.forget(
            [
                request_id
                for request_id in journal.ids
                if request_id not in self._leaving and not registry.has(request_id)
            ]
        )
        due = [registry.find(request_id) for request_id in journal.due_to_fold() if registry.has(request_id)]
        if due:
            journal.fold([(request.id, progress_of(request, now_at)) for request in due])
        journal.trim()

    def _journal_of(self, request: Request) -> Journal | None:
        return self.journal if self.journal is not None and self.journal.has(request.id) else None

    def _write(self, key: Hashable, write: Callable[[], None]) -> None:
        if self._writer is not None:
            self._writer.write(key, write)


def progress_of(request: Request, now_at: float) -> RequestProgress:
    """All that a request has put out."""
    return RequestProgress(
        prompt_logprobs=request.known_prompt_logprobs,
        choices={
            choice.index: ChoiceProgress(
                tokens=list(choice.sequence.generated_tokens),
                logprobs=choice.transcript.generated_logprobs,
                finish_reason=choice.transcript.finish_reason,
                num_cached_tokens=choice.sequence.num_cached_tokens,
                num_restarts=choice.sequence.num_restarts,
            )
            for choice in request.choices
        },
        last_at=now_at,
    )


def _entry(progress: SequenceUpdate) -> Entry:
    sequence, key = progress.sequence, progress.sequence.key
    return Entry(
        key.request_id,
        key.choice,
        progress.token,
        progress.logprobs,
        progress.prompt_logprobs,
        progress.finish_reason,
        sequence.num_cached_tokens if sequence.num_generated_tokens <= 1 else 0,
        sequence.num_restarts,
    )
