"""The served model: which tokens end a text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from checkpoint import UnsupportedModel
from checkpoint.implementation import Implementation
from coordinator.config import CoordinatorConfig
from coordinator.model import ServedModel, open_model
from tests.checkpoints import edit_config, make_checkpoint
from tests.unit.text.trained_tokenizers import byte_level, save_tokenizer

END, OTHER_END = 3, 2
"""Ids of <|end|> and </s>."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "llama", num_layers=1, vocab_size=384)


def opened(directory: Path) -> ServedModel:
    model = open_model(CoordinatorConfig(model=directory, num_stages=1))
    model.load_text()
    return model


def test_the_token_that_only_the_tokenizer_names_ends_a_text(directory: Path) -> None:
    save_tokenizer(directory, byte_level(), eos_token="<|end|>")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": OTHER_END}))
    assert opened(directory).eos_token_ids == (OTHER_END, END)


def test_an_empty_list_of_end_tokens_takes_none_from_the_others(directory: Path) -> None:
    edit_config(directory, eos_token_id=[OTHER_END])
    save_tokenizer(directory, byte_level(), eos_token="<|end|>")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": []}))
    assert opened(directory).eos_token_ids == (OTHER_END, END)


def test_a_tokenizer_alone_gives_the_end_token(directory: Path) -> None:
    """Without it a grammar's text could not end."""
    save_tokenizer(directory, byte_level(), eos_token={"__type": "AddedToken", "content": "<|end|>"})
    (directory / "generation_config.json").unlink(missing_ok=True)
    assert opened(directory).eos_token_ids == (END,)


def test_a_missing_tokenizer_is_a_warning_with_its_consequence(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert opened(directory).text is None
    [text] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert text.startswith("the checkpoint has no tokenizer.json: token ids only, no text and no chat")


def test_a_family_that_nothing_serves_is_refused_before_workers_join(directory: Path) -> None:
    """Neither native layers nor transformers know it."""
    edit_config(directory, model_type="qwen9", architectures=["Qwen9ForCausalLM"])
    with pytest.raises(UnsupportedModel, match="qwen9"):
        opened(directory)


def test_a_host_without_torch_leaves_the_examination_to_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_checkpoint(tmp_path / "model", "helium", num_layers=2)
    monkeypatch.setitem(sys.modules, "transformers_stage.probe", None)
    assert opened(directory).implementation is Implementation.TRANSFORMERS
    assert "the model is not examined here, workers do so when they load it" in caplog.text
