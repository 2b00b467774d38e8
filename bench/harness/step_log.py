"""What a coordinator noted of its steps, and what can be read from it. Pure but for the one file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE_VARIABLE = "STAGELINE_BENCH_STEPS"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """A step that was answered: times on the machine's monotonic clock, in seconds.

    `chunks` are the tokens of each prompt chunk. `stages` has wait and compute of each stage in microseconds,
    FIRST to LAST; empty where the stages do not say.
    """

    epoch: int
    step_id: int
    sent_s: float
    result_s: float
    num_decodes: int
    chunks: tuple[int, ...] = ()
    stages: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(self.chunks)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_steps(file: Path) -> list[LoggedStep]:
    """The steps in a file that may still grow, in the order of their results; none while there is no file."""
    if not file.exists():
        return []
    complete, _, _ = file.read_text().rpartition("\n")
    return [_step(json.loads(line)) for line in complete.splitlines()]


def _step(values: dict[str, Any]) -> LoggedStep:
    stages = tuple((wait, compute) for wait, compute in values.pop("stages"))
    return LoggedStep(chunks=tuple(values.pop("chunks")), stages=stages, **values)


def sent_between(steps: Iterable[LoggedStep], begin_s: float, end_s: float) -> list[LoggedStep]:
    """Steps that compute something and were handed out in [begin_s, end_s)."""
    return [step for step in steps if step.num_tokens and begin_s <= step.sent_s < end_s]


@dataclass(frozen=True, slots=True)
class SteadyRate:
    """Steps per second over `duration_s`, and the mean number of tokens in one."""

    steps_per_s: float
    tokens_per_step: float
    num_steps: int
    duration_s: float


def steady_rate(steps: Sequence[LoggedStep], begin_s: float, end_s: float) -> SteadyRate:
    """The rate of results in [begin_s, end_s]: from the first result to the last, so that neither the steps
    before nor the ones after count.

    Raises ValueError for less than 10 results, which say nothing of a rate.
    """
    results = sorted(
        (step.result_s, step.num_tokens)
        for step in steps
        if step.num_tokens and begin_s <= step.result_s <= end_s
    )
    if len(results) < 10:
        raise ValueError(f"{len(results)} results in {end_s - begin_s:.2f} s, needed are 10")
    duration_s = results[-1][0] - results[0][0]
    tokens = sum(num_tokens for _, num_tokens in results[1:])
    return SteadyRate((len(results) - 1) / duration_s, tokens / (len(results) - 1), len(results), duration_s)
