"""How a load went over time, in intervals of equal length."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stageline.load.metrics import spans
from stageline.load.record import LoadRun

NUM_INTERVALS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Entry i of both lists is about the seconds from i * interval_s to (i + 1) * interval_s of the run.

    `concurrency` is the mean number of requests that were running.
    """

    interval_s: float
    output_tokens_per_s: list[float]
    concurrency: list[float]


def timeline(run: LoadRun, *, num_intervals: int = NUM_INTERVALS) -> Timeline:
    """The run, cut into `num_intervals`."""
    edges_s = np.linspace(0.0, run.duration_s, num_intervals + 1)
    interval_s = run.duration_s / num_intervals
    times_s = [time_s for record in run.records for time_s in record.message_times_s]
    tokens = [num_tokens for record in run.records for num_tokens in record.message_tokens]
    arrived, _ = np.histogram(times_s, bins=edges_s, weights=tokens)
    return Timeline(
        interval_s=interval_s,
        output_tokens_per_s=(arrived / interval_s).tolist(),
        concurrency=(np.diff(_running_time_s(run, edges_s)) / interval_s).tolist(),
    )


def _running_time_s(run: LoadRun, edges_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """For each edge, the time that all requests together have run before it."""
    total_s = np.zeros_like(edges_s)
    for begin_s, end_s in spans(run):
        total_s += edges_s.clip(begin_s, end_s) - begin_s
    return total_s
