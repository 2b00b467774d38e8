"""What a load has shown about a cluster, in numbers."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from stageline.load.record import INTERRUPTED, LoadRun, RequestRecord

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """Of `num_samples` values; percentiles are linear between the nearest two (numpy's "linear")."""

    num_samples: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a request has to meet to count as good; None is no limit. All are in seconds.

    `itl_s` holds for the longest of a request's gaps, `tpot_s` for their mean per token. Raises ValueError.
    """

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

    def are_met(self, record: RequestRecord) -> bool:
        """Whether the request has completed within all limits; each may be reached, and not passed."""
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
    """All numbers of a run. Latencies are those of completed requests, None where there is none.

    Latencies count from when a request was due. `itl_s` has one sample for each message with tokens after the
    first one of its request: the time since the message before. Tokens that share a message arrive together,
    and are not counted as gaps of zero, which would hide the wait before them; `tpot_s` counts each token.
    Token rates count every token that has arrived, `input_tokens_per_s` the prompts of completed requests.
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
    ttft_s: Distribution | None
    itl_s: Distribution | None
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    lag_s: Distribution | None
    slot_wait_s: Distribution | None
    cpu_share: float


def summarize(run: LoadRun, limits: Limits) -> Summary:
    """The numbers of a run."""
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


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """Of the values that are not None; None when there is none."""
    samples = np.array([value for value in values if value is not None], dtype=np.float64)
    if not samples.size:
        return None
    p50, p90, p95, p99 = np.percentile(samples, PERCENTILES, method="linear").tolist()
    return Distribution(
        num_samples=samples.size,
        mean=float(samples.mean()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=float(samples.max()),
    )


def spans(run: LoadRun) -> list[tuple[float, float]]:
    """From when to when each request was running, in seconds; a request that was never sent has no span."""
    return [
        (record.sent_s, run.duration_s if record.ended_s is None else record.ended_s)
        for record in run.records
        if record.sent_s is not None
    ]


def _most_at_once(running: Sequence[tuple[float, float]]) -> int:
    # At equal times an end comes first: -1 sorts before +1.
    changes = sorted([(begin, +1) for begin, _ in running] + [(end, -1) for _, end in running])
    return int(max(np.cumsum([change for _, change in changes]), default=0))
