"""results.json and the tables of a run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.rows import SCHEMA, Row, Verdict, with_missing
from bench.gpu.run import Found
from bench.gpu.targets import OF_BOUNDS, TARGETS
from bench.harness.figure import Better

BEGIN, END = "<!-- recorded GPU runs -->", "<!-- end of the recorded GPU runs -->"
FILE = "results.json"
QUICK_REASON = "--quick measures other shapes"


def as_json(
    found: Found, *, minutes: float, is_quick: bool, missing: Sequence[str], started: str
) -> dict[str, Any]:
    """A run so far; every figure with a target has a row."""
    reasons = {result.phase.name: result.error for result in found.results if result.error}
    if is_quick:
        reasons = {row.phase: QUICK_REASON for row in TARGETS} | reasons
    rows = with_missing(found.rows, TARGETS, reasons)
    return {
        "schema": SCHEMA,
        "started": started,
        "minutes": minutes,
        "is_quick": is_quick,
        "device": found.device,
        "versions": dict(found.versions),
        "missing": list(missing),
        "phases": [result.as_json() for result in found.results],
        "figures": [row.as_json(device=found.device, versions=found.versions) for row in rows],
    }


def write(file: Path, run: Mapping[str, Any]) -> None:
    """Replace the file in one step: a reader sees the run before or after a phase."""
    unfinished = file.with_name(f"{file.name}.new")
    unfinished.write_text(json.dumps(run, indent=1) + "\n")
    os.replace(unfinished, file)


def file_name(device: str) -> str:
    """File of a device's recorded run: nvidia-h100-80gb-hbm3.json."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def table(run: Mapping[str, Any]) -> str:
    """The run as text, one line per figure, then phases that did not end well."""
    rows = [("figure", "value", "bound", "ratio", "target", "")]
    rows += [(*_cells(figure), _remark(figure)) for figure in run["figures"]]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(row[column].rjust(widths[column]) for column in range(1, 5)), row[5]]
        ).rstrip()
        for row in rows
    ]
    lines += [
        f"{phase['status']}: {phase['name']}: {phase['error']}" for phase in run["phases"] if phase["error"]
    ]
    return "\n".join(lines)


def _remark(figure: Mapping[str, Any]) -> str:
    reason = f": {figure['reason']}" if figure["reason"] else ""
    return f"{figure['verdict']}{reason}"


def _cells(figure: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    unit = figure["unit"]
    return (
        figure["name"],
        "-" if figure["value"] is None else f"{figure['value']:g} {unit}",
        "-" if figure["bound"] is None else f"{figure['bound']:g} {unit}",
        "-" if figure["ratio"] is None else f"{figure['ratio']:.2f}",
        _target(figure),
    )


def _target(figure: Mapping[str, Any]) -> str:
    """A figure with a bound has a target of its ratio; others one of their value."""
    target = figure["target"]
    if target is None:
        return "-"
    if figure["name"] in _BY_RATIO:
        return f"ratio >= {target:g}"
    sign = ">=" if figure["better"] == Better.HIGHER else "<="
    return f"{sign} {target:g} {figure['unit']}"


_BY_RATIO = {row.name for row in OF_BOUNDS}


def markdown(runs: Iterable[Mapping[str, Any]]) -> str:
    """All figures with a target: a column for each recorded device, or "not measured"."""
    runs = list(runs)
    devices = [run["device"] for run in runs] or ["any GPU"]
    lines = [
        f"| figure | target | {' | '.join(devices)} |",
        f"|---|---|{'---|' * len(devices)}",
    ]
    for row in TARGETS:
        measured = [_measured(run, row) for run in runs] or [Verdict.NOT_MEASURED.value]
        encoded = row.as_json(device="", versions={})
        lines.append(f"| {row.name} | {_target(encoded)} | {' | '.join(measured)} |")
    return "\n".join(lines)


def _measured(run: Mapping[str, Any], row: Row) -> str:
    found = next((figure for figure in run["figures"] if figure["name"] == row.name), None)
    if found is None or found["value"] is None:
        return Verdict.NOT_MEASURED.value
    text = f"{found['value']:g} {found['unit']}"
    if found["ratio"] is not None:
        text += f", ratio {found['ratio']:.2f}"
    return f"**{text}**" if found["verdict"] == Verdict.MISSED else text


def with_runs(document: str, runs: Iterable[Mapping[str, Any]]) -> str:
    """Replace the text between the marks. Raises ValueError without marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{markdown(runs)}\n\n{END}{after}"


def recorded(folder: Path) -> list[dict[str, Any]]:
    """Recorded runs, by device."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
