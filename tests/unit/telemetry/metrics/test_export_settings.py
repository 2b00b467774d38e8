"""The standard variables."""

import re

import pytest

from telemetry.environment import read_environment
from telemetry.metrics.export_settings import MetricsExport, OtlpProtocol, metrics_export

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}


def test_without_an_endpoint_there_is_no_collector() -> None:
    assert metrics_export({}) == MetricsExport()
    assert metrics_export({"OTEL_METRICS_EXPORTER": "otlp"}).collector is None
    assert metrics_export({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}).collector is None


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"])
def test_an_endpoint_is_enough(name: str) -> None:
    export = metrics_export({name: "http://collector:4317"})
    assert (export.collector, export.interval_s) == (OtlpProtocol.GRPC, 60.0)


def test_the_variable_for_metrics_is_above_the_one_for_everything() -> None:
    protocols = {
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf",
    }
    assert metrics_export(ENDPOINT | protocols).collector is OtlpProtocol.HTTP


def test_exporter_none_is_no_collector() -> None:
    assert metrics_export(ENDPOINT | {"OTEL_METRICS_EXPORTER": "none"}).collector is None


def test_they_are_part_of_what_the_environment_says() -> None:
    settings = read_environment(ENDPOINT | {"OTEL_METRIC_EXPORT_INTERVAL": "1500"}, version="1")
    assert settings.metrics == MetricsExport(collector=OtlpProtocol.GRPC, interval_s=1.5)
    off = read_environment(ENDPOINT | {"OTEL_SDK_DISABLED": "TRUE"}, version="1")
    assert (off.is_disabled, off.metrics.collector) == (True, None)


def test_the_interval_is_in_milliseconds() -> None:
    assert metrics_export(ENDPOINT | {"OTEL_METRIC_EXPORT_INTERVAL": "1500"}).interval_s == 1.5


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"OTEL_METRIC_EXPORT_INTERVAL": "0"}, "'0', but must be a whole number of milliseconds"),
        ({"OTEL_METRIC_EXPORT_INTERVAL": "1s"}, "'1s', but must be a whole number of milliseconds"),
        ({"OTEL_METRICS_EXPORTER": "console"}, "'console', but only otlp and none are there"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "'http/json' is none of grpc, http/protobuf"),
    ],
)
def test_what_nobody_would_act_on_is_refused(variables: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        metrics_export(ENDPOINT | variables)
