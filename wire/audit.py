"""The audit log: who did what, when, and with which outcome; JSON lines without prompts and secrets."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TypedDict

from certificates.identity import Identity

log = logging.getLogger(__name__)

MAX_CHARACTERS = 512
"""Of one value; longer ones are cut."""
MAX_WAITING = 65_536
"""Further records are lost and counted."""
CLOSE_S = 2.0
MODE = 0o600


class Action(StrEnum):
    """What was done."""

    REQUEST_ACCEPTED = "request.accepted"
    REQUEST_ENDED = "request.ended"
    CANCEL = "request.cancel"
    JOIN = "worker.join"
    LEAVE = "worker.leave"
    DRAIN = "worker.drain"
    ENROL = "certificate.enrol"
    RENEW = "certificate.renew"
    WATCH = "kv_events.watch"
    RELOAD = "files.reload"
    DENIAL = "access.denied"
    LOGIN = "dashboard.login"
    LOGOUT = "dashboard.logout"


class AuditOutcome(StrEnum):
    """Whether it was done: REFUSED by a rule, or FAILED."""

    OK = "ok"
    REFUSED = "refused"
    FAILED = "failed"


Fact = str | int | float | bool
Who = Identity | str
"""An identity of a certificate, a tenant, or `host HOST`; a process may name itself."""


class AuditCaller(TypedDict):
    """Arguments of `AuditLog.record` about a caller."""

    who: Who
    host: str


class AuditLog:
    """Appends records to a file of mode 0600 from a thread; `record` never blocks and never fails.

    The file is opened again when another is at its path, as after logrotate. While it cannot be written,
    records are lost, counted in `num_lost` and logged once.
    """

    def __init__(
        self, path: Path, process: str, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        """Open or create the file. Raises OSError."""
        self._path, self._process, self._clock = path, process, clock
        self.num_lost = 0
        self._descriptor: int | None = (descriptor := _open(path))
        self._inode: tuple[int, int] | None = _key(os.fstat(descriptor))
        self._is_torn = self._has_failed = False
        self._waiting = deque[bytes]()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    def record(
        self, action: Action, outcome: AuditOutcome, *, who: Who, host: str = "", **facts: Fact | None
    ) -> None:
        """Add a record; called by any thread. `facts` that are None are left out."""
        line = _line(self._clock(), self._process, action, outcome, _name(who), host, facts)
        with self._changed:
            if self._is_closed or len(self._waiting) >= MAX_WAITING:
                self.num_lost += 1
                return
            self._waiting.append(line)
            self._changed.notify()

    def reloaded(self, what: str, problem: str | None) -> None:
        """Record that a file was read again, or why it could not be."""
        outcome = AuditOutcome.OK if problem is None else AuditOutcome.FAILED
        self.record(Action.RELOAD, outcome, who=self._process, file=what, problem=problem)

    def close(self) -> None:
        """Write what waits, for at most `CLOSE_S`; further records are lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while lines := self._take():
            try:
                self._write(lines)
            except OSError as error:
                self._lose(len(lines), error)
            else:
                if self._has_failed:
                    log.info("audit log %s is written again: lost=%d", self._path, self.num_lost)
                self._has_failed = False
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _take(self) -> list[bytes]:
        """Wait for records; none once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            lines = list(self._waiting)
            self._waiting.clear()
        return lines

    def _write(self, lines: Sequence[bytes]) -> None:
        """Raises OSError."""
        if _inode(self._path) != self._inode or self._descriptor is None:
            self._reopen()
        assert self._descriptor is not None
        # A part of a line, which a full disk leaves, must not swallow the next one.
        left = memoryview((b"\n" if self._is_torn else b"") + b"".join(lines))
        while left:
            written = os.write(self._descriptor, left)
            self._is_torn = left[written - 1] != ord("\n")
            left = left[written:]

    def _reopen(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
        self._descriptor = descriptor = _open(self._path)
        self._inode, self._is_torn = _key(os.fstat(descriptor)), False

    def _lose(self, number: int, error: OSError) -> None:
        self.num_lost += number
        if not self._has_failed:
            self._has_failed = True
            log.error(
                "audit log %s cannot be written, records are lost: %s",
                *(self._path, (error.strerror or str(error)).lower()),
            )


class _NoAudit(AuditLog):
    def __init__(self) -> None:
        self._process, self.num_lost = "", 0

    def record(
        self, action: Action, outcome: AuditOutcome, *, who: Who, host: str = "", **facts: Fact | None
    ) -> None:
        pass

    def close(self) -> None:
        pass


NO_AUDIT: AuditLog = _NoAudit()
"""Records nothing."""


def open_audit(path: Path | None, process: str) -> AuditLog:
    """Open the audit log of a process; `NO_AUDIT` without a path. Raises OSError with one line."""
    if path is None:
        return NO_AUDIT
    try:
        return AuditLog(path, process)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OSError(f"--audit-log {path} cannot be opened: {reason}") from None


def _open(path: Path) -> int:
    """Raises OSError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, MODE)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is not a regular file")
        os.fchmod(descriptor, MODE)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        return _key(path.lstat())
    except OSError:
        return None


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _name(who: Who) -> str:
    return who.uri if isinstance(who, Identity) else who


def _line(
    now: datetime,
    process: str,
    action: Action,
    outcome: AuditOutcome,
    who: str,
    host: str,
    facts: Mapping[str, Fact | None],
) -> bytes:
    record: dict[str, Fact] = {
        "ts": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "process": process,
        "action": action.value,
        "outcome": outcome.value,
        "who": who,
    }
    if host:
        record["host"] = host
    record |= {name: value for name, value in facts.items() if value is not None}
    cut = {
        name: value[:MAX_CHARACTERS] if isinstance(value, str) else value for name, value in record.items()
    }
    return json.dumps(cut, separators=(",", ":")).encode() + b"\n"
