"""A real cluster of processes on one GPU: the whole model in one stage, then in two."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.gpu.bounds import StageWork
from bench.gpu.model import ELEMENT_BYTES, dtype_of, geometry_of
from bench.gpu.phase import Order, Recorder
from bench.gpu.phases.decode import NO_TIME
from bench.gpu.rates import Rates
from bench.harness.cluster import BenchCluster
from bench.harness.running import running_streams
from bench.harness.step_log import LoggedStep, sent_between
from bench.harness.streams import Window, decode_rate, decode_window
from deploy import LocalClusterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Numbers of streams with prompts of `prompt_tokens`, which decode `new_tokens` in a window."""

    streams: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    memory_bytes: int
    flags: tuple[str, ...]
    cell_s: float
    start_s: float


FULL = Plan(
    streams=(32, 128),
    prompt_tokens=512,
    new_tokens=64,
    memory_bytes=28 << 30,
    flags=(
        *("--kv-tokens", "131072", "--max-model-len", "4096"),
        *("--max-step-tokens", "2048", "--max-step-sequences", "128"),
    ),
    cell_s=8.0,
    start_s=35.0,
)
QUICK = Plan(
    streams=(2,),
    prompt_tokens=16,
    new_tokens=8,
    memory_bytes=256 << 20,
    flags=("--kv-tokens", "4096", "--max-model-len", "512", "--max-step-tokens", "64"),
    cell_s=0.5,
    start_s=0.5,
)
MOST_NEW_TOKENS = 440
"""More than a window needs; fewer than the tiny model's positions."""


def cluster_of(
    order: Order, plan: Plan, *, num_workers: int, command: tuple[str, ...] = (), **others: object
) -> BenchCluster:
    """A cluster on the device of the run, not started; `others` are fields of LocalClusterConfig."""
    config = LocalClusterConfig(
        num_workers=num_workers,
        model=order.model,
        devices=(order.device,),
        memory_bytes=plan.memory_bytes,
        num_threads=1 if order.device == "cpu" else None,
        coordinator_arguments=(*plan.flags, "--no-self-check"),
        log_directory=order.logs / f"{order.phase}-{num_workers}",
        **others,  # type: ignore[arg-type]
    )
    vocab_size = geometry_of(is_quick=order.is_quick).vocab
    if command:
        return BenchCluster(config, vocab_size=vocab_size, command=command)
    return BenchCluster(config, vocab_size=vocab_size)


async def measure(recorder: Recorder) -> None:
    """One worker, then two."""
    plan = QUICK if recorder.order.is_quick else FULL
    for num_workers in (1, 2):
        if recorder.left_s < plan.start_s + plan.cell_s:
            for num_streams in plan.streams:
                recorder.not_measured(_name(num_workers, num_streams), "tok/s", NO_TIME)
            continue
        async with cluster_of(recorder.order, plan, num_workers=num_workers) as cluster:
            await cluster.generate_all(2, plan.prompt_tokens, 4)
            for num_streams in plan.streams:
                await _decode(recorder, plan, cluster, num_workers, num_streams)


def _name(num_workers: int, num_streams: int) -> str:
    stages = "1 stage" if num_workers == 1 else f"{num_workers} stages"
    return f"cluster of {stages} on one device, {num_streams} streams"


async def _decode(
    recorder: Recorder, plan: Plan, cluster: BenchCluster, num_workers: int, num_streams: int
) -> None:
    name = _name(num_workers, num_streams)
    if recorder.left_s < plan.cell_s:
        recorder.not_measured(name, "tok/s", NO_TIME)
        return
    async with running_streams(
        cluster, num_streams, prompt_tokens=plan.prompt_tokens, max_tokens=MOST_NEW_TOKENS
    ) as running:
        await running.until(lambda streams: decode_window(streams, plan.new_tokens) is not None)
        window = decode_window(running.streams, plan.new_tokens)
        rate = decode_rate(running.streams, window) if window is not None else 0.0
    assert window is not None, "found above"
    steps = sent_between(cluster.steps(), window.begin_s, window.end_s)
    recorder.figure(
        name,
        rate,
        "tok/s",
        bound=_bound(recorder.order, plan, num_workers, num_streams),
        details=_of_steps(steps, window),
    )


def _bound(order: Order, plan: Plan, num_workers: int, num_streams: int) -> float | None:
    """Tokens per second if each stage has its share of the streams in a step, one after another."""
    if (rates := Rates.of(order.rates)) is None:
        return None
    geometry = geometry_of(is_quick=order.is_quick)
    work = StageWork(geometry, geometry.num_layers, ELEMENT_BYTES[dtype_of(order.device)])
    share = max(1, num_streams // num_workers)
    contexts = [plan.prompt_tokens + plan.new_tokens // 2] * share
    step_ms = rates.decode_ms(work, contexts) + 1e3 * work.head_bytes / rates.memory
    return 1e3 * share / step_ms


def _of_steps(steps: Sequence[LoggedStep], window: Window) -> dict[str, float | str]:
    """What stages report of the steps: busy share, and mean times of one stage."""
    stages = list(zip(*(step.stages for step in steps), strict=True))
    found: dict[str, float | str] = {"tokens_per_step": statistics.mean(step.num_tokens for step in steps)}
    for index, times in enumerate(stages):
        compute_us = [compute for _, compute in times]
        found[f"stage_{index}_busy_share"] = sum(compute_us) / 1e6 / window.duration_s
        found[f"stage_{index}_compute_ms"] = statistics.mean(compute_us) / 1e3
        found[f"stage_{index}_wait_ms"] = statistics.mean(wait for wait, _ in times) / 1e3
        found[f"stage_{index}_host_share"] = 1.0 - _device_share(times)
    found["hops_ms"] = statistics.mean(sum(step.hops) for step in steps) / 1e3
    found["lap_ms"] = statistics.mean(step.result_s - step.sent_s for step in steps) * 1e3
    return found


def _device_share(times: Sequence[tuple[int, int]]) -> float:
    """Share of compute in compute and waiting."""
    total = sum(wait + compute for wait, compute in times)
    return sum(compute for _, compute in times) / total if total else 1.0
