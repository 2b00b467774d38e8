"""Prefill with real compute: 16 prompts, against matrix products, one worker alone and Hugging Face."""

from __future__ import annotations

import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

from bench.harness.cluster import BenchCluster
from bench.harness.figure import Figure, Round, against_best, of_rounds
from bench.harness.group import Setting
from bench.harness.hugging_face_peer import HuggingFace
from bench.harness.llama import checkpoint
from bench.harness.product_bound import ProductBound, ProductTime, stages_of
from bench.harness.real_cluster import PROMPT_TOKENS, real_cluster, warm_up
from bench.harness.streams import prefill_rate

NUM_PROMPTS = 16
HUGGING_FACE_BATCH = 8
OF_BOUND = 0.8
FASTEST_OF_BOUND = 1.1
"""Compiled products of stages take 0.93 of the time of packed ones."""
OF_ONE_WORKER = 1.85
OF_HUGGING_FACE = 1.2


@dataclass(frozen=True, slots=True)
class Prefilled:
    """One run: tokens/s, tokens per step, and rows per step that use the head."""

    rate: float
    tokens_per_step: float
    ends_per_step: float


async def measure(setting: Setting) -> list[Figure]:
    """Rounds of two workers, their bound, one worker, Hugging Face."""
    runs, bounds = list[Prefilled](), list[ProductTime]()
    alone, peers = list[float](), list[float]()
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(real_cluster(setting))
        single = await stack.enter_async_context(real_cluster(setting, num_workers=1))
        bound = await stack.enter_async_context(ProductBound())
        peer = await stack.enter_async_context(HuggingFace(checkpoint(setting.cache_directory)))
        stages = stages_of(await cluster.status())
        await warm_up(cluster)
        await warm_up(single)
        for _ in range(setting.rounds(5)):
            runs.append(await _prefill(cluster))
            batch, rows = round(runs[-1].tokens_per_step), max(1, round(runs[-1].ends_per_step))
            bounds.append(await bound.slowest_stage(stages, batch=batch, head_rows=rows, seconds=1.5))
            alone.append((await _prefill(single)).rate)
            asked = {"batch": HUGGING_FACE_BATCH, "prompt_tokens": PROMPT_TOKENS, "new_tokens": 2}
            peers.append((await peer.generate(num_threads=2, **asked)).prefill)
            setting.say(f"{runs[-1].rate:.0f} tok/s, {batch} tokens per step; one worker {alone[-1]:.0f}")
    return _figures(runs, bounds, alone, peers)


def _figures(
    runs: list[Prefilled], bounds: list[ProductTime], alone: list[float], peers: list[float]
) -> list[Figure]:
    rates = [run.rate for run in runs]
    limits = [run.tokens_per_step / bound.best_s for run, bound in zip(runs, bounds, strict=True)]
    return [
        of_rounds(
            "prefill, 16 prompts : matrix products",
            _rounds(rates, limits),
            unit="tok/s",
            how="2,048 tokens until the last first token : tokens per step / slowest stage's products",
            target=OF_BOUND,
            limit=FASTEST_OF_BOUND,
            details={
                "tokens_per_step": statistics.mean(run.tokens_per_step for run in runs),
                "products_plain_ms": statistics.median(bound.plain_s for bound in bounds) * 1e3,
                "products_packed_ms": statistics.median(bound.packed_s for bound in bounds) * 1e3,
            },
        ),
        of_rounds(
            "prefill, 16 prompts : one worker alone",
            _rounds(rates, alone),
            unit="tok/s",
            how="two workers : one worker with one thread and the whole model, same requests",
            target=OF_ONE_WORKER,
        ),
        of_rounds(
            "prefill, 16 prompts : Hugging Face, 2 threads, batch 8",
            against_best(rates, peers),
            unit="tok/s",
            how="two workers with one thread each : generate of one token, 2 threads, its best round",
            target=OF_HUGGING_FACE,
        ),
    ]


async def _prefill(cluster: BenchCluster) -> Prefilled:
    started_s = time.monotonic()
    streams = await cluster.generate_all(NUM_PROMPTS, PROMPT_TOKENS, 1)
    steps = [step for step in cluster.steps(started_s) if step.num_tokens]
    num_tokens = sum(step.num_tokens for step in steps)
    return Prefilled(prefill_rate(streams, PROMPT_TOKENS), num_tokens / len(steps), NUM_PROMPTS / len(steps))


def _rounds(measured: list[float], bounds: list[float]) -> list[Round]:
    return [Round(*pair) for pair in zip(measured, bounds, strict=True)]
