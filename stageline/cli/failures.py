"""How commands say that they failed: one line, and an exit code."""

import sys

from wire.reasons import error_line

FAILURE = 1
INTERRUPTED = 130


USAGE = "USAGE"
"""Reason code of a wrong command line."""


class CommandFailed(Exception):
    """An expected failure; its text is the one line that the user reads, `reason` its code."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def report(message: str, *, reason: str) -> None:
    """Writes `stageline: error[REASON]: ...` to standard error."""
    print(error_line(reason, message), file=sys.stderr, flush=True)
