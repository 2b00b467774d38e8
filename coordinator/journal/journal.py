"""Journal of accepted requests and their progress; accepted requests survive a restart.

A step is one row for all its requests, so a write takes some ten microseconds (`bench/journal.py`), and
happens when the step completes, before any reader gets its tokens. A request's progress is the sum of
these rows. To delete old rows, progress up to row `compacted_until` is moved into the request's own row.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from coordinator.journal.database import ServedIdentity, connect, damaged, open_database
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

    def __init__(self, path: Path) -> None:
        self._path = path
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
                writer.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
        if self._num_pages >= EVERY_PAGES:
            self._num_pages = 0
            self._running = self._thread.submit(self._checkpoint)

    def probe(self) -> Future[None]:
        """Write and delete `PROBE_BYTES`, and empty the log, on the thread. The future raises
        sqlite3.Error.
        """
        self._running = None
        return self._thread.submit(self._probe)

    def close(self) -> None:
        """Wait for the current checkpoint, then end the thread."""
        self._thread.shutdown()

    def _probe(self) -> None:
        with closing(connect(self._path)) as connection:
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('probe', zeroblob(?))", (PROBE_BYTES,))
            connection.execute("DELETE FROM meta WHERE key = 'probe'")
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def _checkpoint(self) -> int:
        """Returns the number of pages in the log."""
        with closing(connect(self._path)) as connection:
            _, num_pages, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            return int(num_pages)


_COLUMNS = (
    "number, id, client, message, prompt, bad_words, grammar, grammar_checksum, arrived_at, deadline_at, "
    "traceparent, caller_traceparent, attach_digest, ended_at, error_kind, error_text, compacted, "
    "compacted_until"
)


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
    for row in connection.execute(f"SELECT {_COLUMNS} FROM requests ORDER BY number"):
        number, *given, compacted, compacted_until = row
        progress = RequestProgress() if compacted is None else decode_progress(compacted)
        *accepted, ended_at, kind, text = given
        end = None if ended_at is None else End(time_in(ended_at), _of(str, kind), _of(str, text))
        request = JournalledRequest(accepted=_accepted(*accepted), progress=progress, end=end)
        yield ReplayedRequest(number, _of(int, compacted_until), request)


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
        deadline_at=None if deadline_at is None else time_in(deadline_at),
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

    def __init__(self, path: Path, identity: ServedIdentity) -> None:
        """Open or create the journal at `path`. Raises JournalUnusable."""
        self.path = path
        self._database = open_database(path, identity)
        try:
            left = read_journal(self._database.connection)
        except (*INVALID, sqlite3.Error) as error:
            self._database.close()
            raise damaged(path, repr(error)) from error
        self.epoch = left.epoch
        self.has_served = left.has_served
        self._requests = [replayed.request for replayed in left.requests]
        self._known = {
            replayed.request.accepted.request_id: _Known(replayed.number, replayed.compacted_until)
            for replayed in left.requests
        }
        self._first_row, self._last_row = left.first_row, left.last_row
        self._checkpoints = Checkpoints(path)

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

    def accept(self, accepted: AcceptedRequest) -> None:
        """Record a new request, replacing a former one with its id. Raises JournalFailed, like all writes."""
        grammar = accepted.grammar
        row = (
            *(accepted.request_id, accepted.client, accepted.message, encode_tokens(accepted.prompt)),
            json.dumps(accepted.bad_words),
            grammar and grammar.definition,
            grammar and str(grammar.tokenizer_checksum),
            *(accepted.arrived_at, accepted.deadline_at),
            *(accepted.traceparent, accepted.caller_traceparent, accepted.attach_digest, self._last_row),
        )
        with self._writing(4 * len(accepted.prompt) + len(accepted.message)):
            cursor = self._connection.execute(_INSERT_REQUEST, row)
        assert cursor.lastrowid is not None
        self._known.pop(accepted.request_id, None)  # so that the new request is the last one
        self._known[accepted.request_id] = _Known(cursor.lastrowid, self._last_row)

    def add_step(self, entries: Sequence[Entry], *, at: float) -> None:
        """Record the entries of one step."""
        numbered = [(self._known[entry.request_id].number, entry) for entry in entries]
        text = encode_step(numbered)
        with self._writing(len(text)):
            # A failed write may have reached the file, so a repeated one replaces it.
            self._connection.execute(
                "INSERT OR REPLACE INTO log VALUES (?, ?, ?)", (self._last_row + 1, at, text)
            )
        self._last_row += 1

    def set_deadline(self, request_id: RequestId, deadline_at: float | None) -> None:
        """Change the deadline, after another call attached."""
        with self._writing():
            self._connection.execute(
                "UPDATE requests SET deadline_at = ? WHERE number = ?",
                (deadline_at, self._known[request_id].number),
            )

    def end(self, request_id: RequestId, end: End) -> None:
        """Record the error that ended a request; finishing is recorded by its steps."""
        with self._writing():
            self._connection.execute(
                "UPDATE requests SET ended_at = ?, error_kind = ?, error_text = ? WHERE number = ?",
                (end.at, end.kind, end.text, self._known[request_id].number),
            )

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """Delete requests; unknown ids are ignored."""
        known = {
            request_id: self._known[request_id].number
            for request_id in request_ids
            if request_id in self._known
        }
        if not known:
            return
        with self._writing():
            self._connection.execute(
                "DELETE FROM requests WHERE number IN (SELECT value FROM json_each(?))",
                (json.dumps(list(known.values())),),
            )
        for request_id in known:
            del self._known[request_id]

    def set_epoch(self, epoch: int) -> None:
        with self._writing():
            self._connection.execute("UPDATE meta SET value = ? WHERE key = 'epoch'", (epoch,))

    def set_served(self) -> None:
        """Record that the cluster has served."""
        if not self.has_served:
            with self._writing():
                self._connection.execute("INSERT OR REPLACE INTO meta VALUES ('has_served', 1)")
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
        rows = [(encode_progress(each), self._last_row, of.number) for of, each in known]
        with self._writing(sum(len(text) for text, _, _ in rows)):
            self._connection.execute("BEGIN")
            self._connection.executemany(
                "UPDATE requests SET compacted = ?, compacted_until = ? WHERE number = ?", rows
            )
            self._connection.execute("COMMIT")
        for entry, _ in known:
            entry.compacted_until = self._last_row

    def trim(self) -> None:
        """Delete unneeded rows and release their space; to be called periodically."""
        compacted = (known.compacted_until for known in self._known.values())
        until = min(min(compacted, default=self._last_row), self._first_row + 4 * MOST_AT_ONCE)
        if until >= self._first_row:
            with self._writing():
                self._connection.execute("DELETE FROM log WHERE number <= ?", (until,))
                self._connection.execute("PRAGMA incremental_vacuum(256)").fetchall()
            self._first_row = until + 1
        with self._writing():
            self._checkpoints.run_if_due(self._connection)

    def probe(self) -> Future[None]:
        """Try to write on another thread, after a failed write. The future raises sqlite3.Error."""
        return self._checkpoints.probe()

    def reconnect(self) -> None:
        """Resume writing after a successful probe."""
        with self._writing():
            self._database.reconnect()

    def close(self) -> None:
        """Close the file and release its lock. Call once."""
        self._checkpoints.close()
        self._database.close()

    def failed(self, error: BaseException) -> JournalFailed:
        """Convert an SQLite error."""
        return JournalFailed(f"journal {self.path} cannot be written: {error}")

    @property
    def _connection(self) -> sqlite3.Connection:
        return self._database.connection

    def _roll_back(self) -> None:
        """Roll back if needed: SQLite ends some failed transactions itself, and leaves others open."""
        with suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    @contextmanager
    def _writing(self, size_bytes: int = 0) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            self._roll_back()
            raise self.failed(error) from error
        self._checkpoints.note_write(size_bytes)


_INSERT_REQUEST = """
INSERT OR REPLACE INTO requests (
    id, client, message, prompt, bad_words, grammar, grammar_checksum, arrived_at,
    deadline_at, traceparent, caller_traceparent, attach_digest, compacted_until
)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
