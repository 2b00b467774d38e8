"""The whole command on a CPU, with tiny shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.gpu.command import main
from bench.gpu.rows import SCHEMA
from bench.gpu.run import PHASES, REPOSITORY
from bench.gpu.targets import TARGETS

FIELDS = {
    "phase": str,
    "name": str,
    "value": (float, type(None)),
    "unit": str,
    "bound": (float, type(None)),
    "ratio": (float, type(None)),
    "target": (float, type(None)),
    "better": str,
    "verdict": str,
    "reason": str,
    "device": str,
    "versions": dict,
    "details": dict,
}
ON_CPU = {
    "decode": "decode step, batch 4, context 32",
    "prompts": "prompt step, 32 tokens behind 64",
    "sampling": "sampling adds to a decode step, top-p 0.95, batch 4",
    "wire_copies": "hidden states 64 x 64 to the device and back, int8",
    "cluster": "cluster of 2 stages on one device, 2 streams",
    "failures": "pause after kill -9 and restart",
    "transformers": "transformers decode step, eager, batch 4, context 16",
}
"""A figure that a CPU has, of each phase."""
CUDA_ONLY = (
    "graph launch",
    "hop of 64 x 64 on one host, pinned memory",
    "attention of a decode step, batch 4, context 32",
    "experts of one layer, gpt-oss-120b, mxfp4, batch 4",
    "device-side assert until the worker has ended",
    "transformers decode step, compiled, batch 4, context 16",
)


@pytest.mark.bench
def test_a_quick_run_on_a_cpu_measures_every_phase_and_leaves_no_process(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    assert main(["--device", "cpu", "--quick", "--out", str(tmp_path / "out"), "--work", str(tmp_path)]) == 0
    run = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(phase["name"], phase["status"]) for phase in run["phases"]] == [
        (phase.name, "done") for phase in PHASES
    ]
    check_schema(run)
    figures = {figure["name"]: figure for figure in run["figures"]}
    for phase, name in ON_CPU.items():
        assert figures[name]["phase"] == phase
        assert figures[name]["value"] is not None
    for way in ("shared memory", "tcp"):
        assert figures[f"hop of 64 x 64 on one host, {way}"]["value"] > 0
    for name in CUDA_ONLY:
        assert figures[name]["verdict"] == "not measured"
        assert figures[name]["reason"] == "needs a CUDA device, the run is on cpu"
    assert not any(figure["verdict"] == "reached" for figure in run["figures"]), "no target is a CPU's"
    assert set(psutil.Process().children(recursive=True)) <= before
    assert not list(tmp_path.glob("stageline-bench-gpu-*")), "the checkpoint is gone"


def check_schema(run: dict[str, Any]) -> None:
    """What readers of results.json may rely on."""
    assert run["schema"] == SCHEMA
    assert set(run) == {
        *("schema", "started", "minutes", "is_quick", "device", "versions", "missing", "phases", "figures"),
    }
    names = [figure["name"] for figure in run["figures"]]
    assert len(set(names)) == len(names)
    assert {target.name for target in TARGETS} <= set(names)
    for figure in run["figures"]:
        assert {name for name, kind in FIELDS.items() if not isinstance(figure[name], kind)} == set()
        assert set(figure) == set(FIELDS)
        assert (figure["value"] is None) == (figure["verdict"] == "not measured") == bool(figure["reason"])
        assert figure["versions"]["torch"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "cpu"], "a CPU computes no full shapes: add --quick"),
        (["--quick", "--record"], "only complete runs on a GPU are recorded"),
        (["--minutes", "0"], "--minutes is 0, must be above 0"),
    ],
)
def test_wrong_command_lines_are_rejected(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path), *flags])
    assert message in capsys.readouterr().err


def test_unknown_phases_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), "--only", "speed"]) == 2
    assert "speed: no such phases" in capsys.readouterr().out


def test_missing_packages_are_reported_by_a_command_that_needs_none(tmp_path: Path) -> None:
    """-S hides all that is installed; the phases get no time."""
    command = [sys.executable, "-S", "-m", "bench", "gpu", "--device", "cpu", "--quick"]
    run = subprocess.run(
        [*command, "--minutes", "0.0001", "--out", str(tmp_path / "out"), "--work", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 1, run.stderr
    assert "missing or too old packages: cryptography, fastapi, " in run.stdout
    assert "pip download -d wheels PACKAGE" in run.stdout
    phases = json.loads((tmp_path / "out" / "results.json").read_text())["phases"]
    assert {phase["status"] for phase in phases} == {"timed out", "skipped"}
