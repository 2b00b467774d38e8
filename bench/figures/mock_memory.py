"""Resident memory of mock workers after a load."""

from __future__ import annotations

from bench.harness.figure import Better, Figure
from bench.harness.group import Setting
from bench.harness.mock_cluster import mock_cluster

MOST_MB = 80
MB = 1e6


async def measure(setting: Setting) -> list[Figure]:
    """Measure the largest of three."""
    async with mock_cluster(["step=1ms"] * 3) as cluster:
        await cluster.generate_all(32, 128, 16 if setting.is_quick else 64)
        resident = cluster.resident_bytes()
    figure = Figure(
        name="memory, mock worker : 80 MB",
        measured=max(resident) / MB,
        bound=MOST_MB,
        unit="MB",
        better=Better.LOWER,
        target=1.0,
        noise=0.03,
        how="resident after 32 streams, of the largest of 3 mock workers",
    )
    return [figure]
