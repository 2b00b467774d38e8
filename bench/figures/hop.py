"""A ring of stages without compute, against a raw grpc.aio ring of the same messages."""

from __future__ import annotations

from bench.harness.figure import Figure, NotMeasured
from bench.harness.group import Setting

TARGET = 1.35


async def measure(setting: Setting) -> list[Figure]:
    raise NotMeasured("there is no measurement of hops yet")
