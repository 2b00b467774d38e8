"""docs/reference/metrics.md lists exactly the defined metrics."""

import re

from telemetry.metrics.definitions import METRICS, Metric, Process
from tests.repository import REPOSITORY

DOCUMENT = (REPOSITORY / "docs" / "reference" / "metrics.md").read_text()
GUIDES = "".join(path.read_text() for path in sorted((REPOSITORY / "docs").glob("*.md")))
RECORDERS = {
    Process.COORDINATOR: "coordinator",
    Process.WORKER: "worker",
    Process.GATEWAY: "gateway",
}


def row(metric: Metric) -> str:
    """The line of the table for `metric`."""
    labels = ", ".join(f"`{label.name}`" for label in metric.labels)
    cells = (
        f"`{metric.name}`<br>`{metric.prometheus_name}`",
        metric.kind.value,
        f"`{metric.unit}`",
        labels or "-",
        ", ".join(RECORDERS[process] for process in metric.processes),
        metric.description,
    )
    return f"| {' | '.join(cells)} |"


def documented_rows() -> list[str]:
    return [line for line in DOCUMENT.splitlines() if re.match(r"\| `stageline\.[^|]*<br>", line)]


def test_the_table_equals_the_definitions() -> None:
    assert documented_rows() == [row(metric) for metric in METRICS]


def test_every_label_is_explained_with_its_attribute_and_its_values() -> None:
    labels = {label.attribute: label for metric in METRICS for label in metric.labels}
    for label in labels.values():
        values = ", ".join(f"`{value}`" for value in label.values) or f"at most {label.most}"
        assert f"| `{label.name}` | `{label.attribute}` | {values} |" in DOCUMENT


def test_names_in_its_examples_exist() -> None:
    known = {metric.prometheus_name for metric in METRICS}
    for name in set(re.findall(r"\bstageline_\w+", GUIDES)):
        assert re.sub(r"_(bucket|count|sum)$", "", name) in known | {"stageline_rpc"}, name
