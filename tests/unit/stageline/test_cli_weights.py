"""`stageline weights` and `stageline plan` on a model behind a web server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from builtin_model import MODEL_DIRECTORY
from checkpoint import Checkpoint
from stageline.cli import main
from tests.range_server import RangeServer, range_server
from weights.errors import BadManifest
from weights.manifest import MANIFEST_FILE, read_manifest

SHARD = "model.safetensors"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    with range_server(shutil.copytree(MODEL_DIRECTORY, tmp_path / "model")) as running:
        yield running


def listed(cache: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["weights", "ls", "--cache-dir", str(cache), "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_a_plan_reads_headers_only(server: RangeServer, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--workers", "64MiB,64MiB", "--json", "--kv-tokens", "512", "--model"]
    assert main([*plan, str(server.directory)]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert main([*plan, server.url]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found | {"model": ""} == expected | {"model": ""}
    weights = Checkpoint.open(MODEL_DIRECTORY).weight_file_bytes
    assert server.sent_of(SHARD) < weights / 100


def test_layers_are_pulled_listed_verified_and_removed(
    server: RangeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    flags = ["--cache-dir", str(cache)]
    assert main(["weights", "pull", server.url, *flags, "--layers", "0-1"]) == 0
    assert f"of {server.url} are in {cache}: fetched_bytes=" in capsys.readouterr().out
    (row,) = listed(cache, capsys)
    layers = {unit["name"] for unit in row["units"] if ".layers." in unit["name"]}
    assert layers == {"model.layers.0", "model.layers.1"}
    assert row["source"] == server.url and row["verified"] == 0

    assert main(["weights", "verify", *flags]) == 0
    entry = Checkpoint.open(MODEL_DIRECTORY).tensors["model.layers.1.mlp.up_proj.weight"]
    with (cache / "models" / row["key"] / "files" / SHARD).open("r+b") as file:
        file.seek(entry.begin + 5)
        file.write(b"\xa5\x5a\xa5")
    capsys.readouterr()
    assert main(["weights", "verify", *flags]) == 1
    assert "tensor model.layers.1.mlp.up_proj.weight is damaged: dropped" in capsys.readouterr().out

    before = server.sent_of(SHARD)
    assert main(["weights", "pull", server.url, *flags, "--layers", "0-1"]) == 0
    assert server.sent_of(SHARD) - before == entry.num_bytes
    assert main(["weights", "rm", *flags, row["key"]]) == 0
    assert listed(cache, capsys) == []


def pulled(
    server: RangeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[Path, list[str], dict[str, Any]]:
    """A cache with the first layer of a model: its directory, the flags for it, and its entry."""
    cache = tmp_path / "cache"
    flags = ["--cache-dir", str(cache)]
    assert main(["weights", "pull", server.url, *flags, "--layers", "0-0"]) == 0
    (row,) = listed(cache, capsys)
    return cache, flags, row


def test_a_model_that_cannot_be_used_hides_no_other(
    server: RangeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, flags, row = pulled(server, tmp_path, capsys)
    models = cache / "models"
    (models / "0123" / "files").mkdir(parents=True)  # as a kill leaves it
    shutil.copytree(models / row["key"], models / "z-copy")
    config = models / "z-copy" / "files" / "config.json"
    config.unlink()
    begun, usable, lacking = listed(cache, capsys)
    assert (begun["state"], begun["problem"]) == ("incomplete", "it lacks pins.json")
    assert (usable["state"], usable["tensors"]) == ("usable", row["tensors"])
    assert (lacking["state"], lacking["problem"]) == ("incomplete", "it lacks config.json")
    assert lacking["source"] == server.url and not lacking["units"]
    assert main(["weights", "verify", *flags]) == 0, "what is there is right"
    assert "0123: incomplete: it lacks pins.json; fetched again when" in capsys.readouterr().out
    config.write_bytes(b"\xff" * 5)
    assert main(["weights", "ls", *flags]) == 0
    out = capsys.readouterr().out
    assert f"{row['key']}  {server.url}" in out and "0123  of an unknown source" in out
    assert "damaged: not as fetched: config.json; fetched again when the model is used" in out


def test_damaged_files_of_a_model_are_verified_and_pulled_again(
    server: RangeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, flags, row = pulled(server, tmp_path, capsys)
    with (cache / "models" / row["key"] / "files" / SHARD).open("r+b") as file:
        file.seek(20)
        file.write(b"\xff")
    assert main(["weights", "verify", *flags]) == 1
    assert f"{row['key']}: damaged: not as fetched: {SHARD}" in capsys.readouterr().out
    before = server.sent_of(SHARD)
    assert main(["weights", "pull", server.url, *flags, "--layers", "0-0"]) == 0
    assert server.sent_of(SHARD) - before < row["disk_bytes"] / 10, "only the header"
    assert main(["weights", "verify", *flags]) == 0
    assert listed(cache, capsys)[0]["tensors"] == row["tensors"]


def test_a_directory_is_compared_with_its_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = shutil.copytree(MODEL_DIRECTORY, tmp_path / "model")
    assert main(["weights", "index", str(directory), "--reference", "none"]) == 0
    assert read_manifest(directory / MANIFEST_FILE).references == {}
    capsys.readouterr()
    assert main(["weights", "verify", str(directory)]) == 0
    num_tensors = len(Checkpoint.open(directory).tensors)
    assert (
        f"{num_tensors} of {num_tensors} tensors equal {directory / MANIFEST_FILE}" in capsys.readouterr().out
    )
    entry = Checkpoint.open(directory).tensors["model.layers.1.mlp.up_proj.weight"]
    with (directory / SHARD).open("r+b") as file:
        file.seek(entry.begin + 5)
        file.write(b"\xa5\x5a\xa5")
    assert main(["weights", "verify", str(directory)]) == 1
    out = capsys.readouterr().out
    assert f"{directory / SHARD}: tensor model.layers.1.mlp.up_proj.weight differs from the manifest" in out
    assert f"{num_tensors - 1} of {num_tensors}" in out
    assert main(["weights", "verify"]) == 2
    assert main(["weights", "verify", str(directory), "--cache-dir", str(tmp_path / "cache")]) == 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda check: check | {"references": {"f32": {"checksum": "0", "data": ""}}}, "does not match"),
        (lambda check: "none", "a JSON str"),
    ],
)
def test_a_damaged_reference_in_a_manifest_is_refused(
    tmp_path: Path, change: Callable[[Any], Any], text: str
) -> None:
    directory = shutil.copytree(MODEL_DIRECTORY, tmp_path / "model")
    assert main(["weights", "index", str(directory), "--reference", "f32,bf16"]) == 0
    path = directory / MANIFEST_FILE
    content = json.loads(path.read_text())
    assert read_manifest(path).references.keys() == {"f32", "bf16"}
    path.write_text(json.dumps(content | {"self_check": change(content["self_check"])}))
    with pytest.raises(BadManifest, match=f"invalid references of the self-check: .*{text}"):
        read_manifest(path)
    # One of another version is as good as none.
    path.write_text(json.dumps(content | {"self_check": {"version": 1}}))
    assert read_manifest(path).references == {}


def test_a_reference_needs_a_directory(server: RangeServer, tmp_path: Path) -> None:
    output = ["--output", str(tmp_path / "m.json")]
    assert main(["weights", "index", server.url, *output, "--reference", "f32"]) == 2
    assert main(["weights", "index", str(server.directory), "--reference", "f33"]) == 2
    before = server.sent_bytes
    assert main(["weights", "index", server.url, "--output", str(tmp_path / "no" / "m.json")]) == 1
    assert server.sent_bytes == before, "found before the weights are read"


def test_a_manifest_beside_the_weights_proves_what_is_pulled(
    server: RangeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["weights", "index", server.url, "--output", str(tmp_path / "remote.json")]) == 0
    assert main(["weights", "index", str(server.directory)]) == 0
    beside = server.directory / MANIFEST_FILE
    assert read_manifest(beside).sha256s == read_manifest(tmp_path / "remote.json").sha256s
    cache = tmp_path / "cache"
    assert main(["weights", "pull", server.url, "--cache-dir", str(cache)]) == 0
    (row,) = listed(cache, capsys)
    assert row["verified"] == row["tensors"] == len(Checkpoint.open(MODEL_DIRECTORY).tensors)


def test_a_manifest_of_other_weights_is_refused(
    server: RangeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "manifest.json"
    assert main(["weights", "index", server.url, "--output", str(manifest)]) == 0
    content = json.loads(manifest.read_text())
    content["sha256"]["model.norm.weight"] = "00" * 32
    manifest.write_text(json.dumps(content))
    pull = ["weights", "pull", server.url, "--cache-dir", str(tmp_path / "cache")]
    assert main([*pull, "--weights-manifest", str(manifest)]) == 1
    error = capsys.readouterr().err
    assert "error[TENSOR_DAMAGED]: tensor model.norm.weight differs from the manifest" in error
    del content["sha256"]["model.norm.weight"]
    manifest.write_text(json.dumps(content))
    assert main([*pull, "--weights-manifest", str(manifest)]) == 1
    assert "error[BAD_MANIFEST]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["pull", "ftp://host/model", "--cache-dir", "c"], "ftp:// is not the address of a model"),
        (["pull", "https://user:secret@host/m", "--cache-dir", "c"], "credentials belong into"),
        (["pull", "https://host/m?token=secret", "--cache-dir", "c"], "credentials belong into"),
        (["pull", "http://example.org/m", "--cache-dir", "c"], "use https://"),
        (["pull", "hf://only-a-name", "--cache-dir", "c"], "is not hf://ORG/NAME[@REVISION]"),
        (["index", "hf://org/name"], "is required for a remote model"),
        (["pull", "hf://org/name"], "--cache-dir"),
    ],
)
def test_wrong_addresses_are_refused_without_repeating_secrets(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["weights", *words]) == 2
    error = capsys.readouterr().err
    assert text in error.replace("\n", " ")
    assert "secret" not in error


def test_a_directory_that_is_no_cache_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "ls", "--cache-dir", str(tmp_path)]) == 1
    assert "error[NO_CACHE]" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["index", "verify"])
def test_a_file_has_no_manifest(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.gguf").touch()
    assert main(["weights", command, str(tmp_path / "model.gguf")]) == 2
    assert "model.gguf is a file: a manifest is of a directory" in capsys.readouterr().err
