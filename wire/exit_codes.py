"""Exit codes of commands and processes, and their last line on standard error. Imports nothing slow."""

from collections.abc import Iterable
from enum import IntEnum

from wire.foreign_text import printable_line


class ExitCode(IntEnum):
    """Exit code of a `stageline` process; docs/reference/errors.md is written from the meanings."""

    DONE = 0
    """done, or stopped by a signal, a drain or the coordinator"""
    FAILED = 1
    """failure"""
    USAGE = 2
    """wrong command line or settings"""
    DEVICE_FAILED = 3
    """the device of a worker failed: start the worker again"""
    INTERRUPTED = 130
    """Ctrl-C"""


def error_line(reason: str, text: str, log_lines: Iterable[str] = ()) -> str:
    """Format the last stderr line of a failed command or process: `stageline: error[REASON]: text`.

    `text` may have names of files, checkpoints and servers, which are escaped, and is cut, as are the lines
    of a log that follow.
    """
    line = f"stageline: error[{reason}]: {printable_line(text)}"
    return with_log(line, map(printable_line, log_lines))


def with_log(text: str, log_lines: Iterable[str]) -> str:
    """Append the end of a log."""
    return "\n  | ".join([text, *log_lines])
