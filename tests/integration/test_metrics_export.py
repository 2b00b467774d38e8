"""Metrics export: from workers to the coordinator, and from all processes to a collector."""

import asyncio
from dataclasses import replace

import grpc
import pytest
from opentelemetry.sdk.resources import Resource

from stage_worker.metrics import CoordinatorExport
from telemetry.metrics.definitions import Process
from telemetry.metrics.otlp import resource_attributes
from telemetry.settings import MetricsExport, OtlpProtocol, TelemetrySettings
from tests.integration.metrics_cluster import MetricsCluster
from tests.integration.request_cases import mixed_cases
from tests.metric_points import Buckets, Values, exported_values
from tests.metrics_collector import DEADLINE_S, MetricsCollector
from tests.unit.telemetry.metrics.snapshots import worker_snapshot

RESOURCE = Resource({"service.name": "stageline-worker", "service.instance.id": "w0"})
QUICK = MetricsExport(collector=OtlpProtocol.GRPC, interval_s=0.05, to_coordinator_interval_s=0.02)
AT_THE_END = replace(QUICK, interval_s=3600)


def last_exports(collector: MetricsCollector) -> dict[str, dict[str, Values]]:
    """Last export by service and instance; the coordinator's instance is a UUID."""
    found = {}
    for request in collector.requests:
        for metrics in request.resource_metrics:
            resource = resource_attributes(metrics)
            process = Process(resource["service.name"])
            is_worker = process is Process.WORKER
            name = resource["service.instance.id"] if is_worker else "coordinator"
            found[name] = exported_values(metrics, process)
    return found


def total(exported: dict[str, Values], name: str) -> float:
    return sum(value.count if isinstance(value, Buckets) else value for value in exported[name].values())


@pytest.fixture
def collector_variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    return monkeypatch


async def test_a_collector_gets_the_metrics_of_all_processes(collector_variables: pytest.MonkeyPatch) -> None:
    async with MetricsCollector() as collector:
        collector_variables.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{collector.address}")
        async with MetricsCluster(
            "step=1ms", num_stages=3, telemetry=TelemetrySettings(metrics=AT_THE_END)
        ) as cluster:
            await cluster.generate_all(mixed_cases(6, max_tokens=10))
            await cluster.wait_drained()
            scraped = await cluster.scrape()
            num_steps = scraped.get("stageline_step_duration_seconds_count")
            # The coordinator receives the workers' metrics as well.
            await cluster.scrape_until(
                lambda scraped: (
                    scraped.get("stageline_stage_frames_total", direction="receive") == 3 * num_steps
                )
            )
        # Each process exports when it stops.
        found = last_exports(collector)
    assert sorted(found) == ["coordinator", "w0", "w1", "w2"]
    assert total(found["coordinator"], "stageline.generated.tokens") == 60
    assert total(found["coordinator"], "stageline.request.ended") == 6
    for worker in ("w0", "w1", "w2"):
        assert total(found[worker], "stageline.stage.step.duration") == num_steps


@pytest.mark.full
async def test_a_hung_collector_delays_no_token(collector_variables: pytest.MonkeyPatch) -> None:
    async with MetricsCollector() as collector:
        collector.may_answer.clear()
        collector_variables.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{collector.address}")
        async with MetricsCluster(
            "step=1ms", num_stages=2, telemetry=TelemetrySettings(metrics=QUICK)
        ) as cluster:
            await collector.wait_calls(3)
            answers = await cluster.generate_all(mixed_cases(6, max_tokens=10))
            assert all(answer.succeeded for answer in answers)
            await cluster.scrape_until(
                lambda scraped: all(
                    scraped.get("stageline_metrics_exports_failed_total", worker=worker) > 0
                    for worker in ("", "w0", "w1")
                )
            )
            assert collector.requests == []


async def test_a_worker_repeats_a_failed_metrics_export() -> None:
    async with MetricsCollector() as coordinator:
        export = CoordinatorExport(coordinator.address, worker_snapshot, RESOURCE, interval_s=0.01)
        task = asyncio.create_task(export.run())
        await coordinator.wait_requests(3)
        (metrics,) = coordinator.requests[-1].resource_metrics
        assert resource_attributes(metrics) == RESOURCE.attributes
        assert export.num_failed == 0
        coordinator.refusal = grpc.StatusCode.UNIMPLEMENTED
        async with asyncio.timeout(DEADLINE_S):
            while export.num_failed < 3:
                await asyncio.sleep(0.01)
        # A failed export is contained in the next one.
        coordinator.refusal = None
        await coordinator.wait_requests(len(coordinator.requests) + 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_unresponsive_coordinator_blocks_one_export_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stage_worker.metrics.DEADLINE_S", 0.05)
    async with MetricsCollector() as coordinator:
        coordinator.may_answer.clear()
        export = CoordinatorExport(coordinator.address, worker_snapshot, RESOURCE, interval_s=0.01)
        task = asyncio.create_task(export.run())
        await coordinator.wait_calls(3)
        assert export.num_failed >= 2
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_with_the_sdk_disabled_workers_export_no_metrics() -> None:
    off = TelemetrySettings(is_disabled=True)
    async with MetricsCluster("step=1ms", num_stages=2, telemetry=off) as cluster:
        await cluster.generate_all(mixed_cases(2, max_tokens=5))
        scraped = await cluster.scrape()
        assert scraped.get("stageline_generated_tokens_total") == 10
        tasks = {task.get_name() for task in asyncio.all_tasks()}
        assert not [name for name in tasks if name.startswith("metrics")]
