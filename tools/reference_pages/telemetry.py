"""docs/reference/metrics.md and spans.md, from the tables of `telemetry`."""

from typing import Any

from tools.reference_pages.markdown import GENERATED, table

_METRICS = f"""\
# Metrics

All metrics, with their OpenTelemetry and Prometheus names.
{GENERATED}
[telemetry.md](../telemetry.md) describes how to read and export them.

"""
_LABELS = """
## Labels

A label without a list of values has a limit; values beyond it share the series `other`, and
`stageline.metrics.overflows` counts them. No label takes its values from clients.

Over OTLP the worker is not an attribute of the points but the resource: `service.name` is
`stageline-coordinator` or `stageline-worker`, and `service.instance.id` the worker's name, or an id of the
coordinator's process.

"""
_SPANS = f"""\
# Spans

All spans and their attributes.
{GENERATED}
[telemetry.md](../telemetry.md) describes how to read traces.

## All spans

"""


def metrics() -> str:
    """Every metric, then every label."""
    from telemetry.metrics.definitions import METRICS

    labels = {label.attribute: label for metric in METRICS for label in metric.labels}
    header = ("name", "type", "unit", "labels", "recorded by", "meaning")
    metric_table = table(header, map(_metric_row, METRICS))
    label_table = table(("label", "attribute in OpenTelemetry", "values"), map(_label_row, labels.values()))
    return _METRICS + metric_table + _LABELS + label_table


def _metric_row(metric: Any) -> tuple[str, ...]:
    return (
        f"`{metric.name}`<br>`{metric.prometheus_name}`",
        metric.kind.value,
        f"`{metric.unit}`",
        ", ".join(f"`{label.name}`" for label in metric.labels) or "-",
        ", ".join(process.name.lower() for process in metric.processes),
        metric.description,
    )


def _label_row(label: Any) -> tuple[str, ...]:
    values = ", ".join(f"`{value}`" for value in label.values) or f"at most {label.most}"
    return f"`{label.name}`", f"`{label.attribute}`", values


def spans() -> str:
    """Every span, then every attribute."""
    from telemetry.spans import MEANINGS, SPANS, Attr

    attributes = [
        (
            f"`{attribute}`",
            ", ".join(spec.name.removeprefix("stageline.") for spec in SPANS if attribute in spec.attributes),
            MEANINGS[attribute],
        )
        for attribute in Attr
    ]
    return (
        _SPANS
        + table(("span", "recorded by", "parent", "meaning"), map(_span_row, SPANS))
        + "\n## All attributes\n\n"
        + table(("attribute", "of spans", "meaning"), attributes)
    )


def _span_row(spec: Any) -> tuple[str, ...]:
    process = spec.process.removeprefix("stageline-")
    return f"`{spec.name}`", process, f"`{spec.parent}`" if spec.parent else "-", spec.meaning
