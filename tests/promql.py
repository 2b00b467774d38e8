"""What an expression of PromQL asks for, compared with the metrics that exist.

Reads as much of the language as deploy/observability uses: names, label matchers, label lists and calls.
Everything else is rejected, so that a misspelt name is never skipped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from telemetry.metrics.definitions import METRICS, WORKER, Kind, Label, Metric, Process

TARGET_LABELS = frozenset({"job", "instance"})
"""Labels that Prometheus adds to what it scrapes."""
_GROWTH = ("rate", "increase")
_FUNCTIONS = {*_GROWTH, "absent", "histogram_quantile", "max_over_time"}
_AGGREGATIONS = {"sum", "min", "max", "quantile"}
_GROUPINGS = {"by", "without", "on", "ignoring", "group_left"}
_OPERATORS = {"and"}
_SELECTOR = re.compile(r"(stageline_\w+)\s*(?:\{([^}]*)\})?\s*(\[[^\]]+\])?")
_MATCHER = re.compile(r'\s*(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*')
_LABEL_LIST = re.compile(rf"\b({'|'.join(_GROUPINGS)})\s*\(([^)]*)\)")
_CALL_BEFORE = re.compile(r"(\w+)\s*\(\s*$")


@dataclass(frozen=True, slots=True)
class Series:
    """One name on `/metrics`; `is_cumulative` where only its growth means something."""

    metric: Metric
    labels: Mapping[str, Label | None]
    is_cumulative: bool


def _series() -> dict[str, Series]:
    found = {}
    for metric in METRICS:
        labels: dict[str, Label | None] = {label.name: label for label in metric.labels}
        if Process.WORKER in metric.processes:
            labels[WORKER.name] = WORKER
        name = metric.prometheus_name
        if metric.kind is Kind.HISTOGRAM:
            found[f"{name}_bucket"] = Series(metric, {**labels, "le": None}, True)
            found[f"{name}_sum"] = found[f"{name}_count"] = Series(metric, labels, True)
        else:
            found[name] = Series(metric, labels, metric.kind is Kind.COUNTER)
    return found


SERIES: Mapping[str, Series] = _series()
"""Every name of a sample that a Stageline process exposes."""


def problems(expression: str) -> list[str]:
    """What is wrong with an expression; empty if Stageline has all that it asks for."""
    found: list[str] = []
    known: set[str] = set(TARGET_LABELS)
    for match in _SELECTOR.finditer(expression):
        series = SERIES.get(match[1])
        if series is None:
            found.append(f"unknown metric {match[1]}")
            continue
        known |= series.labels.keys()
        found += _wrong_matchers(match[1], series, match[2] or "")
        found += _wrong_call(match, series)
    for grouping, labels in _LABEL_LIST.findall(expression):
        wanted = {label.strip() for label in labels.split(",") if label.strip()}
        found += [f"{grouping} unknown label {label}" for label in sorted(wanted - known)]
    return found + _unknown_words(expression)


def metrics_in(expression: str) -> set[str]:
    """Names of samples that an expression asks for."""
    return {match[1] for match in _SELECTOR.finditer(expression)}


def labels_of(expression: str) -> set[str]:
    """Labels that results of an expression may have."""
    found = set(TARGET_LABELS)
    for name in metrics_in(expression):
        found |= SERIES[name].labels.keys()
    outermost = re.match(r"\s*(?:\w+\([\d.]+,\s*)?\w+\s*(by|without)\s*\(([^)]*)\)", expression)
    if outermost is not None:
        listed = {label.strip() for label in outermost[2].split(",")}
        found = found & listed if outermost[1] == "by" else found - listed
    return found


def _wrong_matchers(name: str, series: Series, text: str) -> list[str]:
    found = []
    for part in filter(None, map(str.strip, text.split(","))):
        match = _MATCHER.fullmatch(part)
        if match is None:
            found.append(f"{name}: {part!r} is no matcher")
            continue
        label, operator, value = match.groups()
        if label not in series.labels and label not in TARGET_LABELS:
            found.append(f"{name} has no label {label}")
            continue
        described = series.labels.get(label)
        values = [value] if operator in ("=", "!=") else value.split("|")
        if described is not None and described.values and not value.startswith("$"):
            found += [f"{name}: {label} is never {each!r}" for each in values if each not in described.values]
    return found


def _wrong_call(match: re.Match[str], series: Series) -> list[str]:
    before = _CALL_BEFORE.search(match.string[: match.start()])
    grows = before is not None and before[1] in _GROWTH
    if series.is_cumulative and not grows:
        return [f"{match[1]} only grows: take its rate or increase"]
    if grows and not series.is_cumulative:
        return [f"{match[1]} is a {series.metric.kind.value}: it has no rate"]
    return []


def _unknown_words(expression: str) -> list[str]:
    """Words that are neither a metric nor a part of the language that is read here."""
    rest = _LABEL_LIST.sub(lambda match: f" {match[1]} ", _SELECTOR.sub(" ", expression))
    words = set(re.findall(r"[A-Za-z_]\w*", rest))
    return [
        f"unknown word {word}"
        for word in sorted(words - _FUNCTIONS - _AGGREGATIONS - _GROUPINGS - _OPERATORS)
    ]
