"""Journal of accepted requests and their progress; accepted requests survive a restart.

A step is one row for all its requests, so a write takes some ten microseconds (`bench/journal.py`), and
happens when the step completes, before any reader gets its tokens. A request's progress is the sum of
these rows. To delete old rows, progress up to row `compacted_until` is moved into the request's own row.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from coordinator.journal.clock import ClockAnchor, HostClocks, JournalClock
from coordinator.journal.database import JournalFile, ServedIdentity, checkpoint, empty_log
from coordinator.journal.records import (
    INVALID,
    AcceptedRequest,
    End,
    Entry,
    JournalFailed,
    JournalledRequest,
    RequestProgress,
    count_in,
    decode_progress,
    decode_step,
    decode_tokens,
    encode_progress,
    encode_step,
    encode_tokens,
    time_in,
)
from coordinator.journal.tables import Changes
from wire.ids import RequestId
from wire.sampling import GrammarSpec

_Value = TypeVar("_Value")
_ID_BYTES = 16

PAGE_BYTES = 4096
PROBE_BYTES = 256 * 1024
"""Free space required to resume writing after a failure: enough for some requests and steps."""
EVERY_PAGES = 512
MOST_PAGES = 4096
"""Beyond 16 MiB, a checkpoint blocks writers to empty the log, which is reused only once it is empty."""


class Checkpoints:
    """Checkpoints run one at a time, on their own thread and connection, while the writer continues."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._running: Future[int] | None = None
        self._num_pages = 0

    def note_write(self, size_bytes: int) -> None:
        """Count a transaction with `size_bytes` of values."""
        self._num_pages += 2 + size_bytes // PAGE_BYTES

    def run_if_due(self, writer: sqlite3.Connection) -> None:
        """Start a checkpoint if due. Raises sqlite3.Error, also for the previous checkpoint."""
        if self._running is not None:
            if not self._running.done():
                return
            running, self._running = self._running, None
            if running.result() > MOST_PAGES:
                checkpoint(writer, "RESTART")
        if self._num_pages >= EVERY_PAGES:
            self._num_pages = 0
            self._running = self._thread.submit(self._checkpoint)

    def probe(self) -> Future[None]:
        """Empty the log, and write and delete `PROBE_BYTES`, on the thread. The future raises
        sqlite3.Error.
        """
        self._running = None
        return self._thread.submit(self._probe)

    def close(self) -> None:
        """Wait for the current checkpoint, then end the thread."""
        self._thread.shutdown()

    def _probe(self) -> None:
        with closing(self._connect()) as connection:
            empty_log(connection)
            connection.execute("INSERT OR REPLACE INTO probe VALUES (1, zeroblob(?))", (PROBE_BYTES,))
            connection.execute("DELETE FROM probe")
            checkpoint(connection, "PASSIVE")

    def _checkpoint(self) -> int:
        """Returns the number of pages in the log."""
        with closing(self._connect()) as connection:
            return checkpoint(connection, "PASSIVE")


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """A request with its number in the journal, and the last log row included in its own row."""

    number: int
    compacted_until: int
    request: JournalledRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalContents:
    """Contents of a journal. Log rows are [first_row, last_row]; numbers up to `last_row` are not reused."""

    requests: list[ReplayedRequest]
    epoch: int
    has_served: bool
    first_row: int
    last_row: int
    clock: ClockAnchor | None = None


EMPTY = JournalContents(requests=[], epoch=0, has_served=False, first_row=1, last_row=0)


def read_journal(connection: sqlite3.Connection) -> JournalContents:
    """Raises one of `INVALID` for invalid rows."""
    requests = replay(connection)
    meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    first, last = connection.execute("SELECT min(number), max(number) FROM log").fetchone()
    last_row = max(last or 0, *(request.compacted_until for request in requests), 0)
    first_row = last_row + 1 if first is None else first
    return JournalContents(
        requests=requests,
        epoch=_counted(meta["epoch"]),
        has_served=bool(meta.get("has_served", 0)),
        first_row=first_row,
        last_row=_counted(last_row),
        clock=ClockAnchor.decode(meta["clock"]),
    )


def replay(connection: sqlite3.Connection) -> list[ReplayedRequest]:
    """Requests in order of acceptance. Raises one of `INVALID`."""
    replayed = {request.number: request for request in _requests(connection)}
    for row, at, text in connection.execute("SELECT number, at, entries FROM log ORDER BY number"):
        for number, entry in decode_step(text):
            known = replayed.get(number)
            if known is not None and row > known.compacted_until:
                known.request.progress.add(entry, time_in(at))
    for known in replayed.values():
        known.request.progress.check()
    return list(replayed.values())


def _requests(connection: sqlite3.Connection) -> Iterator[ReplayedRequest]:
    deadlines = dict(connection.execute("SELECT number, deadline_at FROM deadlines"))
    ends = {number: rest for number, *rest in connection.execute("SELECT number, at, kind, text FROM ends")}
    query = "SELECT number, until_row, output FROM progress"
    compacted = {number: rest for number, *rest in connection.execute(query)}
    for number, *columns, after_row, _ in connection.execute("SELECT * FROM requests ORDER BY number"):
        accepted = _accepted(*columns)
        if number in deadlines:
            accepted = replace(accepted, deadline_at=_optional_time(deadlines[number]))
        until_row, output = compacted.get(number, (after_row, None))
        progress = RequestProgress() if output is None else decode_progress(output)
        end = _end(*ends[number]) if number in ends else None
        request = JournalledRequest(accepted=accepted, progress=progress, end=end)
        yield ReplayedRequest(number, _of(int, until_row), request)


def _end(at: Any, kind: Any, text: Any) -> End:
    return End(time_in(at), _of(str, kind), _of(str, text))


def _optional_time(value: Any) -> float | None:
    return None if value is None else time_in(value)


def _of(kind: type[_Value], value: Any) -> _Value:
    """`value`; SQLite stores values of any type in any column. Raises TypeError."""
    if type(value) is not kind:
        raise TypeError(f"{value!r:.100} where {kind.__name__} is expected")
    return value


def _counted(value: Any) -> int:
    """Raises TypeError, and ValueError for a number that leaves none to count on."""
    if not 0 <= (number := _of(int, value)) < 2**62:
        raise ValueError(f"number {number}")
    return number


def _accepted(
    request_id: bytes,
    client: str,
    message: bytes,
    prompt: bytes,
    bad_words: str,
    grammar: str | None,
    grammar_checksum: str | None,
    arrived_at: float,
    deadline_at: float | None,
    traceparent: str,
    caller_traceparent: str,
    attach_digest: bytes,
) -> AcceptedRequest:
    words: list[list[Any]] = json.loads(bad_words)
    spec = None
    if grammar is not None and grammar_checksum is not None:
        spec = GrammarSpec(definition=_of(str, grammar), tokenizer_checksum=int(grammar_checksum))
    return AcceptedRequest(
        request_id=RequestId(_id(request_id)),
        client=_of(str, client),
        message=_of(bytes, message),
        prompt=decode_tokens(prompt),
        bad_words=tuple(tuple(count_in(token) for token in word) for word in words),
        grammar=spec,
        arrived_at=time_in(arrived_at),
        deadline_at=_optional_time(deadline_at),
        traceparent=_of(str, traceparent),
        caller_traceparent=_of(str, caller_traceparent),
        attach_digest=_of(bytes, attach_digest),
    )


def _id(value: bytes) -> bytes:
    if len(_of(bytes, value)) != _ID_BYTES:
        raise ValueError(f"request id of {len(value)} bytes, expected {_ID_BYTES}")
    return value


LOG_ROWS = 4096
"""Steps after which a request's progress is moved into its own row, so that log rows can be deleted."""

MOST_AT_ONCE = 256
"""Requests to compact, and four times as many rows to delete, per call on the event loop."""


@dataclass(slots=True)
class _Known:
    number: int
    compacted_until: int


class Journal:
    """The only writer. `epoch` is the highest of former coordinators, 0 for none."""

    def __init__(self, path: Path, identity: ServedIdentity, host: HostClocks | None = None) -> None:
        """Open or create the journal at `path`. Raises JournalUnusable; the file is then unchanged."""
        self.path = path
        host = host or HostClocks()
        self._file = JournalFile(path, identity, host.boot_id())
        try:
            left = self._read()
            self.clock = JournalClock(host, left.clock)
            self._file.open(self.clock.anchor)
        except BaseException:
            self._file.close()
            raise
        self.epoch = left.epoch
        self.has_served = left.has_served
        self._requests = [replayed.request for replayed in left.requests]
        self._known = {
            replayed.request.accepted.request_id: _Known(replayed.number, replayed.compacted_until)
            for replayed in left.requests
        }
        self._last_number = max((replayed.number for replayed in left.requests), default=0)
        self._first_row, self._last_row = left.first_row, left.last_row
        self._checkpoints = Checkpoints(self._file.connect)

    def has(self, request_id: RequestId) -> bool:
        return request_id in self._known

    @property
    def ids(self) -> list[RequestId]:
        """Ids of all journalled requests, in order of acceptance."""
        return list(self._known)

    def take_requests(self) -> list[JournalledRequest]:
        """Return a former coordinator's requests in order of acceptance, and drop them. Call once."""
        requests, self._requests = self._requests, []
        return requests

    def accept(self, accepted: AcceptedRequest, *, replaces: RequestId | None = None) -> None:
        """Record a new request instead of one with its id, and of `replaces`.

        Raises JournalFailed, like all writes.
        """
        grammar, former = accepted.grammar, {accepted.request_id, replaces or accepted.request_id}
        number = self._last_number + 1
        with self._writing(4 * len(accepted.prompt) + len(accepted.message)) as changes:
            self._delete(changes, former)
            changes.put(
                "requests",
                number,
                accepted.request_id,
                accepted.client,
                accepted.message,
                encode_tokens(accepted.prompt),
                json.dumps(accepted.bad_words),
                None if grammar is None else grammar.definition,
                None if grammar is None else str(grammar.tokenizer_checksum),
                float(accepted.arrived_at),
                _optional_time(accepted.deadline_at),
                accepted.traceparent,
                accepted.caller_traceparent,
                accepted.attach_digest,
                self._last_row,
            )
        self._last_number = number
        for request_id in former:  # so that the new request is the last one
            self._known.pop(request_id, None)
        self._known[accepted.request_id] = _Known(number, self._last_row)

    def add_step(self, entries: Sequence[Entry], *, at: float) -> None:
        """Record the entries of one step."""
        numbered = [(self._known[entry.request_id].number, entry) for entry in entries]
        text = encode_step(numbered)
        with self._writing(len(text)) as changes:
            changes.put("log", self._last_row + 1, float(at), text)
        self._last_row += 1

    def set_deadline(self, request_id: RequestId, deadline_at: float | None) -> None:
        """Change the deadline, after another call attached."""
        with self._writing() as changes:
            changes.put("deadlines", self._known[request_id].number, _optional_time(deadline_at))

    def end(self, request_id: RequestId, end: End) -> None:
        """Record the error that ended a request; finishing is recorded by its steps."""
        with self._writing() as changes:
            changes.put("ends", self._known[request_id].number, float(end.at), end.kind, end.text)

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """Delete requests; unknown ids are ignored."""
        known = [request_id for request_id in request_ids if request_id in self._known]
        if not known:
            return
        with self._writing() as changes:
            self._delete(changes, known)
        for request_id in known:
            del self._known[request_id]

    def set_epoch(self, epoch: int) -> None:
        with self._writing() as changes:
            changes.put("meta", "epoch", epoch)

    def set_served(self) -> None:
        """Record that the cluster has served."""
        if not self.has_served:
            with self._writing() as changes:
                changes.put("meta", "has_served", 1)
            self.has_served = True

    def due_to_compact(self) -> list[RequestId]:
        """Requests that prevent the deletion of old rows, the oldest first, up to a limit."""
        ages = [(each, self._last_row - known.compacted_until) for each, known in self._known.items()]
        if max((age for _, age in ages), default=0) <= LOG_ROWS:
            return []
        return [request_id for request_id, age in ages if age > LOG_ROWS // 2][:MOST_AT_ONCE]

    def compact(self, progress: Sequence[tuple[RequestId, RequestProgress]]) -> None:
        """Move the progress of these requests into their own rows."""
        known = [(self._known[request_id], each) for request_id, each in progress]
        rows = [(of.number, encode_progress(each)) for of, each in known]
        with self._writing(sum(len(output) for _, output in rows)) as changes:
            for number, output in rows:
                changes.put("progress", number, self._last_row, output)
        for entry, _ in known:
            entry.compacted_until = self._last_row

    def trim(self) -> None:
        """Delete unneeded rows and release their space; to be called periodically."""
        compacted = (known.compacted_until for known in self._known.values())
        until = min(min(compacted, default=self._last_row), self._first_row + 4 * MOST_AT_ONCE)
        if until >= self._first_row:
            with self._writing() as changes:
                changes.delete("log", range(self._first_row, until + 1))
            self._first_row = until + 1
            with self._failures():
                self._connection.execute("PRAGMA incremental_vacuum(256)").fetchall()
        if (anchor := self.clock.moved_anchor()) is not None:
            with self._writing() as changes:
                changes.put("meta", "clock", anchor.encode())
            self.clock.anchor = anchor
        with self._failures():
            self._checkpoints.run_if_due(self._connection)

    def probe(self) -> Future[None]:
        """Try to write on another thread, after a failed write. The future raises sqlite3.Error."""
        return self._checkpoints.probe()

    def reconnect(self) -> None:
        """Resume writing after a successful probe."""
        with self._failures():
            self._file.reconnect()

    def close(self) -> None:
        """Close the file and release its locks. Call once."""
        self._checkpoints.close()
        self._file.close()

    def failed(self, error: BaseException) -> JournalFailed:
        """Convert an SQLite error."""
        return JournalFailed(f"journal {self.path} cannot be written: {error}")

    @property
    def _connection(self) -> sqlite3.Connection:
        return self._file.connection

    def _read(self) -> JournalContents:
        """Contents of the checked copy. Raises JournalUnusable."""
        committed = self._file.committed
        if committed is None:
            return EMPTY
        try:
            with closing(committed):
                return read_journal(committed)
        except (*INVALID, sqlite3.Error) as error:
            raise self._file.damaged(repr(error)) from error

    def _delete(self, changes: Changes, request_ids: Iterable[RequestId]) -> None:
        numbers = [self._known[each].number for each in request_ids if each in self._known]
        for table in ("requests", "deadlines", "ends", "progress"):
            changes.delete(table, numbers)

    @contextmanager
    def _writing(self, size_bytes: int = 0) -> Iterator[Changes]:
        """A transaction of `size_bytes` of values."""
        with self._failures(), self._file.transaction() as changes:
            yield changes
        self._checkpoints.note_write(size_bytes)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self.failed(error) from error
