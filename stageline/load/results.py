"""Results of a load: records, metrics, timeline."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from stageline.load.plan import PlannedRequest

OK = "OK"
RUNNING = "RUNNING"
INTERRUPTED = "INTERRUPTED"


@dataclass(kw_only=True, slots=True)
class MeasuredRequest:
    """One due request. Times are seconds from the load's begin, when the first request was due.

    `slot_wait_s` is the wait for the concurrency limit, during which `sent_s` is None.
    `message_times_s[i]` is the arrival of the i-th message with tokens, and `message_tokens[i]` their
    number. `status` is OK, RUNNING, INTERRUPTED (by the caller), or the name of a gRPC status, with the
    reason code `reason` and the text `error`.
    """

    planned: PlannedRequest
    sent_s: float | None = None
    slot_wait_s: float = 0.0
    ended_s: float | None = None
    message_times_s: list[float] = field(default_factory=list)
    message_tokens: list[int] = field(default_factory=list)
    status: str = RUNNING
    reason: str = ""
    error: str = ""
    cached_tokens: int = 0
    restarts: int = 0

    @property
    def is_complete(self) -> bool:
        return self.status == OK

    @property
    def has_failed(self) -> bool:
        """Whether it failed, other than by an interruption."""
        return self.status not in (OK, RUNNING, INTERRUPTED)

    @property
    def num_tokens(self) -> int:
        return sum(self.message_tokens)

    @property
    def lag_s(self) -> float | None:
        """Delay of sending caused by the load generator; None before sending."""
        if self.sent_s is None:
            return None
        return max(0.0, self.sent_s - self.planned.time_s - self.slot_wait_s)

    @property
    def ttft_s(self) -> float:
        """Seconds from due time to first token."""
        return self.message_times_s[0] - self.planned.time_s

    @property
    def e2e_s(self) -> float:
        """Seconds from due time to last token."""
        return self.message_times_s[-1] - self.planned.time_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first one; None for a single token."""
        num_later = self.num_tokens - 1
        return (self.message_times_s[-1] - self.message_times_s[0]) / num_later if num_later else None

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive messages with tokens."""
        return [later_s - earlier_s for earlier_s, later_s in pairwise(self.message_times_s)]


@dataclass(kw_only=True, slots=True)
class Tally:
    """Current counts of a running load."""

    num_due: int = 0
    num_running: int = 0
    num_completed: int = 0
    num_failed: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRun:
    """Raw result of a load.

    `num_planned` requests were planned; `records` has those due before `duration_s`, the time until the
    last request ended or the interruption. `cpu_s` is the load generator's processor time.
    """

    records: tuple[MeasuredRequest, ...]
    num_planned: int
    duration_s: float
    cpu_s: float
    is_interrupted: bool = False


PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSummary:
    """Statistics of `num_samples` values; percentiles are linearly interpolated (numpy's "linear")."""

    num_samples: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Latency limits in seconds, None for none; `itl_s` bounds the longest gap, `tpot_s` the mean."""

    ttft_s: float | None = None
    itl_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        for limit_s in (self.ttft_s, self.itl_s, self.tpot_s, self.e2e_s):
            if limit_s is not None and not 0 < limit_s < math.inf:
                raise ValueError(f"a limit of {limit_s * 1e3:g} ms is not above 0 and finite")

    @property
    def are_given(self) -> bool:
        return any(limit is not None for limit in (self.ttft_s, self.itl_s, self.tpot_s, self.e2e_s))

    def are_met(self, record: MeasuredRequest) -> bool:
        """Whether the request has completed within all limits, inclusive."""
        return record.is_complete and all(
            limit_s is None or measured_s is None or measured_s <= limit_s
            for limit_s, measured_s in (
                (self.ttft_s, record.ttft_s),
                (self.itl_s, max(record.gaps_s, default=None)),
                (self.tpot_s, record.tpot_s),
                (self.e2e_s, record.e2e_s),
            )
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """All metrics of a run. Latencies are of completed requests, None without any.

    Latencies count from a request's due time. `itl_s` has one sample per message with tokens after a
    request's first: the time since the previous message. Tokens of one message arrive together and do not
    count as gaps of zero, which would hide the wait before them; `tpot_s` counts each token. Token rates
    count all received tokens, `input_tokens_per_s` the prompts of completed requests.
    """

    duration_s: float
    num_planned: int
    num_due: int
    num_completed: int
    num_failed: int
    num_interrupted: int
    failures: dict[str, int]
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    num_good: int
    goodput_per_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    restarts: int
    mean_concurrency: float
    max_concurrency: int
    tokens_per_message: float | None
    ttft_s: SampleSummary | None
    itl_s: SampleSummary | None
    tpot_s: SampleSummary | None
    e2e_s: SampleSummary | None
    lag_s: SampleSummary | None
    slot_wait_s: SampleSummary | None
    cpu_share: float


def summarize(run: LoadRun, limits: Limits) -> Summary:
    completed = [record for record in run.records if record.is_complete]
    failures = Counter(record.status for record in run.records if record.has_failed)
    num_good = sum(limits.are_met(record) for record in completed)
    input_tokens = sum(record.planned.prompt_tokens for record in completed)
    output_tokens = sum(record.num_tokens for record in run.records)
    num_messages = sum(len(record.message_tokens) for record in run.records)
    return Summary(
        duration_s=run.duration_s,
        num_planned=run.num_planned,
        num_due=len(run.records),
        num_completed=len(completed),
        num_failed=failures.total(),
        num_interrupted=sum(record.status == INTERRUPTED for record in run.records),
        failures=dict(sorted(failures.items())),
        requests_per_s=len(completed) / run.duration_s,
        input_tokens_per_s=input_tokens / run.duration_s,
        output_tokens_per_s=output_tokens / run.duration_s,
        num_good=num_good,
        goodput_per_s=num_good / run.duration_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(record.cached_tokens for record in completed),
        restarts=sum(record.restarts for record in completed),
        mean_concurrency=sum(end - begin for begin, end in spans(run)) / run.duration_s,
        max_concurrency=_most_at_once(spans(run)),
        tokens_per_message=output_tokens / num_messages if num_messages else None,
        ttft_s=distribution(record.ttft_s for record in completed),
        itl_s=distribution(gap_s for record in completed for gap_s in record.gaps_s),
        tpot_s=distribution(record.tpot_s for record in completed),
        e2e_s=distribution(record.e2e_s for record in completed),
        lag_s=distribution(record.lag_s for record in run.records),
        slot_wait_s=distribution(record.slot_wait_s for record in run.records),
        cpu_share=run.cpu_s / run.duration_s,
    )


def distribution(values: Iterable[float | None]) -> SampleSummary | None:
    """Statistics of the values that are not None; None without any."""
    samples = np.array([value for value in values if value is not None], dtype=np.float64)
    if not samples.size:
        return None
    p50, p90, p95, p99 = np.percentile(samples, PERCENTILES, method="linear").tolist()
    return SampleSummary(
        num_samples=samples.size,
        mean=float(samples.mean()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=float(samples.max()),
    )


def spans(run: LoadRun) -> list[tuple[float, float]]:
    """Begin and end, in seconds, of each sent request."""
    return [
        (record.sent_s, run.duration_s if record.ended_s is None else record.ended_s)
        for record in run.records
        if record.sent_s is not None
    ]


def _most_at_once(running: Sequence[tuple[float, float]]) -> int:
    # At equal times an end comes first: -1 sorts before +1.
    changes = sorted([(begin, +1) for begin, _ in running] + [(end, -1) for _, end in running])
    return int(max(np.cumsum([change for _, change in changes]), default=0))


NUM_INTERVALS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Entry i covers seconds [i * interval_s, (i + 1) * interval_s); concurrency is a mean."""

    interval_s: float
    output_tokens_per_s: list[float]
    concurrency: list[float]


def timeline(run: LoadRun, *, num_intervals: int = NUM_INTERVALS) -> Timeline:
    """Divide the run into `num_intervals`."""
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
    """Total running time of all requests before each edge."""
    total_s = np.zeros_like(edges_s)
    for begin_s, end_s in spans(run):
        total_s += edges_s.clip(begin_s, end_s) - begin_s
    return total_s
