"""Pipeline efficiency: mock stages of 20 ms, equal and uneven, against one step per slowest stage's time."""

from __future__ import annotations

from collections.abc import Sequence

from bench.harness.figure import Figure
from bench.harness.group import Setting
from bench.harness.mock_cluster import mock_cluster
from bench.harness.steady import measure_steady
from bench.harness.step_log import SteadyRate
from bench.harness.timeline_file import write_timeline

STAGE_MS = 20
NUM_STAGES = (2, 4, 8, 16)
UNEVEN_MS = (12, 20, 8, 16)
EVEN_TARGET, UNEVEN_TARGET = 0.97, 0.95
LIMIT = 1.002
STEP_SEQUENCES = 4
"""Maximum sequences of a step; with enough requests this makes more steps than stages."""
FREE_STAGES = (4, 8, 16)
TIMELINE_OF, TIMELINE_S = 8, 0.5


async def measure(setting: Setting) -> list[Figure]:
    """Measure even pipelines (one with a timeline) and the uneven one."""
    figures = []
    for num_stages in NUM_STAGES[:2] if setting.is_quick else NUM_STAGES:
        name = f"pipeline, {num_stages} stages of {STAGE_MS} ms"
        figures.append(await efficiency(setting, name, [STAGE_MS] * num_stages, target=EVEN_TARGET))
    name = f"pipeline, stages of {', '.join(map(str, UNEVEN_MS))} ms"
    figures.append(await efficiency(setting, name, UNEVEN_MS, target=UNEVEN_TARGET))
    for num_stages in FREE_STAGES[:1] if setting.is_quick else FREE_STAGES:
        name = f"pipeline, {num_stages} stages of {STAGE_MS} ms, steps of any size, tokens"
        stages_ms = [STAGE_MS] * num_stages
        figures.append(
            await efficiency(setting, name, stages_ms, target=EVEN_TARGET, step_sequences=None, noise=0.03)
        )
    return figures


async def efficiency(
    setting: Setting,
    name: str,
    stages_ms: Sequence[int],
    *,
    target: float | None,
    window_s: float = 5.0,
    step_sequences: int | None = STEP_SEQUENCES,
    noise: float = 0.02,
) -> Figure:
    """Steps per second in steady decode, against one step per time of the slowest stage.

    There are enough requests for one step more than stages, with `step_sequences` sequences each. Without a
    limit (None), steps are as many as stages and larger, which serves more tokens but exposes transfer times.
    """
    if setting.is_quick:
        window_s /= 2
    num_streams = STEP_SEQUENCES * (len(stages_ms) + (1 if step_sequences else 0))
    specs = [f"step={stage_ms}ms" for stage_ms in stages_ms]
    arguments = ("--max-step-sequences", str(step_sequences)) if step_sequences else ()
    async with mock_cluster(specs, coordinator_arguments=arguments) as cluster:
        rate, window = await measure_steady(
            cluster,
            num_streams=num_streams,
            settle_s=max(1.0, 2 * sum(stages_ms) / 1e3),
            window_s=window_s,
        )
        if len(stages_ms) == TIMELINE_OF and step_sequences:
            begin_s, end_s = window.end_s - TIMELINE_S, window.end_s
            title = f"{name}, {num_streams} streams in decode"
            write_timeline(setting, cluster, begin_s, end_s, name="pipeline", title=title)
    bound = 1e3 / max(stages_ms)
    setting.say(f"{name}: {rate.steps_per_s:.2f} of {bound:.2f} steps/s")
    return _figure(name, stages_ms, rate, num_streams=num_streams, target=target, noise=noise)


def _figure(
    name: str,
    stages_ms: Sequence[int],
    rate: SteadyRate,
    *,
    num_streams: int,
    target: float | None,
    noise: float,
) -> Figure:
    return Figure(
        name=f"{name} : one step per {max(stages_ms)} ms",
        measured=rate.steps_per_s,
        bound=1e3 / max(stages_ms),
        unit="steps/s",
        target=target,
        limit=LIMIT,
        noise=noise,
        how="results per second, first to last in a window of steady decode : 1 / slowest stage",
        details={
            "tokens_per_step": rate.tokens_per_step,
            "num_streams": num_streams,
            "window_s": rate.duration_s,
        },
    )
