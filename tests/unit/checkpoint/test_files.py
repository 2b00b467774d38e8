"""Special files in a checkpoint directory are rejected immediately, in one line."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from checkpoint import Checkpoint, CheckpointError, CheckpointNotFound, DType, FileTooLarge, NotRegularFile
from checkpoint.errors import UnusableTokenizer
from checkpoint.files import MAX_CONFIG_BYTES
from checkpoint.grammar_tokenizer import GrammarTokenizer
from stage_worker.model.decoder import DecoderStage
from tests.checkpoints import make_checkpoint
from tests.unit.text.trained_tokenizers import byte_level, save_tokenizer
from text import tokenizer, tokenizer_files
from text.tokenizer import UnreadableTokenizer, load_text_codec
from text.tokenizer_files import read_tokenizer_files

DEADLINE_S = 30.0
NORM = "model.norm.weight"


def error_of(call: Callable[[], object]) -> Exception:
    """The error raised by `call`, which must not block."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), f"still reading after {DEADLINE_S:g} s"
    assert errors, "it was read"
    assert "\n" not in str(errors[0])
    return errors[0]


def put_fifo(path: Path) -> None:
    os.mkfifo(path)


def put_link_to_fifo(path: Path) -> None:
    target = path.with_name("elsewhere")
    target.mkdir()
    os.mkfifo(target / "fifo")
    path.symlink_to(target / "fifo")


def put_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the path of a socket has at most 107 characters
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(before)


def put_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


KINDS = {
    "a FIFO": put_fifo,
    "a socket": put_socket,
    "a directory": Path.mkdir,
    "a character device": put_device,
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("original"), "llama", num_layers=1, max_shard_size="40KB")


@pytest.fixture
def directory(original: Path, tmp_path: Path) -> Path:
    """A directory like the Hugging Face cache: every file is a link to a blob elsewhere."""
    model = tmp_path / "model"
    model.mkdir()
    for file in original.iterdir():
        (model / file.name).symlink_to(file)
    return model


def test_files_may_be_links_out_of_the_directory(directory: Path, original: Path) -> None:
    assert Checkpoint.open(directory).fingerprint == Checkpoint.open(original).fingerprint


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_only_regular_files_are_read(kind: str, file: str, directory: Path) -> None:
    (directory / file).unlink(missing_ok=True)
    KINDS[kind](directory / file)
    error = error_of(lambda: Checkpoint.open(directory))
    assert isinstance(error, NotRegularFile)
    assert str(error) == f"{directory / file} is {kind}, not a regular file"


@pytest.mark.parametrize("put", [put_fifo, put_link_to_fifo])
def test_a_shard_that_is_a_fifo_is_rejected(put: Callable[[Path], None], directory: Path) -> None:
    shard = directory / Checkpoint.open(directory).tensors[NORM].file
    shard.unlink()
    put(shard)
    assert str(error_of(lambda: Checkpoint.open(directory))) == f"{shard} is a FIFO, not a regular file"


def test_a_shard_that_became_a_fifo_after_its_header_was_read_is_rejected(directory: Path) -> None:
    checkpoint = Checkpoint.open(directory)
    shard = directory / checkpoint.tensors[NORM].file
    shard.unlink()
    os.mkfifo(shard)
    stage = DecoderStage(
        checkpoint.config, layer_begin=0, layer_end=1, has_embeddings=True, has_head=True, dtype=DType.F32
    )
    error = error_of(lambda: stage.load(checkpoint))
    assert isinstance(error, NotRegularFile)


def test_a_dangling_link_differs_from_an_absent_file(directory: Path) -> None:
    (directory / "generation_config.json").unlink()
    (directory / "generation_config.json").symlink_to("nowhere")
    error = error_of(lambda: Checkpoint.open(directory))
    assert isinstance(error, CheckpointNotFound)
    assert "generation_config.json cannot be read: No such file" in str(error)


def test_a_config_larger_than_any_is_rejected_unread(directory: Path) -> None:
    (directory / "config.json").unlink()
    with (directory / "config.json").open("wb") as stream:
        stream.truncate(1 << 40)
    error = error_of(lambda: Checkpoint.open(directory))
    assert isinstance(error, FileTooLarge)
    assert f"has {1 << 40} bytes, the limit is {MAX_CONFIG_BYTES}" in str(error)


@pytest.mark.parametrize("place", ["../{file}", "{directory}/{file}", "..", "shards/{file}"])
def test_an_index_names_files_beside_itself_only(place: str, directory: Path) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = index["weight_map"][NORM]
    index["weight_map"][NORM] = place.format(file=file, directory=directory)
    path.unlink()
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a safetensors file beside it"):
        Checkpoint.open(directory)


@pytest.fixture
def text_directory(tmp_path: Path) -> Path:
    return save_tokenizer(tmp_path, byte_level())


@pytest.mark.parametrize("put", [put_fifo, put_link_to_fifo, put_device])
@pytest.mark.parametrize(
    "file", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json", "chat_template.jinja"]
)
def test_a_tokenizer_is_loaded_from_regular_files_only(
    file: str, put: Callable[[Path], None], text_directory: Path
) -> None:
    (text_directory / file).unlink(missing_ok=True)
    put(text_directory / file)
    error = error_of(lambda: load_text_codec(text_directory))
    assert isinstance(error, UnreadableTokenizer)
    assert f"{text_directory / file} is a " in str(error)


def test_a_fifo_among_chat_templates_or_as_a_vocabulary_is_rejected(
    text_directory: Path,
) -> None:
    (text_directory / "additional_chat_templates").mkdir()
    os.mkfifo(text_directory / "additional_chat_templates" / "rag.jinja")
    assert "rag.jinja is a FIFO" in str(error_of(lambda: load_text_codec(text_directory)))
    for file in text_directory.glob("*.json"):
        file.unlink()
    os.mkfifo(text_directory / "tokenizer.model")
    assert "tokenizer.model is a FIFO" in str(error_of(lambda: load_text_codec(text_directory)))


def test_a_tokenizer_larger_than_any_is_rejected_unread(
    text_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (text_directory / "tokenizer.json").stat().st_size
    monkeypatch.setattr(tokenizer, "MAX_TOKENIZER_BYTES", size - 1)
    expected = f"tokenizer.json has {size} bytes, the limit is {size - 1}"
    assert expected in str(error_of(lambda: load_text_codec(text_directory)))


def test_tables_for_grammars_are_read_from_a_regular_file_only(text_directory: Path) -> None:
    path = text_directory / "tokenizer.json"
    path.unlink()
    os.mkfifo(path)
    error = error_of(lambda: GrammarTokenizer.open(text_directory, vocab_size=400, eos_token_ids=(2,)))
    assert isinstance(error, UnusableTokenizer)
    assert str(error) == f"tokenizer.json: {path} is a FIFO, not a regular file"


SECRET = "sl-operator-token-of-the-tests"
LINKED = ("chat_template.jinja", "merges.txt", "special_tokens_map.json", "vocab.json", "tokenizer.model")


@pytest.mark.parametrize("file", LINKED)
def test_a_link_to_a_file_of_others_is_neither_loaded_nor_sent(
    file: str, text_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    secret = tmp_path_factory.mktemp("elsewhere") / "operator.token"
    secret.write_text(SECRET)
    (text_directory / file).symlink_to(secret)
    loaded = error_of(lambda: load_text_codec(text_directory))
    assert isinstance(loaded, UnreadableTokenizer)
    read = error_of(lambda: read_tokenizer_files(text_directory))
    assert isinstance(read, NotRegularFile)
    for error in (loaded, read):
        assert f"{file} is a link to {secret}, which is not a file of the checkpoint" in str(error)
        assert SECRET not in str(error)


def test_links_of_a_cache_and_to_the_same_name_are_read(text_directory: Path, tmp_path: Path) -> None:
    expected = read_tokenizer_files(text_directory)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    linked = tmp_path / "linked"
    for folder in (snapshot, blobs, linked):
        folder.mkdir(parents=True)
    for name, content in expected.items():
        (blobs / f"blob of {name}").write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/blob of {name}")
        (linked / name).symlink_to(text_directory / name)
    (tmp_path / "model").symlink_to(snapshot)
    for directory in (snapshot, linked, tmp_path / "model"):
        assert load_text_codec(directory) is not None
        assert read_tokenizer_files(directory) == expected


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{0:064d}\nsize 1234567\n"


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "model.safetensors"])
def test_a_pointer_of_git_lfs_is_named(file: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama", num_layers=1)
    (directory / file).write_text(POINTER)
    error = error_of(lambda: Checkpoint.open(directory))
    expected = f"{directory / file} is a Git LFS pointer of {len(POINTER)} bytes, not the file: run git lfs"
    assert str(error).startswith(expected)


@pytest.mark.parametrize(
    "pointer",
    [
        POINTER.replace("\n", "\r\n"),
        POINTER.replace("git-lfs.", "hawser."),
        POINTER.replace("https://git-lfs.github.com/spec/v1", "http://git-media.io/v/2"),
        POINTER.replace("spec/v1\n", "spec/v1\next-0-x sha256:00\n"),
        "# git-media\n" + "0" * 64 + "\n",
    ],
)
def test_a_pointer_of_git_lfs_is_named_in_any_form(pointer: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama", num_layers=1)
    (directory / "model.safetensors").write_bytes(pointer.encode())
    error = error_of(lambda: Checkpoint.open(directory))
    expected = f"{directory / 'model.safetensors'} is a Git LFS pointer of {len(pointer)} bytes, not the file"
    assert str(error).startswith(expected)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "vocab.json"])
def test_a_pointer_of_git_lfs_in_place_of_a_tokenizer_is_named(file: str, text_directory: Path) -> None:
    (text_directory / file).write_text(POINTER)
    error = error_of(lambda: load_text_codec(text_directory))
    assert f"{text_directory / file} is a Git LFS pointer" in str(error)


def test_the_target_of_a_broken_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("../blobs/0123")
    error = error_of(lambda: Checkpoint.open(tmp_path))
    assert str(error).endswith("No such file or directory (it is a link to ../blobs/0123)")


def test_tokenizer_files_are_bounded_in_all(text_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(len(content) for content in read_tokenizer_files(text_directory).values())
    monkeypatch.setattr(tokenizer_files, "MAX_BYTES", size)
    read_tokenizer_files(text_directory)
    monkeypatch.setattr(tokenizer_files, "MAX_BYTES", size - 1)
    error = error_of(lambda: read_tokenizer_files(text_directory))
    assert isinstance(error, FileTooLarge)
    assert str(error) == f"tokenizer files of {text_directory} exceed {size - 1} bytes in all"
