"""Addresses of models: what they name, and which are refused."""

from __future__ import annotations

import pytest

from weights.location import remote_model

COMMIT = "c" * 40


@pytest.mark.parametrize(
    ("text", "folder", "file", "name"),
    [
        ("hf://org/name", "", "", "name"),
        (f"hf://org/name@{COMMIT}", "", "", "name"),
        ("hf://org/name-GGUF/name-Q4_K_M.gguf", "", "name-Q4_K_M.gguf", "name-Q4_K_M"),
        ("hf://org/name/a.gguf@refs/pr/1", "", "a.gguf", "a"),
        ("hf://org/name/UD/Q4/a-00001-of-00003.gguf@main", "UD/Q4/", "a-00001-of-00003.gguf", "a"),
        ("https://models.example.org/llama/a.GGUF", "", "a.GGUF", "a"),
        ("s3://bucket/models/a-00001-of-00002.gguf", "", "a-00001-of-00002.gguf", "a"),
        ("https://models.example.org/llama", "", "", "llama"),
        ("s3://bucket.gguf", "", "", "bucket.gguf"),
    ],
)
def test_an_address_names_a_folder_or_a_gguf_file(text: str, folder: str, file: str, name: str) -> None:
    location = remote_model(text)
    assert (location.folder, location.file, location.name) == (folder, file, name)
    assert str(location) == text, "workers parse it again"


def test_files_of_one_model_are_beside_each_other() -> None:
    hub = remote_model("hf://org/name/Q4/a-00001-of-00002.gguf@main")
    assert hub.address_of("a-00002-of-00002.gguf") == "hf://org/name/Q4/a-00002-of-00002.gguf@main"
    store = remote_model("s3://bucket/models/a.gguf")
    assert store.folder_address == "s3://bucket/models"
    assert store.address_of("b.json") == "s3://bucket/models/b.json"


@pytest.mark.parametrize(
    "text",
    [
        "hf://org/name@main/a.gguf",
        "hf://org/name/a.safetensors",
        "hf://org/name/../other/a.gguf",
        "https://user:secret@host/a.gguf",
        "https://host/a.gguf?token=secret",
        "ftp://host/a.gguf",
    ],
)
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"://") as caught:
        remote_model(text)
    assert "secret" not in str(caught.value)
