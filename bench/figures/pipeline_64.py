"""Pipeline efficiency of 64 mock stages of 50 ms."""

from __future__ import annotations

from bench.figures.pipeline import efficiency
from bench.harness.figure import Figure
from bench.harness.group import Setting

NUM_STAGES, STAGE_MS, TARGET = 64, 50, 0.95


async def measure(setting: Setting) -> list[Figure]:
    """Measure one window of two rounds through all stages."""
    name = f"pipeline, {NUM_STAGES} stages of {STAGE_MS} ms"
    window_s = 2 * NUM_STAGES * STAGE_MS / 1e3
    return [await efficiency(setting, name, [STAGE_MS] * NUM_STAGES, target=TARGET, window_s=window_s)]
