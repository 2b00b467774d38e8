"""The condition of a process, as probes, service managers and health checks see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Condition:
    """Whether a process is ready, and its state in a few words without names, as anyone may read them."""

    text: str
    is_ready: bool = False
    is_stopping: bool = False


STARTING = Condition("starting")


class ProcessState:
    """Where the parts of a process find its condition, from its first moment. Read from any thread."""

    def __init__(self) -> None:
        self._read: Callable[[], Condition] = lambda: STARTING

    def follow(self, read: Callable[[], Condition]) -> None:
        """From now on, the condition is what `read` returns."""
        self._read = read

    def current(self) -> Condition:
        return self._read()
