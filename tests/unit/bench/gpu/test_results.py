from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.command import README
from bench.gpu import results
from bench.gpu.command import RECORDED
from bench.gpu.rows import Row, with_missing
from bench.gpu.targets import TARGETS, decode_name
from bench.harness.figure import Better


def recorded_run(*rows: Row) -> dict[str, Any]:
    every = with_missing(rows, TARGETS, {})
    return {
        "device": "NVIDIA H100 80GB HBM3",
        "figures": [row.as_json(device="NVIDIA H100 80GB HBM3", versions={}) for row in every],
        "phases": [],
    }


def test_a_column_for_each_device_marks_missed_targets() -> None:
    missed = Row(
        phase="decode",
        name=decode_name(1, 2048),
        unit="ms",
        value=4.0,
        bound=2.0,
        target=0.7,
        better=Better.LOWER,
    )
    lines = results.markdown([recorded_run(missed)]).splitlines()
    assert lines[0] == "| figure | target | NVIDIA H100 80GB HBM3 |"
    assert lines[2] == "| decode step, batch 1, context 2048 | ratio >= 0.7 | **4 ms, ratio 0.50** |"
    assert lines[3].endswith("| not measured |")
    assert len(lines) == 2 + len(TARGETS)


def test_files_are_named_after_devices() -> None:
    assert results.file_name("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3.json"


def test_a_document_without_marks_is_rejected() -> None:
    with pytest.raises(ValueError, match="the document has no"):
        results.with_runs("text", [])


def test_the_readme_has_the_recorded_runs() -> None:
    document = README.read_text()
    assert results.with_runs(document, results.recorded(RECORDED)) == document


def test_targets_without_a_run_are_not_measured(tmp_path: Path) -> None:
    table = results.markdown(results.recorded(tmp_path))
    assert table.count("not measured") == len(TARGETS)
