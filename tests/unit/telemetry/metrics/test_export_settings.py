"""The standard variables."""

import logging

import pytest

from telemetry.metrics.export_settings import MetricsExport, OtlpProtocol, metrics_export

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}


def test_without_an_endpoint_there_is_no_collector() -> None:
    assert metrics_export({}) == MetricsExport()
    assert metrics_export({"OTEL_METRICS_EXPORTER": "otlp"}).collector is None
    assert metrics_export({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}).collector is None


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"])
def test_an_endpoint_is_enough(name: str) -> None:
    export = metrics_export({name: "http://collector:4317"})
    assert (export.collector, export.interval_s, export.is_disabled) == (OtlpProtocol.GRPC, 60.0, False)


def test_the_variable_for_metrics_is_above_the_one_for_everything() -> None:
    protocols = {
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf",
    }
    assert metrics_export(ENDPOINT | protocols).collector is OtlpProtocol.HTTP


def test_exporter_none_is_about_the_collector_only() -> None:
    export = metrics_export(ENDPOINT | {"OTEL_METRICS_EXPORTER": "none"})
    assert (export.collector, export.is_disabled) == (None, False)


def test_a_disabled_sdk_exports_nothing() -> None:
    export = metrics_export(ENDPOINT | {"OTEL_SDK_DISABLED": "TRUE"})
    assert (export.collector, export.is_disabled) == (None, True)
    assert metrics_export(ENDPOINT | {"OTEL_SDK_DISABLED": "false"}).collector is OtlpProtocol.GRPC


def test_the_interval_is_in_milliseconds() -> None:
    assert metrics_export(ENDPOINT | {"OTEL_METRIC_EXPORT_INTERVAL": "1500"}).interval_s == 1.5


@pytest.mark.parametrize(
    ("variables", "says", "expected"),
    [
        ({"OTEL_METRIC_EXPORT_INTERVAL": "0"}, "'0'", MetricsExport(collector=OtlpProtocol.GRPC)),
        ({"OTEL_METRIC_EXPORT_INTERVAL": "1s"}, "'1s'", MetricsExport(collector=OtlpProtocol.GRPC)),
        ({"OTEL_METRICS_EXPORTER": "console"}, "'console'", MetricsExport()),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            "http/json",
            MetricsExport(collector=OtlpProtocol.GRPC),
        ),
    ],
)
def test_what_makes_no_sense_is_warned_of(
    variables: dict[str, str], says: str, expected: MetricsExport, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert metrics_export(ENDPOINT | variables) == expected
    (record,) = caplog.records
    assert says in record.getMessage()
