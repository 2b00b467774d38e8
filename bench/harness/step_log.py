"""Steps logged by a coordinator, and rates computed from them. Pure except for reading the file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE_VARIABLE = "STAGELINE_TEST_BENCH_STEPS"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """An answered step, in seconds of the machine's monotonic clock.

    `chunks` has the tokens of each prompt chunk. `stages` has wait and compute of each stage in microseconds,
    FIRST to LAST; `hops` the time from the output of the stage before (or of the coordinator) until the frame
    was complete and checked. Both are empty if stages do not report them.
    """

    epoch: int
    step_id: int
    sent_s: float
    result_s: float
    num_decodes: int
    chunks: tuple[int, ...] = ()
    stages: tuple[tuple[int, int], ...] = ()
    hops: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(self.chunks)

    @property
    def compute_s(self) -> float:
        """Sum over the stages."""
        return sum(compute_us for _, compute_us in self.stages) / 1e6

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read_steps(file: Path) -> list[LoggedStep]:
    """Read a file that may still grow, in order of results; empty for a missing file."""
    if not file.exists():
        return []
    complete, _, _ = file.read_text().rpartition("\n")
    return [_step(json.loads(line)) for line in complete.splitlines()]


def _step(values: dict[str, Any]) -> LoggedStep:
    stages = tuple((wait, compute) for wait, compute in values.pop("stages"))
    chunks, hops = tuple(values.pop("chunks")), tuple(values.pop("hops"))
    return LoggedStep(chunks=chunks, stages=stages, hops=hops, **values)


def sent_between(steps: Iterable[LoggedStep], begin_s: float, end_s: float) -> list[LoggedStep]:
    """Steps with slices that were sent in [begin_s, end_s)."""
    return [step for step in steps if step.num_tokens and begin_s <= step.sent_s < end_s]


@dataclass(frozen=True, slots=True)
class SteadyRate:
    """Steps per second over `duration_s`, and mean tokens per step."""

    steps_per_s: float
    tokens_per_step: float
    num_steps: int
    duration_s: float


def steady_rate(steps: Sequence[LoggedStep], begin_s: float, end_s: float) -> SteadyRate:
    """Rate of results in [begin_s, end_s], from the first result to the last.

    Raises ValueError for fewer than 10 results.
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
