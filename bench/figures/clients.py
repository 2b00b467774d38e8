"""256 clients that stream from a pipeline of mock stages, against the limit of the stages' time."""

from __future__ import annotations

from bench.harness.figure import Figure
from bench.harness.group import Setting
from bench.harness.mock_cluster import mock_cluster
from bench.harness.steady import measure_steady

NUM_CLIENTS, FEW_CLIENTS = 256, 16
NUM_STAGES, STAGE_MS = 4, 40
TARGET = 0.97
"""The target of an even pipeline."""


async def measure(setting: Setting) -> list[Figure]:
    """Steps per second with 256 streams, and with 16 on the same cluster."""
    window_s = 2.0 if setting.is_quick else 5.0
    async with mock_cluster([f"step={STAGE_MS}ms"] * NUM_STAGES) as cluster:
        few, _ = await measure_steady(cluster, num_streams=FEW_CLIENTS, settle_s=1.0, window_s=window_s)
        many, _ = await measure_steady(cluster, num_streams=NUM_CLIENTS, settle_s=1.0, window_s=window_s)
    figure = Figure(
        name=f"{NUM_CLIENTS} streaming clients : one step per {STAGE_MS} ms",
        measured=many.steps_per_s,
        bound=1e3 / STAGE_MS,
        unit="steps/s",
        target=TARGET,
        limit=1.002,
        noise=0.03,
        how="steps/s while 256 streams are read by one client process : 1 / stage's time",
        details={
            "tokens_per_s": many.steps_per_s * many.tokens_per_step,
            "tokens_per_step": many.tokens_per_step,
            "ratio_with_16_clients": few.steps_per_s * STAGE_MS / 1e3,
        },
    )
    return [figure]
