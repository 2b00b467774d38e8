"""Draws a run in which a worker is killed while requests decode.

    python -m bench.kill [--output docs/images/kill.svg] [--requests 3]

Three workers of one thread each serve the 88 M model, with prompts of 128 tokens; no worker is a spare.
Prints the longest pause of each request.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.command import cache_directory
from bench.harness.cluster import BenchCluster
from bench.harness.figure import NotMeasured
from bench.harness.group import Setting
from bench.harness.kill_drawing import KillRun, WorkerStep, draw
from bench.harness.real_cluster import PROMPT_TOKENS, real_cluster, warm_up
from bench.harness.running import running_streams
from bench.harness.step_log import LoggedStep
from bench.harness.streams import Stream
from bench.harness.timeline import timeline
from coordinator.recovery.policy import DEFAULT_POLICY as POLICY
from deploy import ClusterFailed
from stageline_rpc.v1 import cluster_pb2

NUM_WORKERS = 3
KILLED = "worker-1"
BEFORE_S, AFTER_S = 0.6, 0.5
"""Drawn before the kill, and after every request has gone on."""
SETTLED_TOKENS, RESUMED_TOKENS = 50, 5
MAX_TOKENS = 2000
"""More than the run needs."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Workers of a plan in stage order, and their layers as text."""

    workers: tuple[str, ...]
    layers: dict[str, str]

    @classmethod
    def of(cls, status: cluster_pb2.GetStatusResponse) -> Stages:
        workers = sorted(
            (worker for worker in status.workers if worker.HasField("stage")), key=lambda worker: worker.stage
        )
        layers = {worker.name: f"layers {worker.layer_begin} to {worker.layer_end - 1}" for worker in workers}
        return cls(tuple(worker.name for worker in workers), layers)


async def measure(setting: Setting, num_requests: int) -> tuple[KillRun, list[Stream]]:
    """Kill the middle stage, and wait until every request has gone on.

    Raises NotMeasured if a stream ends, or if the steps are not of the two plans.
    """
    async with real_cluster(setting, num_workers=NUM_WORKERS) as cluster:
        await warm_up(cluster)
        before = Stages.of(await cluster.status())
        async with running_streams(
            cluster, num_requests, prompt_tokens=PROMPT_TOKENS, max_tokens=MAX_TOKENS
        ) as running:
            await running.until(
                lambda streams: all(len(stream.arrivals_s) >= SETTLED_TOKENS for stream in streams)
            )
            await running.go_on_for(BEFORE_S)
            killed_s = time.monotonic()
            cluster.processes.kill(KILLED)
            await cluster.processes.next_exit()
            await running.go_on_for(POLICY.rejoin_grace_s)
            paused = [len(stream.arrivals_s) for stream in running.streams]
            await running.until(
                lambda streams: all(
                    len(stream.arrivals_s) >= count + RESUMED_TOKENS
                    for stream, count in zip(streams, paused, strict=True)
                )
            )
            end_s = time.monotonic() + AFTER_S
            await running.go_on_for(AFTER_S)
            streams = running.streams
        after = Stages.of(await cluster.status())
        return _run(cluster, streams, (before, after), killed_s, end_s), streams


def _run(
    cluster: BenchCluster, streams: list[Stream], plans: tuple[Stages, Stages], killed_s: float, end_s: float
) -> KillRun:
    """The run from `BEFORE_S` before the kill to `end_s`; `plans` are those before and after it."""
    begin_s = killed_s - BEFORE_S
    before, after = plans
    steps = [step for step in cluster.steps() if step.result_s >= begin_s and step.sent_s <= end_s]
    epochs = sorted({step.epoch for step in steps})
    if len(epochs) != 2:
        raise NotMeasured(f"steps of epochs {epochs}, not of one before and one after the kill")
    drawn = [
        bar
        for epoch, stages in zip(epochs, plans, strict=True)
        for bar in _bars([step for step in steps if step.epoch == epoch], stages, begin_s, end_s)
    ]
    longest = max(streams, key=_pause_s)
    arrivals_s = [arrival_s for arrival_s in longest.arrivals_s if begin_s <= arrival_s <= end_s]
    return KillRun(
        workers=before.workers,
        killed=KILLED,
        killed_s=BEFORE_S,
        duration_s=end_s - begin_s,
        steps=tuple(drawn),
        tokens_s=tuple(arrival_s - begin_s for arrival_s in arrivals_s),
        layers={name: (text, after.layers.get(name, "")) for name, text in before.layers.items()},
        num_requests=len(streams),
        rejoin_s=POLICY.rejoin_grace_s,
    )


def _pause_s(stream: Stream) -> float:
    return max(stream.gaps_s(0.0, float("inf")))


def _bars(steps: list[LoggedStep], stages: Stages, begin_s: float, end_s: float) -> list[WorkerStep]:
    return [
        WorkerStep(stages.workers[bar.stage], bar.step_id, bar.begin_s, bar.end_s)
        for bar in timeline(steps, begin_s, end_s).bars
    ]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/images/kill.svg"))
    parser.add_argument("--requests", type=int, default=3)
    given = parser.parse_args(arguments)
    setting = Setting(
        is_quick=False, output_directory=given.output.parent, cache_directory=cache_directory(), say=print
    )
    try:
        run, streams = asyncio.run(measure(setting, given.requests))
    except (NotMeasured, ClusterFailed) as error:
        print(f"bench.kill: error: {error}", file=sys.stderr)
        return 1
    given.output.write_text(draw(run))
    pauses = ", ".join(f"{_pause_s(stream):.2f}" for stream in streams)
    print(f"pauses of {len(streams)} requests: {pauses} s")
    print(f"drawn to {given.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
