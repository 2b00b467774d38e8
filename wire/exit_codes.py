"""Exit codes of commands and processes, and their last line on standard error. Imports nothing slow."""

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


LOG_LINE = "\n  | "
"""Begins each line of a log at the end of an error's text."""


def error_line(reason: str, text: str) -> str:
    """Format the last stderr line of a failed command or process: `stageline: error[REASON]: text`.

    `text` may have names of files, checkpoints and servers, which are escaped, and is cut. Lines of a log
    that it ends with stay lines, see `LOG_LINE`.
    """
    problem, *log_lines = text.split(LOG_LINE)
    lines = [f"stageline: error[{reason}]: {printable_line(problem)}", *map(printable_line, log_lines)]
    return LOG_LINE.join(lines)
