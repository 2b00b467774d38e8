"""Pipeline efficiency: mock stages of 20 ms, equal and uneven, against one step per slowest stage's time."""

from __future__ import annotations

from collections.abc import Sequence

from bench.harness.figure import Figure, Round, of_rounds
from bench.harness.group import Setting
from bench.harness.mock_cluster import HIDDEN_SIZE, mock_cluster
from bench.harness.raw_ring import RawRing
from bench.harness.ring_message import lap_of_step
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
ANY_SIZE_STAGES = (4, 8, 16)
ANY_SIZE_WINDOW_S = 2.5
TIMELINE_OF, TIMELINE_S = 8, 0.5
HOW = "results per second, first to last in a window of steady decode : 1 / slowest stage"
HOW_RAW = "the same : messages per second of a raw ring, as many in flight as nodes"


async def measure(setting: Setting) -> list[Figure]:
    """Measure even pipelines (one with a timeline) and the uneven one."""
    figures = []
    for num_stages in NUM_STAGES[:2] if setting.is_quick else NUM_STAGES:
        name = f"pipeline, {num_stages} stages of {STAGE_MS} ms"
        figures.append(await efficiency(setting, name, [STAGE_MS] * num_stages, target=EVEN_TARGET))
    name = f"pipeline, stages of {', '.join(map(str, UNEVEN_MS))} ms"
    figures.append(await efficiency(setting, name, UNEVEN_MS, target=UNEVEN_TARGET))
    for num_stages in ANY_SIZE_STAGES[:1] if setting.is_quick else ANY_SIZE_STAGES:
        figures += await any_size(setting, num_stages)
    return figures


async def efficiency(
    setting: Setting,
    name: str,
    stages_ms: Sequence[int],
    *,
    target: float | None,
    window_s: float = 5.0,
) -> Figure:
    """Steps per second in steady decode, against one step per time of the slowest stage.

    There are enough requests for one step more than stages, with `STEP_SEQUENCES` sequences each.
    """
    if setting.is_quick:
        window_s /= 2
    num_streams = STEP_SEQUENCES * (len(stages_ms) + 1)
    specs = [f"step={stage_ms}ms" for stage_ms in stages_ms]
    arguments = ("--max-step-sequences", str(STEP_SEQUENCES))
    async with mock_cluster(specs, coordinator_arguments=arguments) as cluster:
        settle_s = max(1.0, 2 * sum(stages_ms) / 1e3)
        rate, window = await measure_steady(
            cluster, num_streams=num_streams, settle_s=settle_s, window_s=window_s
        )
        if len(stages_ms) == TIMELINE_OF:
            begin_s, end_s = window.end_s - TIMELINE_S, window.end_s
            title = f"{name}, {num_streams} streams in decode"
            write_timeline(setting, cluster, begin_s, end_s, name="pipeline", title=title)
    setting.say(f"{name}: {rate.steps_per_s:.2f} of {1e3 / max(stages_ms):.2f} steps/s")
    return _against_slowest_stage(name, rate, max(stages_ms), num_streams=num_streams, target=target)


def _against_slowest_stage(
    name: str, rate: SteadyRate, slowest_ms: int, *, num_streams: int, target: float | None
) -> Figure:
    return Figure(
        name=f"{name} : one step per {slowest_ms} ms",
        measured=rate.steps_per_s,
        bound=1e3 / slowest_ms,
        unit="steps/s",
        target=target,
        limit=LIMIT,
        noise=0.02,
        how=HOW,
        details={
            "tokens_per_step": rate.tokens_per_step,
            "num_streams": num_streams,
            "window_s": rate.duration_s,
        },
    )


async def any_size(setting: Setting, num_stages: int) -> list[Figure]:
    """Steps per second with as many steps as stages, which serves more tokens but exposes transfer times.

    A raw ring whose nodes hold each message as long as a stage computes, with as many messages, takes turns.
    """
    name = f"pipeline, {num_stages} stages of {STAGE_MS} ms, steps of any size, tokens"
    lap = lap_of_step(STEP_SEQUENCES, STEP_SEQUENCES, hidden_size=HIDDEN_SIZE)
    window_s, settle_s = ANY_SIZE_WINDOW_S, max(0.5, 2 * num_stages * STAGE_MS / 1e3)
    rounds, bound = [], 1e3 / STAGE_MS
    async with (
        mock_cluster([f"step={STAGE_MS}ms"] * num_stages) as cluster,
        RawRing(num_stages, pause_s=STAGE_MS / 1e3) as ring,
    ):
        for _ in range(setting.rounds(3)):
            rate, _ = await measure_steady(
                cluster, num_streams=STEP_SEQUENCES * num_stages, settle_s=settle_s, window_s=window_s
            )
            raw = await ring.rate(lap, settle_s=settle_s, window_s=window_s)
            rounds.append(Round(rate.steps_per_s * rate.tokens_per_step / STEP_SEQUENCES, raw))
            setting.say(f"{name}: {rounds[-1].measured:.2f} of {bound:.2f} steps/s, raw ring {raw:.2f}")
    ideal = [Round(round_.measured, bound) for round_ in rounds]
    return [
        of_rounds(f"{name} : {against}", compared, unit="steps/s", target=EVEN_TARGET, noise=0.03, how=how)
        for against, compared, how in (
            (f"one step per {STAGE_MS} ms", ideal, HOW),
            ("raw ring", rounds, HOW_RAW),
        )
    ]
