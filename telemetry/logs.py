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
from pathlib import Path
from typing import Annotated, Any

from wire.flags import Flag, file_path
from wire.foreign_text import escaped, printable_line, shortened
from wire.log_context import FIELDS

log = logging.getLogger(__name__)


MAX_WAITING_LINES = 4096
"""Further lines are dropped and counted."""
LAST_WORDS_S = 1.0
"""Maximum wait for unwritten lines at the end of the process."""


class LogWriter(logging.Handler):
    """Formats on the caller's thread, writes on its own; `num_dropped` counts dropped lines.

    Writes to the file descriptor, past the buffers of Python's streams: the interpreter aborts at exit if a
    thread holds the lock of such a buffer.
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
        """Wait for unwritten lines, at most `LAST_WORDS_S`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._is_writing, LAST_WORDS_S)

    def close(self) -> None:
        """Reject new lines; queued ones are still written."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        super().close()

    def _run(self) -> None:
        while lines := self._take():
            # stderr is closed, so there is no place to report it
            with contextlib.suppress(OSError):
                _write(self._descriptor, "".join(f"{line}\n" for line in lines))
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()

    def _take(self) -> list[str]:
        """Wait for lines; nothing once closed."""
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
    text = "dropped %d log lines: writer too slow"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (num_dropped,), None)


PACKAGES = (
    "builtin_model",
    "certificates",
    "checkpoint",
    "coordinator",
    "deploy",
    "gateway",
    "kvcache",
    "stage_worker",
    "stageline",
    "telemetry",
    "text",
    "transformers_stage",
    "weights",
    "web",
    "wire",
)
"""Packages to which `--log-level` applies; other libraries log warnings and errors only."""


class LogFormat(StrEnum):
    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    """Minimum log level. Normal flow is debug, cluster events are info."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def number(self) -> int:
        """The level's number in `logging`."""
        return logging.getLevelNamesMapping()[self.name]


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSettings:
    """Format and level of a process's log, and its audit log."""

    format: Annotated[
        LogFormat,
        Flag("--log-format", None, "Log format: text, or one JSON object per line", panel="Logs"),
    ] = LogFormat.CONSOLE
    level: Annotated[
        LogLevel,
        Flag("--log-level", None, "Minimum log level; per-request messages are at debug", panel="Logs"),
    ] = LogLevel.INFO
    audit_log: Annotated[
        Path | None,
        Flag(
            "--audit-log",
            "FILE",
            "File of mode 0600 to which JSON lines are appended: who did what with which outcome, "
            "never prompts",
            unset="none",
            panel="Logs",
            parse=file_path,
        ),
    ] = None


DEFAULT_LOGS = LogSettings()


def configure(settings: LogSettings, process: str, *, worker: str | None = None) -> None:
    """Configure the log of this process ("coordinator" or "worker"), on stderr.

    Called by entry points, and again with the name of a worker. Call `logging.shutdown` before `os._exit`.
    """
    handler = LogWriter(sys.stderr.fileno())
    handler.setFormatter(_formatter(settings.format, process, worker))
    level = settings.level.number
    logging.basicConfig(handlers=[handler], level=max(level, logging.WARNING), force=True)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level)
    logging.captureWarnings(True)


def log_fatal(settings: LogSettings, line: str) -> None:
    """Write the last line of the log, unformatted on a console.

    Queued lines are written before it, later ones are dropped.
    """
    is_json = settings.format is LogFormat.JSON
    if is_json:
        log.critical("%s", line)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogWriter):
            handler.flush()
            handler.close()
    if not is_json:
        sys.stderr.write(f"{line}\n")  # one write, which `print` does not guarantee
        sys.stderr.flush()


class ConsoleFormatter(logging.Formatter):
    """Console lines with local time: `2026-01-31 12:00:00,250 INFO worker gpu-a: joined the coordinator at
    head:7480`.
    """

    def __init__(self, process: str, worker: str | None = None) -> None:
        super().__init__("%(asctime)s %(levelname)s %(origin)s: %(message)s%(suffix)s")
        self._origin = process if worker is None else f"{process} {worker}"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.origin = self._origin if _is_ours(record) else record.name
        trace_id = getattr(record, "trace_id", None)
        record.suffix = "" if trace_id is None else f" (trace {trace_id})"
        record.message = printable_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """Indent every line, so that an exception's text cannot look like a log line."""
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {escaped(line)}" for line in lines)


class JsonFormatter(logging.Formatter):
    """One JSON object per line.

    Keys: `ts` (RFC 3339, UTC, milliseconds), `level`, `process`, `logger`, `message`, known keys of `FIELDS`,
    and `exception` with a traceback.
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
            "message": shortened(record.getMessage()),
        }
        known = self._defaults | record.__dict__
        line |= {name: known[name] for name in FIELDS if name in known}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        text = json.dumps(line, ensure_ascii=False, default=str)
        return text if text.isprintable() else "".join(map(_json_escaped, text))


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
