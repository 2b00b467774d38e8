from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from bench import command as program
from bench.harness.group import Group, Setting
from bench.harness.run import GroupResult
from tests.unit.bench.runs import figure


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Setting]:
    """Settings of the runs, none of which measures anything."""
    used = list[Setting]()

    async def run_groups(groups: Iterable[Group], setting: Setting) -> list[GroupResult]:
        used.append(setting)
        return [GroupResult(name=group.name, figures=(figure(group.name),)) for group in groups]

    monkeypatch.setattr(program, "run_groups", run_groups)
    monkeypatch.setattr(program, "LATEST", tmp_path / "latest")
    return used


def test_output_is_a_folder_of_the_run(settings: list[Setting], tmp_path: Path) -> None:
    assert program.main(["hop", "--output", str(tmp_path / "mine")]) == 0
    assert settings[0].output_directory == tmp_path / "mine"
    assert json.loads((tmp_path / "mine" / "run.json").read_text())["groups"][0]["name"] == "hop"
    assert not (tmp_path / "latest").exists()


def test_output_to_a_json_file_adds_rows_to_the_usual_folder(settings: list[Setting], tmp_path: Path) -> None:
    assert program.main(["burst", "hop", "--output", str(tmp_path / "new" / "rows.json")]) == 0
    rows = json.loads((tmp_path / "new" / "rows.json").read_text())
    assert [row["name"] for row in rows] == ["hop", "burst"]
    assert set(rows[0]) == {"name", "measured", "bound", "ratio", "target"}
    assert settings[0].output_directory == tmp_path / "latest"
    assert (tmp_path / "latest" / "run.json").exists()


def test_flags_reach_the_groups(settings: list[Setting]) -> None:
    engine = ["--vllm-python", "/there/python", "--openai-url", "http://there", "--against", "/there"]
    assert program.main(["hop", '--coordinator=--max-decode-slowdown 10 --stages "2"', *engine]) == 0
    (setting,) = settings
    assert setting.coordinator_arguments == ("--max-decode-slowdown", "10", "--stages", "2")
    assert setting.other_engine.vllm_python == Path("/there/python")
    assert setting.other_engine.openai_url == "http://there"
    assert setting.against == Path("/there")


@pytest.mark.parametrize("flags", [["--quick"], ["--coordinator", "x"]])
def test_runs_that_cannot_be_compared_are_not_recorded(flags: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        program.main(["hop", "--record", *flags])
