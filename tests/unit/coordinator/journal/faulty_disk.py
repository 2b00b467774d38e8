"""A disk that fails writes on demand, under every SQLite connection that is opened meanwhile."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Any

import pytest

FULL = "database or disk is full"
_READS = ("SELECT", "PRAGMA synchronous", "PRAGMA wal_autocheckpoint", "PRAGMA busy_timeout")


class FaultyDisk:
    """Writes fail with `error` (None: succeed) if their statement contains `only`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.error: str | None = None
        self.only = ""
        disk, real = self, sqlite3.connect

        class Connection(sqlite3.Connection):
            def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
                disk.check(sql)
                return super().execute(sql, parameters)

            def executemany(self, sql: str, parameters: Iterable[Any]) -> sqlite3.Cursor:
                disk.check(sql)
                return super().executemany(sql, parameters)

        def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
            return real(*arguments, factory=Connection, **options)

        patch.setattr(sqlite3, "connect", connect)

    def check(self, sql: str) -> None:
        """Raises sqlite3.OperationalError for statements that write."""
        is_write = not sql.lstrip().startswith(_READS) and sql != "ROLLBACK"
        if self.error is not None and is_write and self.only in sql:
            raise sqlite3.OperationalError(self.error)
