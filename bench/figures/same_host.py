"""Hops between mock stages of one host: in shared memory, against the ways between hosts."""

from __future__ import annotations

import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

from bench.harness.cluster import BenchCluster
from bench.harness.figure import Better, Figure, NotMeasured, Round, of_rounds
from bench.harness.group import Setting
from bench.harness.mock_cluster import mock_cluster

NUM_STAGES = 2
WIDTH, BF16_BYTES = 4096, 2
MAX_STEP_TOKENS = 2048
NUM_DECODES, NUM_PROMPTS, PROMPT_CHUNKS = 200, 2, 4

HOW = (
    "from a stage's output until LAST has the whole frame, checksum included, median of a round, one step in "
    "flight : the same between workers with --same-host off, in turns"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Steps of decodes, or of chunks of prompts: so many tokens of WIDTH in bfloat16."""

    name: str
    num_tokens: int
    is_decode: bool = False


LOADS = (
    Load(name="8 KiB", num_tokens=1, is_decode=True),
    Load(name="128 KiB", num_tokens=16, is_decode=True),
    Load(name="512 KiB", num_tokens=64),
    Load(name="4 MiB", num_tokens=512),
    Load(name="16 MiB", num_tokens=MAX_STEP_TOKENS),
)


async def measure(setting: Setting) -> list[Figure]:
    """Both clusters run all the time, and are measured in turns."""
    rounds: dict[Load, list[Round]] = {load: [] for load in LOADS}
    for load in LOADS:
        async with AsyncExitStack() as stack:
            shared, apart = [
                await stack.enter_async_context(_cluster(load, shares_memory=shares))
                for shares in (True, False)
            ]
            for _ in range(setting.rounds(7, 2)):
                ours_s, other_s = await _hop(shared, load), await _hop(apart, load)
                rounds[load].append(Round(ours_s * 1e6, other_s * 1e6))
                setting.say(
                    f"{load.name}: {ours_s * 1e6:.0f} us shared, {other_s * 1e6:.0f} us between hosts"
                )
    return [
        of_rounds(
            f"same host, hop of {load.name}, shared memory : --same-host off",
            rounds[load],
            unit="us",
            better=Better.LOWER,
            how=HOW,
        )
        for load in LOADS
    ]


def _cluster(load: Load, *, shares_memory: bool) -> BenchCluster:
    step_tokens = MAX_STEP_TOKENS if load.is_decode else load.num_tokens
    return mock_cluster(
        ["step=0ms"] * NUM_STAGES,
        coordinator_arguments=("--steps-in-flight", "1", "--max-step-tokens", str(step_tokens)),
        hidden_size=WIDTH,
        shares_memory=shares_memory,
    )


async def _hop(cluster: BenchCluster, load: Load) -> float:
    """Median seconds."""
    begin_s = time.monotonic()
    if load.is_decode:
        await cluster.run_unread(load.num_tokens, 16, NUM_DECODES)
    else:
        for _ in range(NUM_PROMPTS):
            await cluster.generate(PROMPT_CHUNKS * load.num_tokens, 1)
    hops = [
        step.hops[-1] for step in cluster.steps(begin_s) if step.num_tokens == load.num_tokens and step.hops
    ]
    if not hops:
        raise NotMeasured(f"no step of {load.num_tokens} tokens with times of its hops")
    return statistics.median(hops) / 1e6
