"""The exposition text, parsed by third-party parsers."""

from collections.abc import Iterable

import pytest
from opentelemetry.sdk.metrics.export import ScopeMetrics
from opentelemetry.sdk.resources import Resource
from prometheus_client import parser
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics_parser

from telemetry.metrics.otlp import export_request
from telemetry.metrics.prometheus import Exposed, prometheus_text
from tests.unit.telemetry.metrics.snapshots import coordinator_snapshot, worker_snapshot

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


def exposed(worker: str, snapshot: ScopeMetrics) -> Exposed:
    return Exposed(worker, export_request(snapshot, Resource({})).resource_metrics[0])


EXPOSED = [
    exposed("", coordinator_snapshot()),
    exposed("w0", worker_snapshot("0")),
    exposed("w1", worker_snapshot("1")),
]


def values(families: Iterable[Metric]) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in families
        for sample in family.samples
    }


def test_the_text_has_the_recorded_values() -> None:
    text, content_type = prometheus_text(EXPOSED, "")
    found = values(parser.text_string_to_metric_families(text.decode()))
    assert content_type.startswith("text/plain; version=0.0.4")
    assert found["stageline_request_ended_total[('outcome', 'finished')]"] == 7
    assert found["stageline_pipeline_bubble_ratio[]"] == 0.25
    assert found["stageline_stage_busy_time_seconds_total[('stage', '1'), ('worker', 'w1')]"] == 1.5
    assert found["stageline_kv_blocks[('stage', '0'), ('state', 'free'), ('worker', 'w0')]"] == 40
    memory = "stageline_process_resident_memory_bytes[('worker', '{}')]"
    assert [found[memory.format(worker)] for worker in ("", "w0", "w1")] == [123456789, 7e7, 7e7]


def test_buckets_are_cumulative() -> None:
    text, _ = prometheus_text(EXPOSED, "")
    found = values(parser.text_string_to_metric_families(text.decode()))

    def bucket(bound: str) -> float:
        return found[f"stageline_request_duration_seconds_bucket[('le', '{bound}'), ('outcome', 'failed')]"]

    bounds = ("0.01", "0.02", "0.2", "0.5", "500.0", "+Inf")
    assert [bucket(bound) for bound in bounds] == [0, 1, 1, 3, 3, 4]
    assert found["stageline_request_duration_seconds_count[('outcome', 'failed')]"] == 4
    assert found["stageline_request_duration_seconds_sum[('outcome', 'failed')]"] == pytest.approx(10000.62)


def test_every_family_has_one_head_and_its_type() -> None:
    text, _ = prometheus_text(EXPOSED, "")
    lines = text.decode().splitlines()
    heads = [line for line in lines if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads)) == 9
    assert "# TYPE stageline_request_ended_total counter" in heads
    assert "# TYPE stageline_kv_blocks gauge" in heads
    assert "# TYPE stageline_stage_step_duration_seconds histogram" in heads
    # A metric without values is left out.
    assert not any("recovery" in line for line in lines)


def test_open_metrics_is_served_on_request() -> None:
    text, content_type = prometheus_text(EXPOSED, OPEN_METRICS)
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")
    # This parser is strict about units, suffixes and the order of buckets.
    families = list(openmetrics_parser.text_string_to_metric_families(text.decode()))
    classic, _ = prometheus_text(EXPOSED, "")
    assert values(families) == values(parser.text_string_to_metric_families(classic.decode()))
    units = {family.name: family.unit for family in families}
    assert units["stageline_stage_busy_time_seconds"] == "seconds"
