"""Bursts of requests, against prefill alone followed by steady decode of the same cluster."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from bench.harness.bursts import Burst
from bench.harness.cluster import BenchCluster
from bench.harness.figure import Better, Figure, Round, of_rounds
from bench.harness.group import Setting
from bench.harness.real_cluster import NEW_TOKENS, PROMPT_TOKENS, real_cluster
from bench.harness.running import running_streams
from bench.harness.streams import decode_rate, decode_window

REQUESTS = (1, 8, 16, 32)
QUICK_REQUESTS = (1, 4)
MOST_NEW_TOKENS = 400
"""Longer than the window of steady decode; the streams are cancelled after it."""
OF_BOUND = 0.9
OF_PREFILL = 1.25

HOW_ALL = (
    "64 new tokens of each request / time of the whole burst : the same for prefill alone (last first token "
    "with max_tokens=1) followed by steady decode of as many streams"
)
HOW_FIRST = "from sending to the last first token of the burst : of the same prompts with max_tokens=1"


@dataclass(frozen=True, slots=True)
class Measured:
    """One round: a burst, and the rate while all streams decode."""

    burst: Burst
    steady_decode_rate: float


async def measure(setting: Setting) -> list[Figure]:
    """Rounds of each number of requests: prefill alone, the burst, steady decode."""
    numbers = QUICK_REQUESTS if setting.is_quick else REQUESTS
    measured: dict[int, list[Measured]] = {number: [] for number in numbers}
    async with real_cluster(setting) as cluster:
        await cluster.generate_all(max(numbers), PROMPT_TOKENS, 8)
        for _ in range(setting.rounds(5)):
            for number in numbers:
                measured[number].append(await _round(cluster, number))
                setting.say(f"{number} at once: {_summary(measured[number][-1])}")
    return [figure for number, runs in measured.items() for figure in _figures(number, runs)]


async def _round(cluster: BenchCluster, num_requests: int) -> Measured:
    prefill = await cluster.generate_all(num_requests, PROMPT_TOKENS, 1)
    streams = await cluster.generate_all(num_requests, PROMPT_TOKENS, NEW_TOKENS)
    return Measured(
        Burst.of(prefill, streams, prompt_tokens=PROMPT_TOKENS), await _steady(cluster, num_requests)
    )


async def _steady(cluster: BenchCluster, num_streams: int) -> float:
    """Tokens per second from the last first token until each stream has received another burst."""
    async with running_streams(
        cluster, num_streams, prompt_tokens=PROMPT_TOKENS, max_tokens=MOST_NEW_TOKENS
    ) as running:
        await running.until(lambda streams: decode_window(streams, NEW_TOKENS - 1) is not None)
    window = decode_window(running.streams, NEW_TOKENS - 1)
    assert window is not None, "found above"
    return decode_rate(running.streams, window)


def _figures(number: int, runs: list[Measured]) -> list[Figure]:
    requests = f"{number} request{'s at once' if number > 1 else ''}"
    has_target = number > 1
    return [
        of_rounds(
            f"burst, {requests} : prefill, then steady decode",
            [Round(run.burst.all_rate, run.burst.bound_rate(run.steady_decode_rate)) for run in runs],
            unit="tok/s",
            target=OF_BOUND if has_target else None,
            how=HOW_ALL,
            details=_details(runs),
        ),
        of_rounds(
            f"burst, last first token of {requests} : prefill alone",
            [Round(run.burst.first_token_s * 1e3, run.burst.prefill_s * 1e3) for run in runs],
            unit="ms",
            better=Better.LOWER,
            target=OF_PREFILL if has_target else None,
            noise=0.2,
            how=HOW_FIRST,
        ),
    ]


def _details(runs: list[Measured]) -> Mapping[str, float]:
    return {
        "prefill_tokens_per_s": statistics.median(run.burst.prefill_rate for run in runs),
        "decode_tokens_per_s": statistics.median(run.burst.decode_rate for run in runs),
        "all_tokens_per_s": statistics.median(run.burst.all_rate for run in runs),
        "steady_decode_tokens_per_s": statistics.median(run.steady_decode_rate for run in runs),
    }


def _summary(run: Measured) -> str:
    burst = run.burst
    return (
        f"prefill {burst.prefill_rate:.0f}, decode {burst.decode_rate:.0f}, all {burst.all_rate:.0f} of "
        f"{burst.bound_rate(run.steady_decode_rate):.0f} tok/s; last first token {burst.first_token_s:.2f} s "
        f"of {burst.prefill_s:.2f} s"
    )
