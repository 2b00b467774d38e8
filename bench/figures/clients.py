"""Clients that stream from a pipeline of mock stages, against the limit of the stages' time."""

from __future__ import annotations

from bench.harness.figure import Figure
from bench.harness.group import Setting
from bench.harness.mock_cluster import mock_cluster
from bench.harness.steady import measure_steady
from bench.harness.step_log import SteadyRate

FEW_CLIENTS = 16
TARGETS = {64: 0.97, 256: 0.93}
"""By number of clients."""
NUM_STAGES, STAGE_MS = 4, 40


async def measure(setting: Setting) -> list[Figure]:
    """Steps per second with 64 and 256 streams, and with 16 on the same cluster."""
    window_s = 2.0 if setting.is_quick else 5.0
    async with mock_cluster([f"step={STAGE_MS}ms"] * NUM_STAGES) as cluster:
        rates = {
            number: (await measure_steady(cluster, num_streams=number, settle_s=1.0, window_s=window_s))[0]
            for number in (FEW_CLIENTS, *TARGETS)
        }
    return [_figure(number, rates[number], few=rates[FEW_CLIENTS]) for number in TARGETS]


def _figure(num_clients: int, rate: SteadyRate, *, few: SteadyRate) -> Figure:
    return Figure(
        name=f"{num_clients} streaming clients : one step per {STAGE_MS} ms",
        measured=rate.steps_per_s,
        bound=1e3 / STAGE_MS,
        unit="steps/s",
        target=TARGETS[num_clients],
        limit=1.002,
        noise=0.03,
        how=f"steps/s while {num_clients} streams are read by one client process : 1 / stage's time",
        details={
            "tokens_per_s": rate.steps_per_s * rate.tokens_per_step,
            "tokens_per_step": rate.tokens_per_step,
            "ratio_with_16_clients": few.steps_per_s * STAGE_MS / 1e3,
        },
    )
