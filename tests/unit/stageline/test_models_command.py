"""`stageline models`, and lines of tables where nothing is a terminal."""

from __future__ import annotations

import json

import pytest

from stageline.cli import main


def test_a_part_of_a_name_lists_the_families_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "QWEN3"]) == 0
    listed = capsys.readouterr().out
    assert "qwen3_moe" in listed and "llama" not in listed.partition("Every family")[0].replace(
        "Llama in", ""
    )
    assert main(["models", "nothing-like-it"]) == 2
    assert "no native family has 'nothing-like-it' in its name" in capsys.readouterr().err
    assert main(["models", "qwen3", "--json"]) == 2


def test_all_families_are_listed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["families"]) >= 40


def test_rows_stay_whole_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["models", "llama"]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Llama ")]
    assert len(row.split()) > 1
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["models", "llama"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 40
