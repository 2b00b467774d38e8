"""One churn: real processes with mock stages, a journal, and requests at a constant rate."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from deploy import LocalCluster, LocalClusterConfig
from tests.churn.counted import COUNTS_VARIABLE
from tests.churn.load import Churn
from tests.churn.report import COUNTED_AT, Report, Sample
from tests.churn.requests import KEEP_S, VOCAB_SIZE
from tests.e2e.clusters import START_TIMEOUT_S, wait_for_status
from tests.e2e.commands import ENVIRONMENT
from tests.e2e.recovery_setup import is_idle
from tests.temporary import run_directory

NUM_WORKERS = 2
SAMPLE_INTERVAL_S = 1.0
COUNT_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnConfig:
    """`logs`: directory of logs and journal."""

    seconds: float
    rate: float
    seed: int
    logs: Path | None = None
    say: Callable[[str], None] = print


MAX_SHOWN_CHARACTERS = 6000
"""Of the log around its first traceback."""


async def run_churn(churn: ChurnConfig) -> Report:
    """Runs for the given time, then stops the cluster."""
    report = Report(churn.seconds, churn.rate)
    with run_directory("churn", churn.logs) as directory:
        await _run_in(directory, churn, report)
    return report


async def _run_in(directory: Path, churn: ChurnConfig, report: Report) -> None:
    counts = directory / "counts.jsonl"
    async with LocalCluster(_cluster_config(directory, counts)) as cluster:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        assert cluster.dashboard_url is not None
        load = Churn(cluster.address, cluster.dashboard_url, rate=churn.rate, seed=churn.seed)
        sampler = asyncio.create_task(_sample(cluster.coordinator.pid, report))
        try:
            await cluster.while_running(_stretches(churn, cluster, load, counts, report))
        finally:
            sampler.cancel()
            await asyncio.gather(sampler, return_exceptions=True)
            report.num_requests, report.problems = load.counts, load.problems
        log = cluster.coordinator.read_log()
    if "Traceback" in log:
        shown = log[max(0, log.index("Traceback") - 500) :][:MAX_SHOWN_CHARACTERS]
        report.problems.append(f"the coordinator's log has a traceback: {shown}")


async def _stretches(
    churn: ChurnConfig, cluster: LocalCluster, load: Churn, counts: Path, report: Report
) -> None:
    """The load, with a count of objects after each part of it, with no live request."""
    done = 0.0
    for share in COUNTED_AT:
        await load.run((share - done) * churn.seconds)
        done = share
        counted = await _count(cluster, counts, len(report.counts))
        report.counts.append(counted["objects"])
        report.allocator.append(counted["allocator"])
        in_use_mb = report.allocator[-1]["in_use"] / 1e6
        resident_mb = report.samples[-1].resident_bytes / 1e6
        minutes = share * churn.seconds / 60
        churn.say(
            f"{minutes:5.1f} min  {load.counts.total():6} requests  {resident_mb:6.1f} MB, "
            f"{in_use_mb:.1f} MB allocated  "
            f"{len(load.problems)} problems"
        )


async def _count(cluster: LocalCluster, counts: Path, number: int) -> Mapping[str, dict[str, int]]:
    await wait_for_status(
        cluster.address, lambda status: is_idle(status) and status.requests.kept == 0, timeout_s=6 * KEEP_S
    )
    cluster.kill("coordinator", signal.SIGUSR1)
    async with asyncio.timeout(COUNT_TIMEOUT_S):
        while True:
            lines = counts.read_text().splitlines(keepends=True) if counts.exists() else []
            if len(lines) > number and lines[number].endswith("\n"):
                found: dict[str, dict[str, int]] = json.loads(lines[number])
                return found
            await asyncio.sleep(0.05)


async def _sample(pid: int, report: Report) -> None:
    process, loop = psutil.Process(pid), asyncio.get_running_loop()
    started_s = loop.time()
    while True:
        report.samples.append(Sample(loop.time() - started_s, process.memory_info().rss))
        await asyncio.sleep(SAMPLE_INTERVAL_S)


def _cluster_config(directory: Path, counts: Path) -> LocalClusterConfig:
    """All retaining features on, with bounds that are reached within minutes."""
    return LocalClusterConfig(
        num_workers=NUM_WORKERS,
        mocks=("step=20ms",),
        http="127.0.0.1:0",
        command=(sys.executable, "-m", "tests.churn.counted"),
        coordinator_arguments=(
            *("--mock-model", f"layers=8,vocab={VOCAB_SIZE},max_len=4096"),
            *("--kv-tokens", "32768"),
            *("--journal", str(directory / "journal.db")),
        ),
        environment={**ENVIRONMENT, COUNTS_VARIABLE: str(counts)},
        log_directory=directory / "logs",
    )
