"""What a module of `bench.figures` is: a group of figures that are measured together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from bench.harness.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a group is to measure. `is_quick`: few rounds and small sizes, to see that it runs.

    `say` shows one line of progress. Files that belong to the run go to `output_directory`; what is made once
    and used again (a checkpoint with random weights) lies in `cache_directory`.
    """

    is_quick: bool
    output_directory: Path
    cache_directory: Path
    say: Callable[[str], None]

    def rounds(self, full: int, quick: int = 1) -> int:
        """How often to repeat."""
        return quick if self.is_quick else full


Measure = Callable[[Setting], Awaitable[list[Figure]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """`about_s` is how long it takes on two cores. Left out of the default run unless `is_default`.
    `is_apart`: measured in a process of its own.
    """

    name: str
    about: str
    module: str
    about_s: int
    is_default: bool = True
    is_apart: bool = False
    timeout_s: float = 240.0
