"""Exit codes of commands and processes, and their last line on standard error. Imports nothing slow."""

from enum import IntEnum


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


def error_line(reason: str, text: str) -> str:
    """Format the last stderr line of a failed command or process: `stageline: error[REASON]: text`."""
    return f"stageline: error[{reason}]: {text}"
