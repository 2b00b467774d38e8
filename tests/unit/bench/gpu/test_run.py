from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.gpu import results
from bench.gpu.run import PHASES, Found, Phase, PhaseStatus, RunSettings, chosen, run_phases

CHILD = """
import json, sys, time
order = json.loads(sys.argv[1])
file = open(order["rows_file"], "a")
def write(kind, **values):
    file.write(json.dumps({"kind": kind, **values}) + "\\n")
    file.flush()
row = dict(name="speed of " + order["phase"], phase=order["phase"], unit="ms", value=2.0, bound=1.0,
           target=None, better="lower", reason="", details={})
if order["phase"] == "hardware":
    write("facts", device="NVIDIA H100", versions={"torch": "2.11.0"})
    write("rates", memory=3e12, products=8e14)
    write("row", **row)
elif order["phase"] == "checkpoint":
    write("row", **row)
elif order["phase"] == "decode":
    write("row", **row)
    file.write('{"kind": "row", "name": "cut of')
    file.flush()
    time.sleep(600)
elif order["phase"] == "prompts":
    raise RuntimeError("CUDA error: an illegal memory access")
else:
    write("row", **{**row, "value": order["rates"]["memory"]})
"""


@pytest.fixture
def settings(tmp_path: Path) -> RunSettings:
    return RunSettings(
        device="cuda:0",
        is_quick=False,
        minutes=10.0,
        output=tmp_path / "out",
        work=tmp_path,
        command=(sys.executable, "-c", CHILD),
    )


def phases(**weights_s: float) -> list[Phase]:
    return [
        Phase(
            letter="",
            name=name,
            about="",
            weight_s=weight_s,
            needs_model=name not in ("hardware", "checkpoint"),
        )
        for name, weight_s in weights_s.items()
    ]


def run(wanted: list[Phase], settings: RunSettings) -> tuple[Found, list[int]]:
    """What was found, and the number of rows after each phase."""
    found, counts = Found(device="unknown", versions={}), list[int]()
    run_phases(
        wanted,
        settings,
        found,
        after_each=lambda found: counts.append(len(found.rows)),
        say=lambda text: None,
    )
    return found, counts


def test_a_phase_that_hangs_or_fails_leaves_its_rows_and_the_others_go_on(settings: RunSettings) -> None:
    wanted = phases(hardware=1.0, checkpoint=1.0, decode=0.01, prompts=1.0, sampling=1.0)
    found, counts = run(wanted, settings)
    assert [result.status for result in found.results] == [
        PhaseStatus.DONE,
        PhaseStatus.DONE,
        PhaseStatus.TIMED_OUT,
        PhaseStatus.FAILED,
        PhaseStatus.DONE,
    ]
    assert found.results[3].error == "RuntimeError: CUDA error: an illegal memory access"
    assert counts == [1, 2, 3, 3, 4]
    assert found.has_failed
    assert found.rows[-1].value == 3e12, "later phases have the rates of the first"
    assert found.device == "NVIDIA H100"


def test_phases_without_their_model_are_skipped(settings: RunSettings) -> None:
    wanted = phases(hardware=1.0, decode=1.0)
    found, _ = run(wanted, settings)
    assert found.results[1].status is PhaseStatus.SKIPPED
    assert "no checkpoint" in found.results[1].error


def test_phases_that_others_need_may_take_all_the_time_and_the_others_their_share(
    settings: RunSettings,
) -> None:
    found, _ = run(phases(hardware=1.0, checkpoint=2.0, sampling=1.0, prompts=3.0), settings)
    limits_s = [result.limit_s for result in found.results]
    assert limits_s[:2] == pytest.approx([600.0, 600.0], abs=30.0)
    assert limits_s[2] == pytest.approx(150.0, abs=10.0)
    assert limits_s[3] == pytest.approx(600.0, abs=60.0), "with the time that was saved"


def test_chosen_phases_have_those_that_they_need() -> None:
    assert [phase.name for phase in chosen(["sampling"])] == ["hardware", "checkpoint", "sampling"]
    assert chosen([]) == list(PHASES)
    with pytest.raises(ValueError, match="speed: no such phases; there are hardware, "):
        chosen(["speed"])


def test_phases_fit_into_nine_minutes_and_have_modules() -> None:
    assert sum(phase.weight_s for phase in PHASES) <= 540
    folder = Path(results.__file__).parent / "phases"
    assert {file.stem for file in folder.glob("*.py")} - {"__init__"} == {phase.name for phase in PHASES}


def test_the_results_have_a_row_for_every_target_with_the_reason(
    settings: RunSettings, tmp_path: Path
) -> None:
    found, _ = run(phases(hardware=1.0, checkpoint=1.0, prompts=1.0), settings)
    file = tmp_path / "results.json"
    results.write(file, results.as_json(found, minutes=9, is_quick=False, missing=["uuid6"], started="now"))
    written = json.loads(file.read_text())
    reasons = {row["name"]: row["reason"] for row in written["figures"]}
    assert reasons["prompt step, 2048 tokens behind 0"] == found.results[2].error
    assert reasons["speed of hardware"] == ""
    assert {row["device"] for row in written["figures"]} == {"NVIDIA H100"}
    assert written["missing"] == ["uuid6"]
    assert not list(tmp_path.glob("*.new"))
    assert "failed: prompts: RuntimeError: CUDA error" in results.table(written)
