"""`stageline plan --check` tells whether a checkpoint is served, and all reasons why not."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from builtin_model import MODEL_DIRECTORY
from stageline.cli import main
from tests.checkpoints import make_checkpoint
from tests.hub import Hub
from tests.range_server import range_server
from tests.unit.text.trained_tokenizers import CHAT_TEMPLATE, byte_level, save_tokenizer

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "llama")


def change_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def check(directory: Path, capsys: Captured) -> tuple[int, dict[str, Any]]:
    code = main(["plan", "--check", str(directory), "--json"])
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, json.loads(captured.out)


def test_a_served_checkpoint_is_exit_code_0_with_size_and_cuts(directory: Path, capsys: Captured) -> None:
    code, told = check(directory, capsys)
    assert (code, told["is_served"], told["reasons"]) == (0, True, [])
    assert told["legal_cuts"] == list(range(1, told["num_layers"]))
    assert told["resident_bytes"] == told["file_bytes"] > 0
    assert (told["has_tokenizer"], told["has_chat_template"], told["tokenizer_vocab_size"]) == (
        False,
        False,
        None,
    )
    assert told["notes"] == ["no tokenizer (such as tokenizer.json): token ids only, no text and no chat"]
    assert main(["plan", "--check", str(directory)]) == 0
    assert "is served: llama, plain weights" in capsys.readouterr().out


def test_a_model_of_a_hub_is_checked_by_its_small_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with range_server(tmp_path) as api, range_server(tmp_path) as store:
        Hub(MODEL_DIRECTORY, api, store).use(monkeypatch)
        assert main(["plan", "--check", "hf://org/name"]) == 0
        assert capsys.readouterr().out.startswith("hf://org/name is served: llama, plain weights\n")
        assert main(["plan", "--check", "hf://org/name@none"]) == 1
        assert "error[SOURCE_" in capsys.readouterr().err


def test_every_wrong_field_is_a_reason(directory: Path, capsys: Captured) -> None:
    change_config(directory, one_knob=1, other_knob=2, hidden_act="tanh", rms_norm_eps=-1)
    change_config(directory, quantization_config={"quant_method": "no such"})
    code, told = check(directory, capsys)
    assert (code, told["is_served"]) == (1, False)
    texts = "\n".join(reason["text"] for reason in told["reasons"])
    for word in ("one_knob", "other_knob", "'tanh'", "rms_norm_eps", "'no such'"):
        assert word in texts
    assert len(told["reasons"]) == 5


def test_missing_and_wrong_tensors_are_reasons_together(directory: Path, capsys: Captured) -> None:
    change_config(directory, num_hidden_layers=9, intermediate_size=3)
    _, told = check(directory, capsys)
    texts = [reason["text"] for reason in told["reasons"]]
    assert any("lacks" in text for text in texts)
    assert any("has shape" in text for text in texts)


def test_an_adapter_is_told_to_be_merged(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    code, told = check(tmp_path, capsys)
    assert code == 1
    assert any("merge it" in reason["text"] for reason in told["reasons"])


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", '{"text_config": 1}', '{"architectures": [[]]}', "\0"])
def test_a_broken_config_is_a_reason(text: str, directory: Path, capsys: Captured) -> None:
    (directory / "config.json").write_text(text)
    code, told = check(directory, capsys)
    assert code == 1 and told["reasons"]


def test_broken_weights_and_directories_are_reasons(directory: Path, capsys: Captured) -> None:
    (directory / "model.safetensors").write_bytes(b"\xff" * 20)
    assert check(directory, capsys)[0] == 1
    assert check(directory / "config.json", capsys)[0] == 1
    assert check(directory / "none", capsys)[0] == 1
    (directory / "config.json").unlink()
    code, told = check(directory, capsys)
    assert code == 1 and len(told["reasons"]) == 2


@pytest.mark.parametrize("others", [(), ("config.json",), ("mmproj-a.gguf", "tokenizer.json")])
def test_a_directory_with_gguf_files_has_one_reason_with_the_path_to_give(
    others: tuple[str, ...], tmp_path: Path, capsys: Captured
) -> None:
    for name in ("model-Q4_0.gguf", *others):
        (tmp_path / name).write_text("{}")
    code, told = check(tmp_path, capsys)
    (reason,) = told["reasons"]
    assert code == 1 and told["notes"] == []
    assert reason["text"].endswith(f"give the path of the file, {tmp_path}/model-Q4_0.gguf")
    assert "convert" not in reason["text"]


@pytest.mark.parametrize("as_json", [False, True])
def test_names_in_files_neither_control_the_terminal_nor_fill_it(
    as_json: bool, directory: Path, capsys: Captured
) -> None:
    """A tensor whose name renames the window, and is a megabyte long."""
    name = "\x1b]0;owned\x07\x9b2J" + "x" * 1_000_000
    header = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert main(["plan", "--check", str(directory), *(["--json"] if as_json else [])]) == 1
    captured = capsys.readouterr()
    assert all(character.isprintable() or character == "\n" for character in captured.out + captured.err)
    assert "x1b]0;owned" in captured.out and len(captured.out) < 10_000
    assert main(["plan", "--model", str(directory), "--workers", "1GiB"]) == 1
    captured = capsys.readouterr()
    assert all(character.isprintable() or character == "\n" for character in captured.out + captured.err)
    assert "x1b]0;owned" in captured.err and len(captured.err) < 10_000


@pytest.mark.parametrize("flag", [["--workers", "1GiB"], ["--dtype", "f32"]])
def test_a_check_does_not_plan(flag: list[str], directory: Path, capsys: Captured) -> None:
    assert main(["plan", "--check", str(directory), *flag]) == 2
    assert f"takes no {flag[0]}" in capsys.readouterr().err


@pytest.fixture
def with_tokenizer(tmp_path: Path) -> Path:
    """A model of 384 embeddings with a tokenizer of fewer ids and a chat template."""
    directory = make_checkpoint(tmp_path / "model", "llama", num_layers=1, vocab_size=384)
    save_tokenizer(directory, byte_level(), chat_template=CHAT_TEMPLATE)
    return directory


def test_tokenizer_and_template_are_told(with_tokenizer: Path, capsys: Captured) -> None:
    code, told = check(with_tokenizer, capsys)
    assert (code, told["reasons"], told["has_chat_template"]) == (0, [], True)
    assert 300 < told["tokenizer_vocab_size"] < 384
    assert main(["plan", "--check", str(with_tokenizer)]) == 0
    assert f"{told['tokenizer_vocab_size']} ids, a chat template" in capsys.readouterr().out


def test_a_missing_template_is_a_note(with_tokenizer: Path, capsys: Captured) -> None:
    save_tokenizer(with_tokenizer, byte_level())
    code, told = check(with_tokenizer, capsys)
    assert (code, told["reasons"], told["has_tokenizer"], told["has_chat_template"]) == (0, [], True, False)
    assert any("no chat template" in note for note in told["notes"])


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for %}", "chat template cannot be parsed: line 1: Expected"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_a_template_that_cannot_be_used_is_a_reason(
    template: str, words: str, with_tokenizer: Path, capsys: Captured
) -> None:
    save_tokenizer(with_tokenizer, byte_level(), chat_template=template)
    code, told = check(with_tokenizer, capsys)
    (reason,) = told["reasons"]
    assert (code, told["is_served"]) == (1, False)
    assert words in reason["text"]
    assert main(["plan", "--check", str(with_tokenizer)]) == 1
    assert f"is not served:\n- {reason['text']}" in capsys.readouterr().out


def test_a_broken_tokenizer_is_a_reason_beside_those_of_the_config(
    with_tokenizer: Path, capsys: Captured
) -> None:
    (with_tokenizer / "tokenizer.json").write_text("{")
    change_config(with_tokenizer, one_knob=1)
    code, told = check(with_tokenizer, capsys)
    assert code == 1
    assert [reason["code"] for reason in told["reasons"]] == ["UNSUPPORTED_MODEL", "UNREADABLE_TOKENIZER"]


def test_more_token_ids_than_embeddings_are_a_note(directory: Path, capsys: Captured) -> None:
    save_tokenizer(directory, byte_level())
    code, told = check(directory, capsys)
    last = told["tokenizer_vocab_size"] - 1
    assert (code, told["reasons"]) == (0, [])
    note = f"token ids up to {last}, the model has embeddings up to 127 (vocab_size)"
    assert any(note in found for found in told["notes"]), told["notes"]


def test_a_family_without_native_layers_is_served_by_transformers(tmp_path: Path, capsys: Captured) -> None:
    make_checkpoint(tmp_path, "helium", num_layers=2)
    capsys.readouterr()
    code, told = check(tmp_path, capsys)
    assert (code, told["is_served"], told["implementation"]) == (0, True, "transformers")
    assert told["resident_bytes"] == told["file_bytes"] > 0
    assert main(["plan", "--check", str(tmp_path)]) == 0
    assert "Its layers are computed by transformers, as Stageline has none" in capsys.readouterr().out


def test_a_family_that_transformers_cannot_cut_is_a_reason(tmp_path: Path, capsys: Captured) -> None:
    make_checkpoint(tmp_path, "stablelm", num_layers=2)
    capsys.readouterr()
    code, told = check(tmp_path, capsys)
    assert (code, told["is_served"]) == (1, False)
    assert "does not use transformers' attention interface" in told["reasons"][0]["text"]


def test_a_missing_transformers_is_one_line_with_advice(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "helium", num_layers=2)
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "transformers_stage.probe", None)
    code, told = check(tmp_path, capsys)
    assert (code, told["is_served"]) == (1, False)
    assert "pip install 'transformers>=5.23,<5.24'" in told["reasons"][0]["text"]
