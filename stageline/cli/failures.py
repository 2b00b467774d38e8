"""How commands say that they failed: one line, and an exit code."""

import sys

BAD_USAGE = 2
FAILURE = 1
INTERRUPTED = 130


class CommandFailed(Exception):
    """An expected failure; its text is the one line that the user reads."""


def report(message: str) -> None:
    """Writes `stageline: error: ...` to standard error."""
    print(f"stageline: error: {message}", file=sys.stderr, flush=True)
