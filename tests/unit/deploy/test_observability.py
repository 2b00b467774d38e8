"""Dashboard and alert rules ask for metrics and labels that exist, and lead to pages that exist."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from telemetry.metrics.definitions import METRICS
from tests.promql import SERIES, labels_of, metrics_in, problems
from tests.repository import REPOSITORY
from tests.unit.test_documents import headings

OBSERVABILITY = REPOSITORY / "deploy" / "observability"
DASHBOARD = json.loads((OBSERVABILITY / "dashboard.json").read_text())
GROUPS = yaml.safe_load((OBSERVABILITY / "alerts.yaml").read_text())["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
DRAWN_BY_NOBODY = {
    # Constant 1 with labels, and figures that other panels show more clearly.
    "stageline_stage_compute",
    "stageline_pipeline_active_time_seconds_total",
    "stageline_scheduler_duration_seconds",
    "stageline_stage_frames_total",
    "stageline_gateway_ignored_fields_total",
    # Of GPUs only, beside the memory and the work that other panels show.
    "stageline_device_memory_bytes",
    "stageline_stage_graphs",
    "stageline_stage_graph_steps",
    "stageline_stage_graph_eager_steps",
    "stageline_stage_graph_memory_bytes",
    # Alerts have them.
    "stageline_metrics_overflows_total",
    "stageline_stage_payload_fallback_ratio",
}
ROWS = [
    *("Cluster", "Requests", "Latency", "Stages and bubble", "KV cache", "Recoveries", "Workers"),
    *("Gateways", "Keys", "Certificates", "Journal and telemetry"),
]


def named(rule: dict[str, Any]) -> str:
    return str(rule["alert"])


@pytest.mark.parametrize("rule", RULES, ids=named)
def test_an_alert_asks_for_what_exists(rule: dict[str, Any]) -> None:
    assert not problems(rule["expr"])


@pytest.mark.parametrize("rule", RULES, ids=named)
def test_an_alert_says_how_urgent_it_is_and_where_to_read_on(rule: dict[str, Any]) -> None:
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"].keys() == {"summary", "description", "runbook"}
    page, _, heading = rule["annotations"]["runbook"].partition("#")
    assert heading in headings((REPOSITORY / page).read_text())
    assert rule["alert"].startswith("Stageline")


@pytest.mark.parametrize("rule", RULES, ids=named)
def test_a_description_uses_labels_that_the_alert_has(rule: dict[str, Any]) -> None:
    used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["description"]))
    assert used <= labels_of(rule["expr"])
    assert "$" not in rule["annotations"]["summary"], "alerts are grouped by it"


def test_alerts_have_names_of_their_own() -> None:
    assert len({named(rule) for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(("title", "target"), TARGETS)
def test_a_panel_asks_for_what_exists(title: str, target: dict[str, str]) -> None:
    assert not problems(target["expr"])
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels_of(target["expr"])


def test_variables_and_annotations_ask_for_what_exists() -> None:
    variables = DASHBOARD["templating"]["list"]
    for variable in variables[1:]:
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
        assert match is not None
        assert not problems(match[1])
        assert match[2] in labels_of(match[1])
    (annotation,) = DASHBOARD["annotations"]["list"]
    assert not problems(annotation["expr"])
    known = {variable["name"] for variable in variables}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"])))
    assert used == known | {"__rate_interval"}


def test_every_metric_is_drawn_or_has_a_reason() -> None:
    drawn = {SERIES[name].metric for _, target in TARGETS for name in metrics_in(target["expr"])}
    missing = {metric.prometheus_name for metric in METRICS if metric not in drawn}
    assert missing == DRAWN_BY_NOBODY


def test_the_dashboard_has_a_row_for_each_subject_and_panels_that_do_not_overlap() -> None:
    assert [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"] == ROWS
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + column, place["y"] + line)
            for column in range(place["w"])
            for line in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert all(panel["description"] for panel in PANELS)


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(stageline_request_endet_total[5m])", "unknown metric stageline_request_endet_total"),
        ('stageline_workers{stat="lost"} > 0', "stageline_workers has no label stat"),
        ('stageline_workers{state="gone"} > 0', "stageline_workers: state is never 'gone'"),
        ("sum by (reason) (stageline_workers)", "by unknown label reason"),
        ("rate(stageline_workers[5m])", "stageline_workers is a up-down counter: it has no rate"),
        (
            "stageline_recoveries_total > 0",
            "stageline_recoveries_total only grows: take its rate or increase",
        ),
        ("rate(stageline_step_duration_seconds[5m])", "unknown metric stageline_step_duration_seconds"),
        ("vllm_requests > 0", "unknown word vllm_requests"),
    ],
)
def test_what_does_not_exist_is_found(expression: str, problem: str) -> None:
    assert problem in problems(expression)


def test_the_page_lists_every_alert_with_its_consequence() -> None:
    page = (REPOSITORY / "docs" / "observability.md").read_text()
    listed = re.findall(r"^\| `(Stageline\w+)` \| (\w+) \| (.+) \|$", page, re.MULTILINE)
    assert listed == [
        (named(rule), rule["labels"]["severity"], rule["annotations"]["summary"]) for rule in RULES
    ]
