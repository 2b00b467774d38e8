"""The table of metrics follows its conventions."""

import re

import pytest

from telemetry.metrics import definitions
from telemetry.metrics.definitions import METRICS, Kind, Label, Metric, Process

UNITS = {"s": "seconds", "By": "bytes"}
MOST_SERIES = 1024
UNBOUNDED = {"request", "request_id", "client", "address", "epoch", "step", "model", "trace_id", "user", "le"}

each_metric = pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)


def test_the_table_has_every_metric_once() -> None:
    defined = [value for value in vars(definitions).values() if isinstance(value, Metric)]
    assert list(METRICS) == defined
    assert len({metric.name for metric in METRICS}) == len(METRICS) > 30
    assert len({metric.prometheus_name for metric in METRICS}) == len(METRICS)


@each_metric
def test_names_follow_open_telemetry(metric: Metric) -> None:
    assert re.fullmatch(r"stageline(\.[a-z]+(_[a-z]+)*)+", metric.name)
    # OpenTelemetry names contain no units and kinds.
    assert not re.search(r"\b(total|seconds|bytes|ratio|histogram)\b", metric.name.replace("_", "."))
    assert metric.unit in ("s", "By", "1") or re.fullmatch(r"\{[a-z]+\}", metric.unit)


@each_metric
def test_names_for_prometheus_end_in_their_unit_and_those_of_counters_in_total(metric: Metric) -> None:
    name = metric.prometheus_name
    assert re.fullmatch(r"stageline(_[a-z]+)+", name)
    assert name.endswith("_total") == (metric.kind is Kind.COUNTER)
    name = name.removesuffix("_total")
    for unit, word in UNITS.items():
        assert name.endswith(f"_{word}") == (metric.unit == unit)
    assert name.endswith("_ratio") == (metric.unit == "1" and metric.kind is Kind.GAUGE)
    # Prometheus appends these suffixes to histogram names.
    assert not re.search(r"_(bucket|count|sum|created|info)$", name)


@each_metric
def test_labels_are_bounded_and_descriptive(metric: Metric) -> None:
    assert metric.max_series <= MOST_SERIES
    for label in metric.labels:
        assert label.name not in UNBOUNDED
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", label.name)
        assert re.fullmatch(r"[a-z]+(\.[a-z]+(_[a-z]+)*)+", label.attribute)
    assert len({label.name for label in metric.labels}) == len(metric.labels)
    assert definitions.WORKER.name not in {label.name for label in metric.labels}


@each_metric
def test_descriptions_are_one_sentence(metric: Metric) -> None:
    assert re.fullmatch(r"[A-Z][^\n]*\.", metric.description)


def test_one_label_is_one_attribute_for_one_process() -> None:
    by_attribute: dict[str, Label] = {}
    for metric in METRICS:
        for label in metric.labels:
            assert by_attribute.setdefault(label.attribute, label) is label


@pytest.mark.parametrize(
    ("name", "kind", "unit", "expected"),
    [
        ("stageline.stage.busy.time", Kind.COUNTER, "s", "stageline_stage_busy_time_seconds_total"),
        ("a.b_c", Kind.UP_DOWN, "{block}", "a_b_c"),
        ("a.b", Kind.GAUGE, "1", "a_b_ratio"),
        ("a.b", Kind.COUNTER, "1", "a_b_total"),
        ("a.io", Kind.COUNTER, "By", "a_io_bytes_total"),
        ("a.seconds", Kind.GAUGE, "s", "a_seconds"),
    ],
)
def test_the_rules_that_names_for_prometheus_follow(name: str, kind: Kind, unit: str, expected: str) -> None:
    metric = Metric(name=name, kind=kind, unit=unit, processes=(Process.WORKER,), description="")
    assert metric.prometheus_name == expected


def test_invalid_definitions_are_rejected() -> None:
    def metric(kind: Kind, *bounds: float) -> Metric:
        return Metric(name="a", kind=kind, unit="s", processes=(), description="", bounds=bounds)

    with pytest.raises(ValueError, match="histogram with 0 bucket bounds"):
        metric(Kind.HISTOGRAM)
    with pytest.raises(ValueError, match="counter with 1 bucket bounds"):
        metric(Kind.COUNTER, 1.0)
    with pytest.raises(ValueError, match="do not ascend"):
        metric(Kind.HISTOGRAM, 2.0, 1.0)
    with pytest.raises(ValueError, match="neither values nor a maximum"):
        Label("a", "a.b")
