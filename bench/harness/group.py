"""Group of figures: a module of `bench.figures`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from bench.harness.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherEngine:
    """Where another engine is: an OpenAI-compatible server, or a Python with vLLM for CPU."""

    vllm_python: Path | None = None
    openai_url: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings of a group. `is_quick`: few rounds and small sizes, as a smoke test.

    `say` prints a line of progress. Files of the run go to `output_directory`; reusable ones (a checkpoint
    with random weights) to `cache_directory`. `coordinator_arguments` are further flags of the coordinator of
    real stages. `against` is a checkout of another commit, with an environment in `.venv`.
    """

    is_quick: bool
    output_directory: Path
    cache_directory: Path
    say: Callable[[str], None]
    coordinator_arguments: tuple[str, ...] = ()
    other_engine: OtherEngine = OtherEngine()
    against: Path | None = None

    def rounds(self, full: int, quick: int = 1) -> int:
        """Number of repetitions."""
        return quick if self.is_quick else full


Measure = Callable[[Setting], Awaitable[list[Figure]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group. `about_s` is its duration on two cores.

    Not part of the default run unless `is_default`; `is_apart`: measured in a child process.
    """

    name: str
    about: str
    module: str
    about_s: int
    is_default: bool = True
    is_apart: bool = False
    timeout_s: float = 240.0
