"""Temporary directories of tests and test programs, which go with the process however it is ended."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

INTERRUPTED = 130
"""Exit code of a program that was ended by a signal."""
LOGS_HELP = "empty directory for logs and journal, which stay (default: a temporary one, removed at the end)"

_PREFIX = "stageline-"


def end_in_order() -> None:
    """Makes SIGTERM and SIGHUP end this process as Ctrl-C does: fixtures and exit handlers run.

    To be called in the main thread.
    """
    owner = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            signal.raise_signal(signal.SIGINT)
        else:  # forked from the owner, with its handlers
            os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


def process_directory(name: str) -> Path:
    """A new directory that is removed when the interpreter exits."""
    made = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{name}-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


@contextmanager
def run_directory(name: str, kept: Path | None) -> Iterator[Path]:
    """`kept`, which stays; else a new directory that is removed at the end, also after a failure."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{name}-", ignore_cleanup_errors=True) as made:
        yield Path(made)


def unused_directory(text: str) -> Path:
    """A directory named on a command line. Raises ValueError unless it is empty or does not exist."""
    path = Path(text).resolve()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is not an empty directory")
    return path
