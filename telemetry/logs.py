"""Logs as console lines or JSON; never blocks on a slow reader."""

import contextlib
import json
import logging
import os
import sys
import threading
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

from wire.flags import Flag
from wire.log_context import FIELDS

log = logging.getLogger(__name__)


MAX_WAITING_LINES = 4096
"""Beyond that, lines are dropped and counted."""
LAST_WORDS_S = 1.0
"""How long the end of the process waits for lines that are not written yet."""


class LogWriter(logging.Handler):
    """Formats on the caller's thread, writes on one of its own. `num_dropped` lines have found no place.

    It writes to a file descriptor, past the buffers of Python's streams: the interpreter aborts when it ends
    while somebody holds the lock of such a buffer.
    """

    def __init__(self, descriptor: int, *, max_waiting: int = MAX_WAITING_LINES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._max_waiting = max_waiting
        self._waiting = deque[str]()
        self._changed = threading.Condition()
        self._is_writing = self._is_closed = False
        self.num_dropped = 0
        self._num_untold = 0
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if self._is_closed:
                return
            if len(self._waiting) >= self._max_waiting:
                self.num_dropped += 1
                self._num_untold += 1
                return
            self._waiting.append(line)
            self._changed.notify_all()

    def flush(self) -> None:
        """Waits for what is not written yet, but not for ever."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_writing, LAST_WORDS_S)

    def close(self) -> None:
        """Takes no more lines; those that it has are still written."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        super().close()

    def _run(self) -> None:
        while lines := self._take():
            # Where nobody reads stderr any more, there is no other place to say so.
            with contextlib.suppress(OSError):
                _write(self._descriptor, "".join(f"{line}\n" for line in lines))
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()

    def _take(self) -> list[str]:
        """What waits, as soon as anything does; nothing once this is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            lines, num_untold = list(self._waiting), self._num_untold
            self._waiting.clear()
            self._num_untold = 0
            self._is_writing = bool(lines)
        if num_untold:
            lines.append(self.format(_told(num_untold)))
        return lines


def _write(descriptor: int, text: str) -> None:
    left = memoryview(text.encode(errors="backslashreplace"))
    while left:
        left = left[os.write(descriptor, left) :]


def _told(num_dropped: int) -> logging.LogRecord:
    text = "%d lines of this log are lost: they came faster than they could be written"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (num_dropped,), None)


PACKAGES = (
    "builtin_model",
    "checkpoint",
    "coordinator",
    "deploy",
    "kvcache",
    "stage_worker",
    "stageline",
    "telemetry",
    "text",
    "wire",
)
"""Whose lines `--log-level` is about. Of other libraries only warnings and worse are written."""


class LogFormat(StrEnum):
    """How a line looks."""

    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    """The least that is written. Normal flow is debug, events in the life of a cluster are info."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def number(self) -> int:
        """That of `logging`."""
        return logging.getLevelNamesMapping()[self.name]


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSettings:
    """Format and level of a process's log."""

    format: Annotated[
        LogFormat,
        Flag("--log-format", None, "Log lines for people, or one JSON object per line", panel="Logs"),
    ] = LogFormat.CONSOLE
    level: Annotated[
        LogLevel,
        Flag("--log-level", None, "Minimum log level; per-request messages are at debug", panel="Logs"),
    ] = LogLevel.INFO


DEFAULT_LOGS = LogSettings()


def configure(settings: LogSettings, process: str, *, worker: str | None = None) -> None:
    """Sends the log of this process, which is a "coordinator" or a "worker", to stderr. To be called by entry
    points, and again as soon as a worker knows its name. Before `os._exit`, call `logging.shutdown`.
    """
    handler = LogWriter(sys.stderr.fileno())
    handler.setFormatter(_formatter(settings.format, process, worker))
    level = settings.level.number
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING), force=True)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level)
    logging.captureWarnings(True)


def log_fatal(settings: LogSettings, line: str) -> None:
    """The last line of a process that cannot go on: on the console as it is. What was logged before is
    written before it, and what is logged later is dropped.
    """
    is_json = settings.format is LogFormat.JSON
    if is_json:
        log.critical("%s", line)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogWriter):
            handler.flush()
            handler.close()
    if not is_json:
        sys.stderr.write(f"{line}\n")  # in one piece, which `print` does not promise
        sys.stderr.flush()


class ConsoleFormatter(logging.Formatter):
    """`2026-01-31 12:00:00,250 INFO worker gpu-a: joined the coordinator at head:7480`, in local time."""

    def __init__(self, process: str, worker: str | None = None) -> None:
        super().__init__("%(asctime)s %(levelname)s %(origin)s: %(message)s%(suffix)s")
        self._origin = process if worker is None else f"{process} {worker}"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.origin = self._origin if _is_ours(record) else record.name
        trace_id = getattr(record, "trace_id", None)
        record.suffix = "" if trace_id is None else f" (trace {trace_id})"
        record.message = escaped(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Every line is indented: what an exception says cannot look like a line of the log."""
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {escaped(line)}" for line in lines)


class JsonFormatter(logging.Formatter):
    """One object per line: `ts` (RFC 3339, UTC, milliseconds), `level`, `process`, `logger`, `message`, those
    of `FIELDS` that are known, and `exception` with a traceback, if there is one.
    """

    def __init__(self, process: str, worker: str | None = None) -> None:
        super().__init__()
        self._process = process
        self._defaults: dict[str, object] = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": _timestamp(record.created),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        known = self._defaults | record.__dict__
        line |= {name: known[name] for name in FIELDS if name in known}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        text = json.dumps(line, ensure_ascii=False, default=str)
        return text if text.isprintable() else "".join(map(_json_escaped, text))


def escaped(text: str) -> str:
    """`text` in one line of printable characters: what others send can neither begin a new line of the log
    nor control a terminal.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escape(each) for each in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _json_escaped(character: str) -> str:
    return character if character.isprintable() else json.dumps(character)[1:-1]


def _formatter(kind: LogFormat, process: str, worker: str | None) -> logging.Formatter:
    if kind is LogFormat.JSON:
        return JsonFormatter(process, worker)
    return ConsoleFormatter(process, worker)


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] in PACKAGES


def _timestamp(created_s: float) -> str:
    return datetime.fromtimestamp(created_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
