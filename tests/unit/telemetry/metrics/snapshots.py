"""Snapshots with every kind of metric, of a coordinator and of a worker."""

from opentelemetry.sdk.metrics.export import ScopeMetrics

from telemetry.metrics import definitions
from telemetry.metrics.registry import Registry

START_NS, NOW_NS = 1_700_000_000_000_000_000, 1_700_000_010_000_000_000


def coordinator_snapshot() -> ScopeMetrics:
    registry = Registry(start_ns=START_NS)
    registry.number(definitions.REQUESTS_ENDED).of("finished").set(7)
    registry.number(definitions.BUBBLE).of().set(0.25)
    times = registry.distribution(definitions.REQUEST_TIME).of("failed")
    times.observe(0.02)
    times.observe(0.3, 2)
    times.observe(10_000.0)
    registry.number(definitions.RESIDENT_MEMORY).of().set(123_456_789)
    registry.distribution(definitions.RECOVERY_TIME)
    return registry.snapshot(NOW_NS)


def worker_snapshot(stage: str = "2") -> ScopeMetrics:
    registry = Registry(start_ns=START_NS)
    registry.number(definitions.BUSY_TIME).of(stage).add(1.5)
    registry.number(definitions.KV_BLOCKS).of(stage, "free").set(40)
    registry.number(definitions.LOAD_TIME).of(stage, "load").set(0.5)
    registry.distribution(definitions.STAGE_STEP_TIME).of(stage).observe(0.003)
    registry.number(definitions.RESIDENT_MEMORY).of().set(70_000_000)
    return registry.snapshot(NOW_NS)
