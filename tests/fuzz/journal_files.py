"""Surface of the journal: SQLite files with changed bytes, changed values and missing rows.

A case is a JSON object: `cells` are [table, column, row, value] to write into a valid journal, `missing` are
[table, row] to delete, and `sealed` gives the result the checksums of its rows. `patches` are [offset,
hexadecimal bytes] of the file, and `size` truncates it. With `killed` the file has a write-ahead log, for
which `log_patches` and `log_size` are the same. A case that is neither sealed nor truncated must be rejected
or restore the same requests.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from coordinator.api.request_handler import restored
from coordinator.config import CoordinatorConfig
from coordinator.engine.durability import restore
from coordinator.journal.database import ServedIdentity
from coordinator.journal.journal import Journal
from coordinator.journal.records import (
    AcceptedRequest,
    End,
    Entry,
    JournalFailed,
    JournalledRequest,
    JournalUnusable,
    RequestProgress,
)
from coordinator.journal.tables import row_checksum
from coordinator.model import ServedModel, open_model
from coordinator.scheduler.sequence import FinishReason, Priority, QueueOrder
from stageline_rpc.internal.v1 import serve_pb2
from stageline_rpc.v1 import inference_pb2
from tests.fuzz.harness import Broken, Opened, Surface
from tests.fuzz.mutations import any_json, json_bytes, mutate_bytes, mutate_json
from tests.fuzz.protobuf import mutate_message
from wire.errors import InvalidRequest, InvariantBroken
from wire.ids import RequestId
from wire.sampling import GrammarSpec
from wire.steps import TokenLogprobs

IDENTITY = ServedIdentity("f" * 32, "f32")
_SCORE = TokenLogprobs(7, -0.1, 2, ((8, -0.05), (7, -0.1)))
_COLUMNS = {
    "meta": ("key", "value"),
    "log": ("number", "at", "entries"),
    "deadlines": ("number", "deadline_at"),
    "ends": ("number", "at", "kind", "text"),
    "progress": ("number", "until_row", "output"),
    "requests": (
        *("number", "id", "client", "message", "prompt", "bad_words", "grammar", "grammar_checksum"),
        *("arrived_at", "deadline_at", "traceparent", "caller_traceparent", "attach_digest", "after_row"),
    ),
}
_JSON_COLUMNS = frozenset({"entries", "bad_words", "output"})


def make(random: Random) -> bytes:
    case: dict[str, Any] = {}
    if random.random() < 0.3:
        return json.dumps(_killed_case(random)).encode()
    if random.random() < 0.7:
        case["cells"] = [_cell(random) for _ in range(random.randint(1, 2))]
        case["sealed"] = random.random() < 0.8
    if random.random() < 0.1:
        case["missing"] = [[random.choice(tuple(_COLUMNS)), random.randrange(4)]]
    if random.random() < 0.3:
        case["patches"] = _patches(random, len(_valid()))
    if random.random() < 0.1:
        case["size"] = random.randrange(len(_valid()))
    return json.dumps(case).encode()


def _killed_case(random: Random) -> dict[str, Any]:
    """Changes of a journal with a write-ahead log."""
    database, log = _killed()
    case: dict[str, Any] = {"killed": True}
    if random.random() < 0.8:
        case["log_patches"] = _patches(random, len(log))
    if random.random() < 0.2:
        case["patches"] = _patches(random, len(database))
    if random.random() < 0.1:
        case["log_size"] = random.randrange(len(log))
    return case


def _patches(random: Random, size: int) -> list[list[Any]]:
    return [
        [random.choice((random.randrange(100), random.randrange(size))), random.randbytes(4).hex()]
        for _ in range(random.choice((1, 3, 20)))
    ]


def _cell(random: Random) -> list[Any]:
    table = random.choice((*("requests",) * 4, "log", "log", "meta", "ends", "progress", "deadlines"))
    column, row = random.choice(_COLUMNS[table]), random.randrange(4)
    return [table, column, row, _changed(table, column, row, random)]


def _changed(table: str, column: str, row: int, random: Random) -> Any:
    """A value for a cell; bytes are written as {"hex": ...}, texts that UTF-8 does not allow too."""
    values = [known[_COLUMNS[table].index(column)] for known in _rows()[table]]
    value = values[row % len(values)]
    if column in _JSON_COLUMNS and value is not None and random.random() < 0.85:
        return {"hex": json_bytes(mutate_json(json.loads(value), random), random).hex(), "text": True}
    if column == "message" and random.random() < 0.6:
        return {"hex": mutate_message(serve_pb2.SubmitEnvelope.FromString(value), random).hex()}
    if isinstance(value, bytes):
        return {"hex": mutate_bytes(value, random).hex()}
    if isinstance(value, str) and random.random() < 0.5:
        return {"hex": mutate_bytes(value.encode(), random).hex(), "text": True}
    odd = any_json(random)
    is_scalar = odd is None or isinstance(odd, str | int | float)
    return odd if is_scalar else json.dumps(odd)


@contextmanager
def opened_journal() -> Iterator[Opened]:
    model = open_model(CoordinatorConfig(mock_model="layers=2,vocab=1000", num_stages=1))
    with tempfile.TemporaryDirectory(prefix="stageline-fuzz-", dir=_memory()) as made:
        directory = Path(made)

        def examine(data: bytes) -> str:
            path = directory / "journal.db"
            try:
                case = json.loads(data)
                is_sealed = _write(path, case)
                may_change = is_sealed or "size" in case or "log_size" in case
                return _outcome(path, model, None if may_change else _expected(case.get("killed", False)))
            finally:
                for file in directory.iterdir():
                    file.unlink()

        def check() -> None:
            if examine(b"{}") != "ok, 3 restored":
                raise Broken("a valid journal is not restored")

        yield Opened(examine, check, (os.getpid(),))


def _memory() -> str | None:
    """A file system without a disk, if there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _write(path: Path, case: dict[str, Any]) -> bool:
    """Write the files of a case. Returns whether its changed rows have their checksums."""
    path.touch(0o600)
    is_sealed = False
    if case.get("killed"):
        database, log = _killed()
        path.write_bytes(database)
        Path(f"{path}-wal").touch(0o600)
        Path(f"{path}-wal").write_bytes(_patched(log, case.get("log_patches", ()), case.get("log_size")))
    else:
        path.write_bytes(_valid())
        is_sealed = _change_rows(path, case)
    path.write_bytes(_patched(path.read_bytes(), case.get("patches", ()), case.get("size")))
    return is_sealed


def _patched(content: bytes, patches: Iterable[tuple[int, str]], size: int | None) -> bytes:
    changed = bytearray(content)
    for offset, patch in patches:
        changed[offset : offset + len(patch) // 2] = bytes.fromhex(patch)
    return bytes(changed[:size])


def _change_rows(path: Path, case: dict[str, Any]) -> bool:
    with closing(sqlite3.connect(path)) as connection:
        for table, column, row, value in case.get("cells", ()):
            _set_cell(connection, table, column, row, value)
        for table, row in case.get("missing", ()):
            keys = _keys(connection, table)
            connection.execute(f"DELETE FROM {table} WHERE {_key(table)} = ?", (keys[row % len(keys)],))
        connection.commit()
        return bool(case.get("sealed")) and _seal(connection)


def _key(table: str) -> str:
    return _COLUMNS[table][0]


def _keys(connection: sqlite3.Connection, table: str) -> list[Any]:
    return [key for (key,) in connection.execute(f"SELECT {_key(table)} FROM {table} ORDER BY {_key(table)}")]


def _seal(connection: sqlite3.Connection) -> bool:
    """Give all rows their checksums, unless a value has none."""
    total = 0
    try:
        for table in _COLUMNS:
            for key, *values, _ in connection.execute(f"SELECT * FROM {table}").fetchall():
                checksum = row_checksum(table, (key, *values))
                connection.execute(
                    f"UPDATE {table} SET checksum = ? WHERE {_key(table)} IS ?", (checksum, key)
                )
                total += checksum
    except (sqlite3.Error, UnicodeError):
        return False
    connection.execute("UPDATE seal SET total = ?", ((total + 2**63) % 2**64 - 2**63,))
    connection.commit()
    return True


def _set_cell(connection: sqlite3.Connection, table: str, column: str, row: int, value: Any) -> None:
    """Does nothing if the table does not allow the value."""
    cast = "?"
    if isinstance(value, dict):
        cast = "CAST(? AS TEXT)" if value.get("text") else "?"
        value = bytes.fromhex(value["hex"])
    try:
        keys = _keys(connection, table)
        statement = f"UPDATE {table} SET {column} = {cast} WHERE {_key(table)} = ?"
        connection.execute(statement, (value, keys[row % len(keys)]))
    except (sqlite3.Error, OverflowError, UnicodeEncodeError):
        connection.rollback()


def _outcome(path: Path, model: ServedModel, expected: list[JournalledRequest] | None) -> str:
    """How the next coordinator takes the file; `expected` is what it may restore, None for anything."""
    try:
        journal = Journal(path, IDENTITY)
    except JournalUnusable as error:
        if str(path) not in str(error):
            raise Broken(f"an error without the file: {error}") from None
        return type(error).__name__
    try:
        requests = journal.take_requests()
        if expected is not None and requests != expected:
            raise Broken("damage goes unnoticed: other requests are restored")
        num_restored = sum(_restored(request, model) for request in requests)
        journal.set_epoch(journal.epoch + 1)
        journal.accept(_accepted(9))
        journal.add_step([Entry(RequestId(bytes([9] * 16)), 0, 1)], at=1.0)
    except JournalFailed:
        return "JournalFailed"
    finally:
        journal.close()
    return f"ok, {num_restored} restored"


def _restored(request: Any, model: ServedModel) -> bool:
    def place(priority: Priority, choice: int) -> QueueOrder:
        return QueueOrder(request.accepted.arrived_at + 1.0, choice)

    try:
        made = restored(request, model, place)
        restore(made, request.progress, request.end)
    except (InvalidRequest, InvariantBroken):
        return False
    return True


@cache
def _expected(was_killed: bool) -> list[JournalledRequest]:
    """What the next coordinator restores from the unchanged files."""
    with tempfile.TemporaryDirectory(prefix="stageline-fuzz-", dir=_memory()) as made:
        path = Path(made) / "journal.db"
        _write(path, {"killed": was_killed})
        with closing(Journal(path, IDENTITY)) as journal:
            return journal.take_requests()


@cache
def _valid() -> bytes:
    """A closed journal of a compacted, a live and a failed request."""
    return _written()[0]


@cache
def _killed() -> tuple[bytes, bytes]:
    """The file and the write-ahead log of the same journal, not closed."""
    return _written()[1]


@cache
def _written() -> tuple[bytes, tuple[bytes, bytes]]:
    with tempfile.TemporaryDirectory(prefix="stageline-fuzz-", dir=_memory()) as made:
        path = Path(made) / "journal.db"
        journal = Journal(path, IDENTITY)
        known = [_accepted(number) for number in range(3)]
        for accepted in known:
            journal.accept(accepted)
        progress = RequestProgress()
        for entry in _entries(known[0].request_id):
            progress.add(entry, 2.5)
        journal.compact([(known[0].request_id, progress)])
        journal.add_step([*_entries(known[1].request_id), Entry(known[0].request_id, 0, 5, _SCORE)], at=3.5)
        journal.add_step(
            [Entry(known[1].request_id, 1, 9, _SCORE, finish_reason=FinishReason.LENGTH)], at=4.5
        )
        journal.end(known[2].request_id, End(4.5, "RequestCancelled", "was cancelled"))
        journal.set_deadline(known[1].request_id, journal.clock.now_at() + 1e9)
        journal.set_epoch(17)
        journal.set_served()
        killed = path.read_bytes(), Path(f"{path}-wal").read_bytes()
        journal.close()
        return path.read_bytes(), killed


@cache
def _rows() -> dict[str, list[tuple[Any, ...]]]:
    with tempfile.NamedTemporaryFile(prefix="stageline-fuzz-", dir=_memory()) as file:
        Path(file.name).write_bytes(_valid())
        with closing(sqlite3.connect(file.name)) as connection:
            return {
                table: connection.execute(f"SELECT {', '.join(columns)} FROM {table}").fetchall()
                for table, columns in _COLUMNS.items()
            }


def _accepted(number: int) -> AcceptedRequest:
    request_id = RequestId(bytes([number] * 16))
    message = inference_pb2.GenerateRequest(max_tokens=20, client_state=b"state")
    message.sampling.n, message.sampling.seed = 2, 7
    message.sampling.logprobs = 2
    return AcceptedRequest(
        request_id=request_id,
        message=serve_pb2.SubmitEnvelope(request=message.SerializeToString()).SerializeToString(),
        prompt=(1, 2, 3),
        bad_words=((1,), (2, 3)),
        grammar=GrammarSpec(definition='start: "a"', tokenizer_checksum=2**64 - 1) if number == 2 else None,
        client="somebody",
        arrived_at=1.5,
        deadline_at=None,
        attach_digest=b"d" * 32,
    )


def _entries(request_id: RequestId) -> list[Entry]:
    return [
        Entry(request_id, 0, prompt_logprobs=(_SCORE, _SCORE)),
        Entry(request_id, 0, 7, _SCORE, num_cached_tokens=2),
        Entry(request_id, 1, 8, _SCORE, num_restarts=1),
    ]


SURFACES = (Surface(name="journal", share=5, make=make, opened=opened_journal),)
