"""Decode with real compute: two workers with one thread each, against their matrix products alone."""

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
from bench.harness.product_bound import ProductBound, ProductTime, StageWork, stages_of
from bench.harness.real_cluster import NEW_TOKENS, PROMPT_TOKENS, real_cluster, warm_up
from bench.harness.running import running_streams
from bench.harness.step_log import LoggedStep, sent_between
from bench.harness.streams import Window, decode_rate, decode_window
from bench.harness.timeline_file import write_timeline

STREAMS = (1, 8, 16, 32)
MOST_NEW_TOKENS = 2048
"""Longer than the window of NEW_TOKENS in which all streams decode; they are cancelled after it."""
OF_BOUND = {1: 0.8, 8: 0.8, 16: 0.8, 32: 0.75}
FASTEST_OF_PACKED = 1.5
"""Compiled products of stages take 0.68 of the time of packed ones for 16 rows, more for others."""
OF_HUGGING_FACE = {8: 1.15, 16: 2.1, 32: 3.3}
"""Relative to batch 8 on two threads."""
TIMELINE_OF, TIMELINE_S = 16, 0.25
ONE_STREAM_OF_HUGGING_FACE = 1.5
"""Relative to batch 1 on one thread."""

HOW = "tokens/s while all streams decode : micro-batch / slowest stage's products, both cores busy"
HOW_ONE = "tokens/s of one stream : 1 / (products of all stages one after another at batch 1)"


@dataclass(frozen=True, slots=True)
class Decoded:
    """One run of some streams, and the bound measured after it.

    `stages_ms` is the median compute time of each stage per step; empty if stages do not report it.
    """

    rate: float
    window: Window
    tokens_per_step: float
    stages_ms: tuple[float, ...]
    bound: ProductTime
    bound_batch: int


async def measure(setting: Setting) -> list[Figure]:
    """Rounds of each number of streams with its bound, then Hugging Face."""
    decoded: dict[int, list[Decoded]] = {streams: [] for streams in STREAMS}
    one_thread, two_threads = list[float](), list[float]()
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(real_cluster(setting))
        bound = await stack.enter_async_context(ProductBound())
        peer = await stack.enter_async_context(HuggingFace(checkpoint(setting.cache_directory)))
        stages = stages_of(await cluster.status())
        await warm_up(cluster)
        for _ in range(setting.rounds(3)):
            for streams in STREAMS:
                decoded[streams].append(await _decode(cluster, bound, stages, streams))
                setting.say(f"{streams} streams: {decoded[streams][-1].rate:.0f} tok/s")
            lengths = {"prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS}
            one_thread.append((await peer.generate(num_threads=1, batch=1, **lengths)).decode)
            two_threads.append((await peer.generate(num_threads=2, batch=8, **lengths)).decode)
        _write_timeline(cluster, decoded[TIMELINE_OF][-1], setting)
    figures = [_against_bound(streams, runs) for streams, runs in decoded.items()]
    figures += [_against_packed(streams, runs) for streams, runs in decoded.items()]
    figures += [
        _against_hugging_face(
            streams, decoded[streams], two_threads, OF_HUGGING_FACE[streams], "2 threads, batch 8"
        )
        for streams in OF_HUGGING_FACE
    ]
    figures.append(
        _against_hugging_face(1, decoded[1], one_thread, ONE_STREAM_OF_HUGGING_FACE, "1 thread, batch 1")
    )
    return figures


async def _decode(
    cluster: BenchCluster, bound: ProductBound, stages: list[StageWork], num_streams: int
) -> Decoded:
    started_s = time.monotonic()
    async with running_streams(
        cluster, num_streams, prompt_tokens=PROMPT_TOKENS, max_tokens=MOST_NEW_TOKENS
    ) as running:
        streams = running.streams
        await running.until(lambda streams: decode_window(streams, NEW_TOKENS - 1) is not None)
    window = decode_window(streams, NEW_TOKENS - 1)
    assert window is not None, "found above"
    steps = sent_between(cluster.steps(started_s), window.begin_s, window.end_s)
    tokens_per_step = statistics.mean(step.num_tokens for step in steps)
    batch = max(1, num_streams // len(stages))
    if num_streams == 1:
        product_time = await bound.one_after_another(stages, batch=1, head_rows=1)
    else:
        product_time = await bound.slowest_stage(stages, batch=batch, head_rows=batch)
    return Decoded(
        decode_rate(streams, window), window, tokens_per_step, _stages_ms(steps), product_time, batch
    )


def _stages_ms(steps: list[LoggedStep]) -> tuple[float, ...]:
    """Median compute time of each stage per step."""
    times_us = zip(*([compute_us for _, compute_us in step.stages] for step in steps), strict=True)
    return tuple(statistics.median(times) / 1e3 for times in times_us)


def _write_timeline(cluster: BenchCluster, run: Decoded, setting: Setting) -> None:
    """Draw the middle of the run's window."""
    middle_s = (run.window.begin_s + run.window.end_s) / 2
    title = f"88 M model, two workers, {TIMELINE_OF} streams, decode"
    write_timeline(setting, cluster, middle_s, middle_s + TIMELINE_S, name="decode", title=title)


def _against_bound(streams: int, runs: list[Decoded]) -> Figure:
    return of_rounds(
        f"decode, {_count(streams)} : matrix products",
        [Round(run.rate, run.bound_batch / run.bound.plain_s) for run in runs],
        unit="tok/s",
        how=HOW if streams > 1 else HOW_ONE,
        target=OF_BOUND[streams],
        details={
            "tokens_per_step": statistics.mean(run.tokens_per_step for run in runs),
            "products_plain_ms": statistics.median(run.bound.plain_s for run in runs) * 1e3,
            "products_packed_ms": statistics.median(run.bound.packed_s for run in runs) * 1e3,
            **{f"stage_{stage}_ms": time_ms for stage, time_ms in enumerate(runs[-1].stages_ms)},
        },
    )


def _against_packed(streams: int, runs: list[Decoded]) -> Figure:
    """The harder bound: the same products with weights in oneDNN's own layout, as in stages."""
    return of_rounds(
        f"decode, {_count(streams)} : products of packed weights",
        [Round(run.rate, run.bound_batch / run.bound.packed_s) for run in runs],
        unit="tok/s",
        how=(HOW if streams > 1 else HOW_ONE) + ", with weights packed once",
        target=None,
        limit=FASTEST_OF_PACKED,
    )


def _against_hugging_face(
    streams: int, runs: list[Decoded], rates: list[float], target: float, what: str
) -> Figure:
    return of_rounds(
        f"decode, {_count(streams)} : Hugging Face, {what}",
        against_best([run.rate for run in runs], rates),
        unit="tok/s",
        how=f"tokens/s while all streams decode : transformers' generate, {what}, its best round",
        target=target,
    )


def _count(streams: int) -> str:
    return "1 stream" if streams == 1 else f"{streams} streams"
