"""Sampling parameters of a checkpoint are checked when its file is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoint.errors import BadConfig
from coordinator.config import CoordinatorConfig
from coordinator.model import open_model
from tests.checkpoints import make_checkpoint
from text.generation_defaults import read_generation_defaults


def write(directory: Path, **values: object) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


def test_defaults_are_the_parameters_that_requests_have(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path) == {}
    values = {"temperature": 0.5, "top_k": 20, "top_p": 1, "min_p": None, "do_sample": True, "max_length": -1}
    assert read_generation_defaults(write(tmp_path, **values)) == {
        "temperature": 0.5,
        "top_k": 20,
        "top_p": 1,
    }


WRONG: list[tuple[str, object]] = [
    ("top_p", 0),
    ("top_p", 1.5),
    ("min_p", -1),
    ("typical_p", 0.0),
    ("repetition_penalty", 0),
    ("temperature", -0.1),
    ("temperature", "0.7"),
    ("temperature", float("nan")),
    ("temperature", True),
    ("top_k", 2.5),
    ("top_k", -2),
    ("top_k", [50]),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_default_that_no_request_could_have_is_an_error_of_the_file(
    name: str, value: object, tmp_path: Path
) -> None:
    with pytest.raises(BadConfig) as error:
        read_generation_defaults(write(tmp_path, **{name: value}))
    text = str(error.value)
    assert text.startswith(f"{tmp_path}/generation_config.json: {name} is {json.loads(json.dumps(value))!r}")
    assert text.endswith("correct or remove it")


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", "{", "\udcff"])
def test_a_file_that_is_no_object_is_an_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(content, errors="surrogateescape")
    with pytest.raises(BadConfig, match=r"generation_config\.json"):
        read_generation_defaults(tmp_path)


def test_a_coordinator_does_not_start_with_a_wrong_default(tmp_path: Path) -> None:
    directory = write(make_checkpoint(tmp_path / "model", "llama", num_layers=1), top_p=0)
    with pytest.raises(BadConfig, match=r"generation_config\.json: top_p is 0, must be a number in \(0, 1\]"):
        open_model(CoordinatorConfig(model=directory, num_stages=1))
