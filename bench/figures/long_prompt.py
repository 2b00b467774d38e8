"""Time to the first token of a long prompt with overlapping chunks on equal mock stages."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bench.harness.cluster import BenchCluster
from bench.harness.figure import Better, Figure, Round, of_rounds
from bench.harness.group import Setting
from bench.harness.mock_cluster import mock_cluster
from bench.harness.timeline_file import write_timeline

NUM_STAGES = 4
STEP_MS, TOKEN_MS = 2.0, 0.05
PROMPT_TOKENS = 8192
MAX_STEP_TOKENS = 512
TARGET = 1.08


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """One prompt on an idle pipeline."""

    sent_s: float
    first_token_s: float
    chunks: tuple[int, ...]

    @property
    def bound_s(self) -> float:
        """(C + S - 1) x mean time of a chunk on a stage."""
        chunk_s = (STEP_MS + TOKEN_MS * sum(self.chunks) / len(self.chunks)) / 1e3
        return (len(self.chunks) + NUM_STAGES - 1) * chunk_s


async def measure(setting: Setting) -> list[Figure]:
    """Send several prompts, one after another."""
    specs = [f"step={STEP_MS:g}ms,token={TOKEN_MS:g}ms"] * NUM_STAGES
    arguments = ("--max-step-tokens", str(MAX_STEP_TOKENS))
    async with mock_cluster(specs, coordinator_arguments=arguments) as cluster:
        await _first_token(cluster)
        runs = [await _first_token(cluster) for _ in range(setting.rounds(7, 2))]
        begin_s, end_s = runs[-1].sent_s, runs[-1].sent_s + runs[-1].first_token_s
        title = f"prompt of {PROMPT_TOKENS:,} tokens, {NUM_STAGES} mock stages"
        write_timeline(setting, cluster, begin_s, end_s, name="long_prompt", title=title)
    figure = of_rounds(
        f"long prompt, {NUM_STAGES} stages : (C + S - 1) chunks",
        [Round(run.first_token_s * 1e3, run.bound_s * 1e3) for run in runs],
        unit="ms",
        better=Better.LOWER,
        target=TARGET,
        limit=0.998,
        noise=0.03,
        how="time to first token of 8,192 tokens on an idle pipeline : (C + S - 1) x mean chunk time",
        details={"chunks": len(runs[-1].chunks), "largest_chunk": max(runs[-1].chunks)},
    )
    return [figure]


async def _first_token(cluster: BenchCluster) -> LongPrompt:
    started_s = time.monotonic()
    stream = await cluster.generate(PROMPT_TOKENS, 1)
    steps = [step for step in cluster.steps(started_s) if step.chunks]
    chunks = tuple(step.num_tokens for step in steps)
    if sum(chunks) != PROMPT_TOKENS:
        raise RuntimeError(f"chunks {chunks} are not the prompt's {PROMPT_TOKENS} tokens")
    return LongPrompt(stream.sent_s, stream.first_token_s, chunks)
