"""Standard OpenTelemetry environment variables."""

from __future__ import annotations

import re

import pytest
from opentelemetry.trace import SpanContext, TraceFlags

from telemetry.settings import MetricsExport, OtlpProtocol, metrics_export, read_environment
from telemetry.span_recorder import is_sampled, new_resource, ratio_sampler

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}


def test_without_an_endpoint_there_is_no_collector() -> None:
    assert metrics_export({}) == MetricsExport()
    assert metrics_export({"OTEL_METRICS_EXPORTER": "otlp"}).collector is None
    assert metrics_export({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}).collector is None


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"])
def test_an_endpoint_is_enough(name: str) -> None:
    export = metrics_export({name: "http://collector:4317"})
    assert (export.collector, export.interval_s) == (OtlpProtocol.GRPC, 60.0)


def test_the_metrics_variable_overrides_the_general_one() -> None:
    protocols = {
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf",
    }
    assert metrics_export(ENDPOINT | protocols).collector is OtlpProtocol.HTTP


def test_exporter_none_disables_the_collector() -> None:
    assert metrics_export(ENDPOINT | {"OTEL_METRICS_EXPORTER": "none"}).collector is None


def test_metric_settings_are_read_from_the_environment() -> None:
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
        ({"OTEL_METRICS_EXPORTER": "console"}, "'console', must be otlp or none"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "'http/json' is not one of grpc, http/protobuf"),
    ],
)
def test_unsupported_settings_are_rejected(variables: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        metrics_export(ENDPOINT | variables)


SAMPLED, UNSAMPLED = (
    SpanContext(1, 2, is_remote=True, trace_flags=TraceFlags(flags)) for flags in (TraceFlags.SAMPLED, 0)
)


@pytest.mark.parametrize(
    ("environment", "protocol"),
    [
        ({}, None),
        (ENDPOINT, "grpc"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, "grpc"),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://x"}, None),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, None),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http/protobuf"),
        (
            {
                **ENDPOINT,
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
            },
            "grpc",
        ),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_spans_are_sent_to_a_configured_collector(environment: dict[str, str], protocol: str | None) -> None:
    assert read_environment(environment, version="1").protocol == protocol


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "'http/json' is not one of grpc"),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "'zipkin'"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "garbage"}, "OTEL_EXPORTER_OTLP_ENDPOINT is 'garbage'"),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "ftp://x:1"}, "METRICS_ENDPOINT is 'ftp://x:1'"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:notaport"}, "'http://x:notaport'"),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_COMPRESSION": "foo"}, "COMPRESSION is 'foo'"),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "abc"}, "TRACES_TIMEOUT is 'abc'"),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_TIMEOUT": "-1"}, "TIMEOUT is '-1'"),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_HEADERS": "garbage"}, "KEY=VALUE"),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_CERTIFICATE": "/nonexistent"}, "which does not exist"),
        ({"OTEL_TRACES_SAMPLER": "sometimes"}, "'sometimes'"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "1.5"}, "'1.5'"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "nan"}, "'nan'"),
    ],
)
def test_unsupported_variables_are_rejected(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_environment(environment, version="1")


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://[::1]:4317/"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector"},
        {
            **ENDPOINT,
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "2.5",
            "OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%20b,x=",
            "OTEL_EXPORTER_OTLP_CERTIFICATE": __file__,
        },
        {"OTEL_EXPORTER_OTLP_COMPRESSION": "foo"},
    ],
)
def test_exporter_variables_are_left_to_the_exporters(environment: dict[str, str]) -> None:
    """Without an endpoint nothing is exported, so these values are not checked."""
    read_environment(environment, version="1")


def test_resources_have_the_names_that_users_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def name() -> object:
        return new_resource("own", instance="i", version="1").attributes["service.name"]

    assert name() == "own"
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=one,team=a,service.instance.id=other")
    assert name() == "one"
    assert new_resource("own", instance="i", version="1").attributes["service.instance.id"] == "i"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "two")
    assert name() == "two"


@pytest.mark.parametrize(
    ("name", "alone", "below_sampled", "below_unsampled"),
    [
        ("always_on", True, True, True),
        ("always_off", False, False, False),
        ("parentbased_always_on", True, True, False),
        ("parentbased_always_off", False, True, False),
    ],
)
def test_samplers_have_their_standard_meaning(
    name: str, alone: bool, below_sampled: bool, below_unsampled: bool
) -> None:
    sampler = read_environment({"OTEL_TRACES_SAMPLER": name}, version="1").sampler
    assert sampler is not None
    decisions = [is_sampled(sampler, 1, parent, "span") for parent in (None, SAMPLED, UNSAMPLED)]
    assert decisions == [alone, below_sampled, below_unsampled]


def test_a_sampling_ratio_applies_to_requests_without_a_decision() -> None:
    sampler = ratio_sampler(0.25)
    ids = range(1, 2**64, 2**64 // 4000)
    share = sum(is_sampled(sampler, trace_id, None, "span") for trace_id in ids) / len(ids)
    assert share == pytest.approx(0.25, abs=0.01)
    assert is_sampled(sampler, 1, SAMPLED, "span")
    assert not is_sampled(ratio_sampler(1.0), 1, UNSAMPLED, "span")
