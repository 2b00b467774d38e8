"""How coordinator and workers write their logs: lines for people, or one JSON object per line."""

import json
import logging
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from telemetry.log_writer import LogWriter
from wire.log_fields import FIELDS

PACKAGES = (
    "builtin_model",
    "checkpoint",
    "coordinator",
    "deploy",
    "kvcache",
    "stage_worker",
    "stageline",
    "telemetry",
    "wire",
)
"""Whose lines `--log-level` is about. Of other libraries only warnings and worse are written."""

log = logging.getLogger(__name__)


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
    """What a process is told about its log."""

    format: LogFormat = LogFormat.CONSOLE
    level: LogLevel = LogLevel.INFO

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that give another process these settings."""
        return ("--log-format", self.format.value, "--log-level", self.level.value)


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


def say_last(settings: LogSettings, line: str) -> None:
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
