"""The recorded run, and comparisons with it. Pure except for reading and writing the file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench.harness.figure import Better, Figure
from bench.harness.machine import Machine
from bench.harness.run import GroupResult

MOST_SPREAD = 0.3
"""Maximum noise: a ratio that changes by more has changed, however much its rounds differ."""


class Change(StrEnum):
    """Change of a ratio in its better direction."""

    BETTER = "better"
    SAME = "same"
    WORSE = "worse"
    NEW = "new"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Compared:
    """Comparison with the recorded figure.

    `relative` is the change of the ratio, positive if improved; None without a pair. `margin` is the noise:
    the figure's own, or the spread of the rounds if both runs had a larger one.
    """

    name: str
    change: Change
    relative: float | None = None
    margin: float = 0.0


def compare(figures: Iterable[Figure], recorded: Mapping[str, Any]) -> list[Compared]:
    """Compare figures with the recorded ones by name."""
    before = {entry["name"]: entry for entry in recorded.get("figures", ())}
    return [_compare(figure, before.get(figure.name)) for figure in figures]


def _compare(figure: Figure, before: Mapping[str, Any] | None) -> Compared:
    if before is None:
        return Compared(figure.name, Change.NEW)
    relative = figure.ratio / before["ratio"] - 1
    if figure.better is Better.LOWER:
        relative = before["ratio"] / figure.ratio - 1
    margin = max(figure.noise, min(MOST_SPREAD, before.get("spread") or 0.0, figure.spread or 0.0))
    if abs(relative) <= margin:
        return Compared(figure.name, Change.SAME, relative, margin)
    return Compared(figure.name, Change.BETTER if relative > 0 else Change.WORSE, relative, margin)


def gone(results: Iterable[GroupResult], recorded: Mapping[str, Any]) -> list[Compared]:
    """Recorded figures of the measured groups that are missing in this run."""
    ran = {result.name: {figure.name for figure in result.figures} for result in results}
    return [
        Compared(entry["name"], Change.GONE)
        for entry in recorded.get("figures", ())
        if entry["group"] in ran and entry["name"] not in ran[entry["group"]]
    ]


def as_json(results: Iterable[GroupResult], machine: Machine, *, is_quick: bool) -> dict[str, Any]:
    """A whole run as JSON."""
    results = list(results)
    return {
        "machine": machine.as_json(),
        "is_quick": is_quick,
        "groups": [
            {
                "name": result.name,
                "took_s": round(result.took_s, 1),
                "foreign_share": round(result.foreign_share, 3),
                "neighbours": [
                    {"name": neighbour.name, "share": round(neighbour.share, 3)}
                    for neighbour in result.neighbours
                ],
                "problem": result.problem,
            }
            for result in results
        ],
        "figures": [_entry(result.name, figure) for result in results for figure in result.figures],
    }


def _entry(group: str, figure: Figure) -> dict[str, Any]:
    return {
        "group": group,
        "name": figure.name,
        "measured": _rounded(figure.measured),
        "bound": _rounded(figure.bound),
        "unit": figure.unit,
        "ratio": _rounded(figure.ratio),
        "ratios": [_rounded(ratio) for ratio in figure.ratios],
        "spread": None if figure.spread is None else _rounded(figure.spread),
        "target": figure.target,
        "better": figure.better.value,
        "verdict": figure.verdict.value,
        "how": figure.how,
        "details": {name: _rounded(value) for name, value in figure.details.items()},
    }


def rows(figures: Iterable[Figure]) -> list[dict[str, Any]]:
    """The result of each figure, without how it was measured; for other programs."""
    return [
        {
            "name": figure.name,
            "measured": _rounded(figure.measured),
            "bound": _rounded(figure.bound),
            "ratio": _rounded(figure.ratio),
            "target": figure.target,
        }
        for figure in figures
    ]


def _rounded(value: float) -> float:
    """Round to four significant digits; more would be noise in the file."""
    return float(f"{value:.4g}")


def merged(recorded: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the groups of `run` in the recorded run."""
    again = {group["name"] for group in run["groups"]}
    kept_groups = [group for group in recorded.get("groups", ()) if group["name"] not in again]
    kept = [figure for figure in recorded.get("figures", ()) if figure["group"] not in again]
    return {**run, "groups": [*kept_groups, *run["groups"]], "figures": [*kept, *run["figures"]]}


def read(file: Path) -> dict[str, Any]:
    """Read a run; an empty one for a missing file."""
    if not file.exists():
        return {}
    run: dict[str, Any] = json.loads(file.read_text())
    return run


def write(file: Path, run: Mapping[str, Any] | list[dict[str, Any]]) -> None:
    """Write a run, or its rows, and create the folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(run, indent=1) + "\n")
