"""The journal: what was accepted, what came of it, and when that may be forgotten.

A step is one row, whatever it has for how many requests, so a write costs some ten microseconds
(`bench/journal.py`) and is made where the step is completed, before anybody reads its tokens. What a request
has put out is the sum of these rows, or, so that the rows of old steps can go, of what it had `folded_until`
some row, and of the rows after it.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from coordinator.journal.checkpoints import Checkpoints
from coordinator.journal.codec import encode_progress, encode_step, encode_tokens
from coordinator.journal.database import ServedIdentity, damaged, open_database
from coordinator.journal.errors import JournalFailed
from coordinator.journal.records import AcceptedRequest, End, Entry, JournalledRequest, RequestProgress
from coordinator.journal.replay import read_journal
from wire.ids import RequestId

LOG_ROWS = 4096
"""Steps after which a request's share of them is folded into its own row, and they go."""

MOST_AT_ONCE = 256
"""Requests to fold, and four times as many rows to delete, in one `trim`: it runs on the event loop."""


@dataclass(slots=True)
class _Known:
    number: int
    folded_until: int


class Journal:
    """The only writer. `epoch` is the highest that a former coordinator has begun, 0 for none; `has_served`
    says whether any has served.
    """

    def __init__(self, path: Path, identity: ServedIdentity) -> None:
        """Opens the journal at `path`, or begins one there. Raises JournalUnusable."""
        self.path = path
        self._database = open_database(path, identity)
        try:
            left = read_journal(self._database.connection)
        except (ValueError, KeyError, TypeError, sqlite3.Error) as error:
            self._database.close()
            raise damaged(path, repr(error)) from error
        self.epoch = left.epoch
        self.has_served = left.has_served
        self._requests = [each.request for each in left.requests]
        self._known = {
            each.request.accepted.request_id: _Known(each.number, each.folded_until) for each in left.requests
        }
        self._first_row, self._last_row = left.first_row, left.last_row
        self._checkpoints = Checkpoints(path)

    def has(self, request_id: RequestId) -> bool:
        """It is in the journal."""
        return request_id in self._known

    @property
    def ids(self) -> list[RequestId]:
        """Of all requests that are in it, in the order in which they were accepted."""
        return list(self._known)

    def take_requests(self) -> list[JournalledRequest]:
        """What a former coordinator has left, in the order in which it was accepted. Once."""
        requests, self._requests = self._requests, []
        return requests

    def accept(self, accepted: AcceptedRequest) -> None:
        """Takes a new request, in the place of a former one of its id. Raises JournalFailed, as all do."""
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
        self._known.pop(accepted.request_id, None)  # so that the new one is the last
        self._known[accepted.request_id] = _Known(cursor.lastrowid, self._last_row)

    def add_step(self, entries: Sequence[Entry], *, at: float) -> None:
        """Takes all that one step has added."""
        numbered = [(self._known[each.request_id].number, each) for each in entries]
        text = encode_step(numbered)
        with self._writing(len(text)):
            # A write that failed may have reached the file all the same: then it is written again.
            self._connection.execute(
                "INSERT OR REPLACE INTO log VALUES (?, ?, ?)", (self._last_row + 1, at, text)
            )
        self._last_row += 1

    def set_deadline(self, request_id: RequestId, deadline_at: float | None) -> None:
        """Another call reads the request, with another deadline."""
        with self._writing():
            self._connection.execute(
                "UPDATE requests SET deadline_at = ? WHERE number = ?",
                (deadline_at, self._known[request_id].number),
            )

    def end(self, request_id: RequestId, end: End) -> None:
        """An error has ended the request. (That it finished, its steps say.)"""
        with self._writing():
            self._connection.execute(
                "UPDATE requests SET ended_at = ?, error_kind = ?, error_text = ? WHERE number = ?",
                (end.at, end.kind, end.text, self._known[request_id].number),
            )

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        """These are not wanted any more. Unknown ones are none."""
        known = {each: self._known[each].number for each in request_ids if each in self._known}
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
        """The epoch that begins."""
        with self._writing():
            self._connection.execute("UPDATE meta SET value = ? WHERE key = 'epoch'", (epoch,))

    def set_served(self) -> None:
        """The cluster serves. Written once."""
        if not self.has_served:
            with self._writing():
                self._connection.execute("INSERT OR REPLACE INTO meta VALUES ('has_served', 1)")
            self.has_served = True

    def due_to_fold(self) -> list[RequestId]:
        """Requests that hold up the end of old rows, the oldest first; some of them if they are many."""
        ages = [(each, self._last_row - known.folded_until) for each, known in self._known.items()]
        if max((age for _, age in ages), default=0) <= LOG_ROWS:
            return []
        return [each for each, age in ages if age > LOG_ROWS // 2][:MOST_AT_ONCE]

    def fold(self, progress: Sequence[tuple[RequestId, RequestProgress]]) -> None:
        """Takes all that these requests have put out until now."""
        known = [(self._known[request_id], each) for request_id, each in progress]
        rows = [(encode_progress(each), self._last_row, of.number) for of, each in known]
        with self._writing(sum(len(text) for text, _, _ in rows)):
            self._connection.execute("BEGIN")
            self._connection.executemany(
                "UPDATE requests SET folded = ?, folded_until = ? WHERE number = ?", rows
            )
            self._connection.execute("COMMIT")
        for of, _ in known:
            of.folded_until = self._last_row

    def trim(self) -> None:
        """Deletes rows that no request needs, and gives their room back; to be called now and then."""
        needed_after = min((each.folded_until for each in self._known.values()), default=self._last_row)
        until = min(needed_after, self._first_row + 4 * MOST_AT_ONCE)
        if until >= self._first_row:
            with self._writing():
                self._connection.execute("DELETE FROM log WHERE number <= ?", (until,))
                self._connection.execute("PRAGMA incremental_vacuum(256)").fetchall()
            self._first_row = until + 1
        with self._writing():
            self._checkpoints.run_if_due(self._connection)

    def probe(self) -> Future[None]:
        """Tries, beside the event loop, whether there is room again. The future raises sqlite3.Error while
        there is none. To be called only after a write that failed, and before the next one.
        """
        return self._checkpoints.probe()

    def reconnect(self) -> None:
        """Begins to write again, after a probe that succeeded."""
        with self._writing():
            self._database.reconnect()

    def close(self) -> None:
        """Lets another coordinator have it. Once."""
        self._checkpoints.close()
        self._database.close()

    def failed(self, error: BaseException) -> JournalFailed:
        """The error to raise for one of SQLite's."""
        return JournalFailed(f"journal {self.path} cannot be written: {error}")

    @property
    def _connection(self) -> sqlite3.Connection:
        return self._database.connection

    def _roll_back(self) -> None:
        """SQLite ends some transactions that fail by itself, and leaves others open."""
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
    deadline_at, traceparent, caller_traceparent, attach_digest, folded_until
)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
