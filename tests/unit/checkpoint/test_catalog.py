"""The catalog tells of every family and format, and what it tells of verification is so."""

import json
from dataclasses import replace
from importlib.metadata import version

import pytest

from checkpoint.architectures import ARCHITECTURES
from checkpoint.catalog import OTHER_FAMILIES, TRANSFORMERS, WEIGHT_FORMATS, differences, families
from checkpoint.errors import UnsupportedModel
from checkpoint.quantization_config import parse_quantization
from stageline.cli import main

ROWS = {row.model_type: row for row in ARCHITECTURES}


def test_every_family_is_listed_with_a_title_of_its_own() -> None:
    listed = families()
    assert [family.model_type for family in listed] == list(ROWS)
    assert len({family.title for family in listed}) == len(listed)


def test_only_llama_does_not_differ_from_llama() -> None:
    alike = {family.model_type for family in families() if not family.differences}
    assert alike == {"llama"}


def test_differences_are_those_of_the_row() -> None:
    gemma = differences(ROWS["gemma2"])
    assert "norms: before and after mixer and feed-forward" in gemma
    assert "soft caps of scores and logits" in gemma
    assert "tied head by default" in gemma
    assert "soft caps of scores and logits" not in differences(ROWS["qwen3"])


def test_a_field_without_words_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = replace(ROWS["llama"], is_gated=False)
    assert differences(changed) == ("MLP without gate",)
    monkeypatch.setattr("checkpoint.catalog._WORDS", {})
    assert differences(changed) == ("is gated",)


def test_wrappers_are_told_with_their_text_model() -> None:
    wrappers = {family.model_type: family.wrappers for family in families()}
    assert wrappers["gemma3_text"] == ("gemma3",)
    assert wrappers["llama"] == ()


def test_the_formats_are_those_that_are_read() -> None:
    with pytest.raises(UnsupportedModel) as refused:
        parse_quantization({"quantization_config": {"quant_method": "none of them"}})
    legal = str(refused.value).rpartition("(")[2].removesuffix(")").split(", ")
    assert [one.method for one in WEIGHT_FORMATS] == legal


def test_the_version_of_transformers_is_the_one_that_is_compared_with() -> None:
    assert version("transformers").startswith(f"{TRANSFORMERS}.")


def test_the_command_prints_both_tables_and_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["models"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*ROWS, *(one.method for one in WEIGHT_FORMATS)))
    assert main(["models", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {row["model_type"] for row in told["families"]} == set(ROWS)
    keys = {"title", "model_type", "class_name", "differences", "windows", "wrappers", "verified"}
    assert all(set(row) == keys for row in told["families"])
    assert all(set(row) == {"method", "variants", "verified"} for row in told["weight_formats"])
    assert told["other_families"] == OTHER_FAMILIES
    assert "transformers' own layers and Stageline's paged cache" in OTHER_FAMILIES
