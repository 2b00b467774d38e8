"""How to start `tests.fake_stageline` and others of our modules as processes, installed or not."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
FAKE_COMMAND = (sys.executable, "-P", "-m", "tests.fake_stageline")
FAKE_ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")])}


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    """Returns once the condition holds. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s")
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether the process computes or waits; one that has ended and was not waited for does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
