"""Tables of a journal, with a checksum per row; each transaction writes the sum of all checksums.

The checksums show changed rows; the sum shows missing, repeated and outdated ones.
"""

import json
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from xxhash import xxh3_64_intdigest

Value: TypeAlias = int | float | str | bytes | None
Key: TypeAlias = int | str

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "meta": ("key TEXT PRIMARY KEY", "value NOT NULL"),
    "requests": (
        "number INTEGER PRIMARY KEY",
        "id BLOB NOT NULL",
        "client TEXT NOT NULL",
        "message BLOB NOT NULL",
        "prompt BLOB NOT NULL",
        "bad_words TEXT NOT NULL",
        "grammar TEXT",
        "grammar_checksum TEXT",
        "arrived_at REAL NOT NULL",
        "deadline_at REAL",
        "traceparent TEXT NOT NULL",
        "caller_traceparent TEXT NOT NULL",
        "attach_digest BLOB NOT NULL",
        "after_row INTEGER NOT NULL",
    ),
    "deadlines": ("number INTEGER PRIMARY KEY", "deadline_at REAL"),
    "ends": ("number INTEGER PRIMARY KEY", "at REAL NOT NULL", "kind TEXT NOT NULL", "text TEXT NOT NULL"),
    "progress": ("number INTEGER PRIMARY KEY", "until_row INTEGER NOT NULL", "output TEXT NOT NULL"),
    "log": ("number INTEGER PRIMARY KEY", "at REAL NOT NULL", "entries TEXT NOT NULL"),
}
"""Columns of each table, its key first. A request's `deadlines`, `ends` and `progress` have its number."""

_KEYS = {table: columns[0].split()[0] for table, columns in COLUMNS.items()}
_PUT = {
    table: f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * (len(columns) + 1))})"
    for table, columns in COLUMNS.items()
}
_SUM_BITS = 2**64


def schema() -> list[str]:
    """Statements that create all tables.

    `probe` has no rows that anything reads, `log_follows` one while a checkpoint runs.
    """
    return [
        *(
            f"CREATE TABLE {table} ({', '.join(columns)}, checksum INTEGER NOT NULL)"
            for table, columns in COLUMNS.items()
        ),
        "CREATE TABLE seal (number INTEGER PRIMARY KEY, total INTEGER NOT NULL)",
        "CREATE TABLE probe (number INTEGER PRIMARY KEY, data BLOB NOT NULL)",
        "CREATE TABLE log_follows (number INTEGER PRIMARY KEY)",
    ]


def row_checksum(table: str, values: Sequence[Value]) -> int:
    """XXH3-64, signed, of the table's name and of each value with its type and length."""
    return _signed(xxh3_64_intdigest(b"".join([table.encode(), *map(_encoded, values)])))


_TAGGED_INT, _TAGGED_FLOAT = struct.Struct("<cq"), struct.Struct("<cd")


def _encoded(value: Value) -> bytes:
    if isinstance(value, int):
        return _TAGGED_INT.pack(b"i", value)
    if isinstance(value, float):
        return _TAGGED_FLOAT.pack(b"f", value)
    if value is None:
        return b"n"
    tag, data = (b"t", value.encode()) if isinstance(value, str) else (b"b", value)
    return _TAGGED_INT.pack(tag, len(data)) + data


def _signed(number: int) -> int:
    """The 64-bit number as SQLite's signed integer."""
    return number - _SUM_BITS if number >= _SUM_BITS // 2 else number


class RowChecksums:
    """Checksums of all committed rows, by table and key."""

    def __init__(self) -> None:
        self._of_row: dict[tuple[str, Key], int] = {}
        self._sum = 0

    @property
    def total(self) -> int:
        """Sum of all checksums, signed."""
        return _signed(self._sum)

    def begin(self, connection: sqlite3.Connection) -> "Changes":
        """Changes of a transaction, to be added by `apply` once it is committed."""
        return Changes(connection, self._of_row, self._sum)

    def apply(self, changes: "Changes") -> None:
        """Add the rows of a committed transaction."""
        for row, checksum in changes.changed.items():
            if checksum is None:
                self._of_row.pop(row, None)
            else:
                self._of_row[row] = checksum
        self._sum = changes.sum

    def read(self, connection: sqlite3.Connection) -> None:
        """Add and check all rows of a database. Raises ValueError for the first wrong one."""
        for table in COLUMNS:
            for key, checksum in _checked_rows(connection, table):
                self._of_row[table, key] = checksum
                self._sum += checksum
        self._sum %= _SUM_BITS
        _check_consecutive(connection)
        sealed = connection.execute("SELECT total FROM seal").fetchall()
        if sealed != [(self.total,)]:
            raise ValueError(
                f"the sum of the checksums of {len(self._of_row)} rows is not the recorded one: "
                "rows are missing or outdated"
            )


class Changes:
    """Rows that one transaction writes and deletes; `changed` has their checksums, None for deleted ones."""

    def __init__(
        self, connection: sqlite3.Connection, of_row: Mapping[tuple[str, Key], int], total: int
    ) -> None:
        self.changed: dict[tuple[str, Key], int | None] = {}
        self.sum = total
        self._connection = connection
        self._of_row = of_row

    def put(self, table: str, key: Key, *values: Value) -> None:
        """Write a whole row in place of a former one with its key."""
        row = (key, *values)
        checksum = row_checksum(table, row)
        self._replace((table, key), checksum)
        self._connection.execute(_PUT[table], (*row, checksum))

    def delete(self, table: str, keys: Iterable[Key]) -> None:
        """Delete rows; keys without a row are ignored."""
        known = [key for key in keys if self._checksum((table, key)) is not None]
        if known:
            for key in known:
                self._replace((table, key), None)
            query = f"DELETE FROM {table} WHERE {_KEYS[table]} IN (SELECT value FROM json_each(?))"
            self._connection.execute(query, (json.dumps(known),))

    def seal(self) -> None:
        """Write the sum with these changes: the last statement of the transaction."""
        self._connection.execute("INSERT OR REPLACE INTO seal VALUES (1, ?)", (_signed(self.sum),))

    def _replace(self, row: tuple[str, Key], checksum: int | None) -> None:
        self.sum = (self.sum - (self._checksum(row) or 0) + (checksum or 0)) % _SUM_BITS
        self.changed[row] = checksum

    def _checksum(self, row: tuple[str, Key]) -> int | None:
        return self.changed[row] if row in self.changed else self._of_row.get(row)


def _checked_rows(connection: sqlite3.Connection, table: str) -> Iterator[tuple[Key, int]]:
    for *values, checksum in connection.execute(f"SELECT * FROM {table} ORDER BY {_KEYS[table]}"):
        if row_checksum(table, values) != checksum:
            raise ValueError(f"row {values[0]!r:.50} of table {table} does not match its checksum")
        yield values[0], checksum


def _check_consecutive(connection: sqlite3.Connection) -> None:
    """Raises ValueError for the first number that the log lacks."""
    numbers = [number for (number,) in connection.execute("SELECT number FROM log ORDER BY number")]
    for expected, number in enumerate(numbers, start=numbers[0] if numbers else 0):
        if number != expected:
            raise ValueError(f"row {expected} of table log is missing: the next one is row {number}")
