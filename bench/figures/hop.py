"""Laps of a ring of mock stages, against a raw grpc.aio ring with equal hops and bytes.

Stages without compute show the time of a lap in which nothing else happens; stages that compute 2 ms show
what a hop adds where stages can work ahead of the hidden states. There the raw ring's nodes hold each message
for 2 ms: processes that sleep meanwhile wake up later than busy ones.
"""

from __future__ import annotations

import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

from bench.harness.cluster import BenchCluster
from bench.harness.figure import Better, Figure, Round, of_rounds
from bench.harness.group import Setting
from bench.harness.mock_cluster import HIDDEN_SIZE, mock_cluster
from bench.harness.raw_ring import RawRing
from bench.harness.ring_message import Lap, lap_of_step

NUM_STAGES = 3
TARGET = 1.35
COMPUTE_MS = 2
HOP_LIMIT_US = 100
CHUNK_TOKENS = 512
NUM_DECODES, NUM_COMPUTED_DECODES = 300, 100
MAX_TRIES = 5

HOW_COMPUTED = (
    "(lap - lap of a raw ring whose nodes hold each message as long) / hops, one step in flight : the limit"
)
HOW = "from a step's leaving the scheduler to its result's return, one step in flight : the raw ring's lap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Streams in decode, or prompts of whole chunks."""

    name: str
    num_slices: int
    num_tokens: int

    @property
    def lap(self) -> Lap:
        return lap_of_step(self.num_slices, self.num_tokens, hidden_size=HIDDEN_SIZE)


LOADS = (
    Load(name="1 slice", num_slices=1, num_tokens=1),
    Load(name="16 slices", num_slices=16, num_tokens=16),
    Load(name="chunk of 512 tokens (1 MiB)", num_slices=1, num_tokens=CHUNK_TOKENS),
)


async def measure(setting: Setting) -> list[Figure]:
    """Measure the rings in turns, while all of them run."""
    rounds: dict[Load, list[Round]] = {load: [] for load in LOADS}
    computed: dict[Load, list[Round]] = {load: [] for load in LOADS}
    async with AsyncExitStack() as stack:
        empty = await stack.enter_async_context(_cluster("step=0ms"))
        computing = await stack.enter_async_context(_cluster(f"step={COMPUTE_MS}ms"))
        ring = await stack.enter_async_context(RawRing(NUM_STAGES))
        paused = await stack.enter_async_context(RawRing(NUM_STAGES, pause_s=COMPUTE_MS / 1e3))
        for _ in range(setting.rounds(5)):
            for load in LOADS:
                ours_s, raw_s = await _lap(empty, load, NUM_DECODES), await ring.lap(load.lap)
                rounds[load].append(Round(ours_s * 1e6, raw_s * 1e6))
                beside_s = await _lap(computing, load, NUM_COMPUTED_DECODES)
                paused_s = await paused.lap(load.lap)
                hop_s = (beside_s - paused_s) / (NUM_STAGES + 1)
                computed[load].append(Round(max(1.0, hop_s * 1e6), HOP_LIMIT_US))
                setting.say(
                    f"{load.name}: {ours_s * 1e6:.0f} us, raw ring {raw_s * 1e6:.0f} us; "
                    f"beside {COMPUTE_MS} ms {beside_s * 1e6:.0f} us, raw ring {paused_s * 1e6:.0f} us"
                )
    return [
        *(_against_ring(load, rounds[load]) for load in LOADS),
        *(_beside_compute(load, computed[load]) for load in LOADS),
    ]


def _cluster(spec: str) -> BenchCluster:
    arguments = ("--steps-in-flight", "1", "--max-step-tokens", str(CHUNK_TOKENS))
    return mock_cluster([spec] * NUM_STAGES, coordinator_arguments=arguments)


def _against_ring(load: Load, rounds: list[Round]) -> Figure:
    return of_rounds(
        f"hop, lap of {NUM_STAGES} stages, {load.name} : raw ring",
        rounds,
        unit="us",
        better=Better.LOWER,
        target=TARGET,
        how=HOW,
        details={"hops": NUM_STAGES + 1, "hidden_bytes": load.lap.hidden_bytes},
    )


def _beside_compute(load: Load, rounds: list[Round]) -> Figure:
    return of_rounds(
        f"hop, beside {COMPUTE_MS} ms of compute, without raw ring, {load.name} : {HOP_LIMIT_US} us",
        rounds,
        unit="us",
        better=Better.LOWER,
        target=1.0,
        noise=0.25,
        how=HOW_COMPUTED,
    )


async def _lap(cluster: BenchCluster, load: Load, num_decodes: int) -> float:
    """Median seconds per lap of steps with exactly this load, without the compute of its stages.

    On a machine that is full of other processes, steps may have other chunks: then it is tried again.
    """
    for _ in range(MAX_TRIES):
        if laps_s := await _laps(cluster, load, num_decodes):
            return statistics.median(laps_s)
    raise RuntimeError(f"no step of {load.name} in {MAX_TRIES} tries: the machine is too busy")


async def _laps(cluster: BenchCluster, load: Load, num_decodes: int) -> list[float]:
    started_s = time.monotonic()
    if load.num_tokens > load.num_slices:
        for _ in range(4):
            await cluster.generate(8 * CHUNK_TOKENS, 1)
    else:
        await cluster.run_unread(load.num_slices, 16, num_decodes)
    return [
        step.result_s - step.sent_s - step.compute_s
        for step in cluster.steps(started_s)
        if step.num_tokens == load.num_tokens and bool(step.chunks) == (load.num_tokens > load.num_slices)
    ]
