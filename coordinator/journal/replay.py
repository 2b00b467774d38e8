"""What a journal's rows say, put together. Pure but for reading the database."""

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from coordinator.journal.codec import decode_progress, decode_step, decode_tokens
from coordinator.journal.records import AcceptedRequest, End, JournalledRequest, RequestProgress
from wire.ids import RequestId
from wire.steps import GrammarSpec

_COLUMNS = (
    "number, id, client, message, prompt, bad_words, grammar, grammar_checksum, arrived_at, deadline_at, "
    "traceparent, caller_traceparent, attach_digest, ended_at, error_kind, error_text, folded, folded_until"
)


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """A request with its number in the journal, and the last row of the log that is in its own row too."""

    number: int
    folded_until: int
    request: JournalledRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftBehind:
    """All that a journal has. Rows [first_row, last_row] are there; `last_row` is never used again."""

    requests: list[ReplayedRequest]
    epoch: int
    has_served: bool
    first_row: int
    last_row: int


def read_journal(connection: sqlite3.Connection) -> LeftBehind:
    """Raises ValueError, KeyError or TypeError for rows that nobody has written so."""
    requests = replay(connection)
    meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    first, last = connection.execute("SELECT min(number), max(number) FROM log").fetchone()
    last_row = max(last or 0, *(each.folded_until for each in requests), 0)
    first_row = last_row + 1 if first is None else first
    return LeftBehind(
        requests=requests,
        epoch=meta["epoch"],
        has_served=bool(meta.get("has_served", 0)),
        first_row=first_row,
        last_row=last_row,
    )


def replay(connection: sqlite3.Connection) -> list[ReplayedRequest]:
    """The requests in the order in which they were accepted."""
    replayed = {each.number: each for each in _requests(connection)}
    for row, at, text in connection.execute("SELECT number, at, entries FROM log ORDER BY number"):
        for number, entry in decode_step(text):
            known = replayed.get(number)
            if known is not None and row > known.folded_until:
                known.request.progress.add(entry, at)
    return list(replayed.values())


def _requests(connection: sqlite3.Connection) -> Iterator[ReplayedRequest]:
    for row in connection.execute(f"SELECT {_COLUMNS} FROM requests ORDER BY number"):
        number, *given, folded, folded_until = row
        progress = RequestProgress() if folded is None else decode_progress(folded)
        *accepted, ended_at, kind, text = given
        end = None if ended_at is None else End(ended_at, kind, text)
        request = JournalledRequest(accepted=_accepted(*accepted), progress=progress, end=end)
        yield ReplayedRequest(number, folded_until, request)


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
        spec = GrammarSpec(definition=grammar, tokenizer_checksum=int(grammar_checksum))
    return AcceptedRequest(
        request_id=RequestId(request_id),
        client=client,
        message=message,
        prompt=decode_tokens(prompt),
        bad_words=tuple(tuple(word) for word in words),
        grammar=spec,
        arrived_at=arrived_at,
        deadline_at=deadline_at,
        traceparent=traceparent,
        caller_traceparent=caller_traceparent,
        attach_digest=attach_digest,
    )
