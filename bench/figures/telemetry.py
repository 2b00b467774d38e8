"""Cost of tracing every request: short requests on mock stages, with and without telemetry."""

from __future__ import annotations

import asyncio
import statistics
import time

from bench.harness.cluster import BenchCluster
from bench.harness.figure import Figure
from bench.harness.group import Setting
from bench.harness.mock_cluster import mock_cluster

NUM_STAGES, STAGE_MS = 8, 20
NUM_STREAMS = 4 * (NUM_STAGES + 1)
PROMPT_TOKENS, MAX_TOKENS = 64, 24
SETTLE_S, WINDOW_S = 2.5, 6.0
ROUNDS = 3
TARGET = 0.97
OFF = {"OTEL_SDK_DISABLED": "true"}


async def measure(setting: Setting) -> list[Figure]:
    """Steps per second with everything sampled and with nothing recorded, in turns.

    Steps instead of tokens: the number of requests per step is random and differs by 10 % between clusters.
    """
    ratios, with_all, without, cpu = [], [], [], []
    for _ in range(1 if setting.is_quick else ROUNDS):
        on, on_cpu = await _steps_per_s(None, quick=setting.is_quick)
        off, off_cpu = await _steps_per_s(OFF, quick=setting.is_quick)
        setting.say(f"telemetry: {on:.1f} steps/s with, {off:.1f} without")
        ratios.append(on / off)
        with_all.append(on)
        without.append(off)
        cpu.append(on_cpu - off_cpu)
    figure = Figure(
        name=f"everything traced, {NUM_STAGES} stages of {STAGE_MS} ms : nothing recorded",
        measured=statistics.median(with_all),
        bound=statistics.median(without),
        unit="steps/s",
        ratios=tuple(ratios),
        target=TARGET,
        noise=0.02,
        how=f"{NUM_STREAMS} clients, {PROMPT_TOKENS} tokens in and {MAX_TOKENS} out, repeated, on a "
        "new cluster each time : the same with OTEL_SDK_DISABLED=true",
        details={"cpu_us_per_step_and_process": statistics.median(cpu)},
    )
    return [figure]


async def _steps_per_s(environment: dict[str, str] | None, *, quick: bool) -> tuple[float, float]:
    """Steps answered per second, and CPU microseconds per step of each process but this one."""
    specs = [f"step={STAGE_MS}ms"] * NUM_STAGES
    arguments = ("--max-step-sequences", "4")
    async with mock_cluster(specs, coordinator_arguments=arguments, environment=environment) as cluster:
        clients = [asyncio.create_task(_ask_again(cluster)) for _ in range(NUM_STREAMS)]
        try:
            await asyncio.sleep(SETTLE_S)
            begin_s, begin_cpu_s = time.monotonic(), cluster.cpu_s()
            await asyncio.sleep(WINDOW_S / 2 if quick else WINDOW_S)
            end_s, end_cpu_s = time.monotonic(), cluster.cpu_s()
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        num_steps = sum(step.sent_s < end_s for step in cluster.steps(begin_s))
    return num_steps / (end_s - begin_s), (end_cpu_s - begin_cpu_s) * 1e6 / num_steps / (NUM_STAGES + 1)


async def _ask_again(cluster: BenchCluster) -> None:
    while True:
        await cluster.generate(PROMPT_TOKENS, MAX_TOKENS)
