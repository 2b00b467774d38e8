"""Exports through the SDK's exporter to an accepting, rejecting, hung or missing collector."""

import asyncio
import logging
from collections.abc import Callable

import grpc
import pytest

from telemetry.metrics.collector_export import CollectorExport
from telemetry.metrics.otlp import export_request, resource_attributes
from telemetry.settings import OtlpProtocol
from telemetry.span_recorder import new_resource
from tests.metrics_collector import DEADLINE_S, MetricsCollector
from tests.unit.telemetry.metrics.snapshots import worker_snapshot

RESOURCE = new_resource("stageline-worker", instance="w0", version="1.2")


@pytest.fixture(autouse=True)
def _quick_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")


def exporting_to(
    address: str, monkeypatch: pytest.MonkeyPatch, *, interval_s: float = 0.02
) -> CollectorExport:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{address}")
    return CollectorExport(OtlpProtocol.GRPC, worker_snapshot, RESOURCE, interval_s=interval_s)


async def wait_until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.01)


async def test_a_collector_gets_every_metric_periodically(monkeypatch: pytest.MonkeyPatch) -> None:
    async with MetricsCollector() as collector:
        # Long enough for the first export, which imports the exporter: no snapshot is dropped behind it.
        export = exporting_to(collector.address, monkeypatch, interval_s=0.4)
        export.start()
        await collector.wait_requests(3)
        await export.close()
        num_sent = len(collector.requests)
    (found,) = collector.requests[-1].resource_metrics
    resource = resource_attributes(found)
    assert resource == RESOURCE.attributes
    assert resource["service.instance.id"] == "w0"
    assert (
        found.scope_metrics == export_request(worker_snapshot(), RESOURCE).resource_metrics[0].scope_metrics
    )
    assert (export.num_failed, num_sent >= 3) == (0, True)


async def test_the_last_snapshot_is_exported_at_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    async with MetricsCollector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{collector.address}")
        export = CollectorExport(OtlpProtocol.GRPC, worker_snapshot, RESOURCE, interval_s=3600)
        export.start()
        await export.close()
        assert len(collector.requests) == 1


async def test_a_rejecting_collector_is_logged_once_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with MetricsCollector() as collector:
        collector.refusal = grpc.StatusCode.PERMISSION_DENIED
        export = exporting_to(collector.address, monkeypatch)
        export.start()
        await wait_until(lambda: export.num_failed >= 3)
        collector.refusal = None
        await collector.wait_requests(1)
        await wait_until(lambda: any("again" in record.message for record in caplog.records))
        await export.close()
    ours = [record.message for record in caplog.records if record.name.startswith("telemetry")]
    assert ours == [
        "the collector does not accept metrics; further failures are counted, not logged",
        "the collector accepts metrics again",
    ]
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_a_hanging_collector_costs_snapshots_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with MetricsCollector() as collector:
        collector.may_answer.clear()
        export = exporting_to(collector.address, monkeypatch)
        export.start()
        await collector.wait_calls(1)
        # One snapshot waits behind the export that hangs, and those after it are dropped.
        await wait_until(lambda: export.num_failed >= 3)
        await export.close()
        assert collector.requests == []


async def test_a_missing_collector_costs_snapshots_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with MetricsCollector() as collector:
        address = collector.address
    export = exporting_to(address, monkeypatch)
    export.start()
    await wait_until(lambda: export.num_failed >= 2)
    await export.close()


async def test_a_failed_exporter_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fails(protocol: OtlpProtocol) -> None:
        raise ValueError("no such certificate")

    export = CollectorExport(
        OtlpProtocol.GRPC,
        worker_snapshot,
        RESOURCE,
        interval_s=0.01,
        new_exporter=fails,  # type: ignore[arg-type]
    )
    export.start()
    await wait_until(lambda: export.num_failed >= 1)
    await export.close()
    assert "metrics are not exported: no such certificate" in caplog.text
