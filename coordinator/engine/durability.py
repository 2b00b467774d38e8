"""Journals requests before clients see them, and restores them after a restart."""

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
class RequestEnd:
    """When a request ended, and its error unless it finished."""

    at_s: float
    error: ServingError | None = None

    def shifted(self, offset_s: float) -> "RequestEnd":
        """Convert to a clock that is ahead by `offset_s`."""
        return RequestEnd(self.at_s + offset_s, self.error)


def restore(request: Request, progress: RequestProgress, end: End | None) -> RequestEnd | None:
    """Restore journaled output into a request without output.

    Returns:
        The end of the request in the journal's time; None if it is still live.
    """
    request.add_prompt_logprobs(progress.prompt_logprobs)
    for choice in request.choices:
        known = progress.choices.get(choice.index, ChoiceProgress())
        _restore_choice(choice, known, num_scored=0 if choice.index else len(progress.prompt_logprobs))
    if end is not None:
        for sequence in request.live_sequences:
            sequence.end(SequenceState.FAILED)
        return RequestEnd(end.at, _error(end))
    return RequestEnd(progress.last_at) if request.is_finished else None


def _restore_choice(choice: Choice, known: ChoiceProgress, *, num_scored: int) -> None:
    tokens, reason = tuple(known.tokens), known.finish_reason
    for index, token in enumerate(tokens):
        # The stop string that ended the output is found again, at the last token.
        if choice.buffer.append(token, known.logprobs[index] if known.logprobs else None):
            reason = FinishReason.STOP
    counts = {"num_cached_tokens": known.num_cached_tokens, "num_restarts": known.num_restarts}
    if reason is None:
        choice.sequence.restore(tokens, num_scored=num_scored, **counts)
    else:
        choice.buffer.finish(reason)
        choice.sequence.restore_finished(tokens, reason=reason, **counts)


def _error(end: End) -> ServingError:
    kinds = {kind.__name__: kind for kind in STATUS_OF_ERROR}
    return kinds.get(end.kind, ServingError)(end.text)


_Owner = tuple[str, RequestId]
"""A tenant and its name for a request."""


def _owner(request: Request) -> _Owner:
    return request.tenant, request.name


class _Records:
    """Requests in the journal, one of each owner.

    A record may outlive its request until the journal is swept, while the owner uses the name again.
    """

    def __init__(self) -> None:
        self._ids: dict[_Owner, RequestId] = {}
        self._owners: dict[RequestId, _Owner] = {}

    def id_of(self, owner: _Owner) -> RequestId | None:
        return self._ids.get(owner)

    def owner_of(self, request_id: RequestId) -> _Owner | None:
        return self._owners.get(request_id)

    def add(self, request: Request) -> None:
        """Instead of the one with its id, and the one of its owner."""
        owner = _owner(request)
        for former in (request.id, self._ids.get(owner)):
            if former is not None:
                self.remove(former)
        self._ids[owner], self._owners[request.id] = request.id, owner

    def remove(self, request_id: RequestId) -> None:
        if (owner := self._owners.pop(request_id, None)) is not None:
            del self._ids[owner]


SUSPENDED = "the coordinator is stopping; the request continues after its restart"


class Durability:
    """Journals accepted requests and their output; does nothing without a `journal`.

    While writes fail (see `failure`), new requests are rejected and the records of running requests are
    buffered. A finished request stays in the journal for `reattach_timeout_s`, because its last tokens may
    not have reached the client when this process ends.
    """

    def __init__(
        self,
        journal: Journal | None = None,
        reattach_timeout_s: float = 60.0,
        *,
        policy: RecoveryPolicy,
    ) -> None:
        self.journal = journal
        self.reattach_timeout_s = reattach_timeout_s
        self.is_suspended = False
        self.on_change: Callable[[], None] = lambda: None
        """Called when `failure` is set or cleared."""
        self._writer = None if journal is None else JournalWriter(journal, lambda: self.on_change(), policy)
        self._records = _Records()
        self._retained: dict[RequestId, float] = {}
        """Times until which finished requests stay in the journal."""
        self._num_steps = 0

    @property
    def failure(self) -> str | None:
        """Error of the last write, until one succeeds; None without a journal."""
        return None if self._writer is None else self._writer.failure

    @property
    def num_unwritten(self) -> int:
        """Buffered records of running requests."""
        return 0 if self._writer is None else self._writer.num_waiting

    def check_not_suspended(self) -> None:
        """Raise RequestSuspended after `suspend`."""
        if self.is_suspended:
            raise RequestSuspended(SUSPENDED)

    def check(self) -> None:
        """Raise JournalUnavailable while writes fail, and RequestSuspended after `suspend`."""
        self.check_not_suspended()
        if self.failure is not None:
            raise JournalUnavailable(
                f"journal write failed, new requests are rejected until one succeeds: {self.failure}"
            )

    def retains_for_another(self, request_id: RequestId, tenant: str) -> bool:
        """Whether a finished request of another tenant with this id may be attached to after a restart."""
        owner = self._records.owner_of(request_id) if request_id in self._retained else None
        return owner is not None and owner[0] != tenant

    def restored(self, request: Request) -> None:
        """The journal has this request of a former coordinator."""
        self._records.add(request)

    def accept(self, request: Request, accepted: AcceptedRequest | None) -> None:
        """Journal a request before it is accepted. Raises JournalUnavailable if the write fails.

        It replaces one that has ended, to which its tenant gave the same name.
        """
        self.check()
        journal, writer = self.journal, self._writer
        if journal is not None and writer is not None and accepted is not None:
            former = self._records.id_of(_owner(request))
            writer.try_write(lambda: journal.accept(accepted, replaces=former))
            self.check()
            if former is not None:
                self._retained.pop(former, None)
            self._records.add(request)

    def set_deadline(self, request: Request, deadline_s: float | None, *, now_s: float) -> None:
        """Journal a new deadline, given on the clock of `now_s`; None means no deadline."""
        journal = self._journal_of(request)
        if journal is not None:
            clock = journal.clock
            deadline_at = None if deadline_s is None else clock.to_journal(deadline_s, now_s=now_s)
            self._write(("deadline", request.id), lambda: journal.set_deadline(request.id, deadline_at))

    def add_step(self, updates: Sequence[SequenceUpdate]) -> None:
        """Journal the updates of a step. Its output must not be delivered while writes fail."""
        journal = self.journal
        if journal is None:
            return
        known = (update for update in updates if journal.has(update.sequence.key.request_id))
        entries = [_entry(update) for update in known if update.error is None]
        if entries:
            at = journal.clock.now_at()
            self._num_steps += 1
            self._write(("step", self._num_steps), lambda: journal.add_step(entries, at=at))

    def rewrite(self, request: Request) -> None:
        """Journal the whole output, after a client has shortened it.

        Without effect while writes fail: a restarted coordinator then generates what was cut off again.
        """
        journal, writer = self._journal_of(request), self._writer
        if journal is not None and writer is not None:
            progress = progress_of(request, journal.clock.now_at())
            writer.try_write(lambda: journal.compact([(request.id, progress)]))

    def end(self, request: Request) -> None:
        """Journal the end of a request, or remove a request that is not kept."""
        journal, writer = self._journal_of(request), self._writer
        if journal is None or writer is None:
            return
        if request.error is None:
            if request.keep_s is None:
                self._retained[request.id] = journal.clock.now_at() + self.reattach_timeout_s
        elif request.is_kept:
            end = End(journal.clock.now_at(), type(request.error).__name__, str(request.error))
            self._write(("end", request.id), lambda: journal.end(request.id, end))
        else:
            self._forget(request, journal)

    def begin_epoch(self, epoch: int) -> None:
        """Journal the epoch number: a restarted coordinator starts with a higher one."""
        journal = self.journal
        if journal is not None:
            self._write("epoch", lambda: journal.set_epoch(epoch))

    def record_served(self) -> None:
        """Journal that the cluster has served: a restarted coordinator need not wait for all stages."""
        journal = self.journal
        if journal is not None:
            self._write("served", journal.set_served)

    def retry(self, now_s: float) -> None:
        """Try to write buffered records. Call periodically."""
        if self._writer is not None:
            self._writer.retry(now_s)

    def sweep(self, registry: RequestRegistry) -> None:
        """Remove requests that left the registry, and compact the journal. Call periodically."""
        journal, writer = self.journal, self._writer
        if journal is not None and writer is not None:
            writer.try_write(lambda: self._prune(journal, registry))

    def suspend(self) -> bool:
        """Stop journaling and leave the requests to a restarted coordinator. False without a journal."""
        journal, writer = self.journal, self._writer
        self.journal = self._writer = None
        if journal is None or writer is None:
            return False
        writer.flush()
        journal.close()
        self.is_suspended = True
        return True

    def _prune(self, journal: Journal, registry: RequestRegistry) -> None:
        now_at = journal.clock.now_at()
        for request_id in [each for each, until_at in self._retained.items() if until_at <= now_at]:
            del self._retained[request_id]
        gone = [
            request_id
            for request_id in journal.ids
            if request_id not in self._retained and not registry.has(request_id)
        ]
        journal.forget(gone)
        for request_id in gone:
            self._records.remove(request_id)
        due_ids = filter(registry.has, journal.due_to_compact())
        due = [registry.find(request_id) for request_id in due_ids]
        if due:
            journal.compact([(request.id, progress_of(request, now_at)) for request in due])
        journal.trim()

    def _forget(self, request: Request, journal: Journal) -> None:
        """Remove a request from the journal; `sweep` tries again."""
        if self._writer is not None and self._writer.try_write(lambda: journal.forget([request.id])):
            self._records.remove(request.id)

    def _journal_of(self, request: Request) -> Journal | None:
        return self.journal if self.journal is not None and self.journal.has(request.id) else None

    def _write(self, key: Hashable, write: Callable[[], None]) -> None:
        if self._writer is not None:
            self._writer.write(key, write)


def progress_of(request: Request, now_at: float) -> RequestProgress:
    """The whole output of a request, for one journal record."""
    return RequestProgress(
        prompt_logprobs=request.known_prompt_logprobs,
        choices={
            choice.index: ChoiceProgress(
                tokens=list(choice.sequence.generated_tokens),
                logprobs=choice.buffer.generated_logprobs,
                finish_reason=choice.buffer.finish_reason,
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
