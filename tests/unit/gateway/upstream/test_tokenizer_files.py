"""Files of a tokenizer are kept in a cache, or for one run where the cache cannot be written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.upstream.contract import UpstreamFailure
from gateway.upstream.tokenizer_files import TokenizerFiles
from text.tokenizer_files import files_digest

FILES = {"tokenizer.json": b"{}", "generation_config.json": b'{"top_p": 0.5}'}
DIGEST = files_digest(FILES)


@pytest.mark.parametrize("place", ["file", "/proc/none"])
def test_a_cache_that_cannot_be_written_costs_the_cache_only(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    files = TokenizerFiles(tmp_path / place / "tokenizers")
    files.store(DIGEST, FILES)
    directory = files.directory
    assert directory is not None and (directory / "tokenizer.json").read_bytes() == b"{}"
    assert files.generation_config == {"top_p": 0.5} and files.known_sha256 == DIGEST
    assert "cannot cache the tokenizer" in caplog.text
    files.close()
    assert not directory.exists()


def test_a_cache_is_used_again(tmp_path: Path) -> None:
    TokenizerFiles(tmp_path).store(DIGEST, FILES)
    assert TokenizerFiles(tmp_path).use(DIGEST)


def test_wrong_sampling_parameters_of_a_coordinator_are_named(tmp_path: Path) -> None:
    wrong = FILES | {"generation_config.json": json.dumps({"top_p": 0}).encode()}
    files = TokenizerFiles(tmp_path)
    files.store(files_digest(wrong), wrong)
    with pytest.raises(UpstreamFailure, match=r"generation_config\.json: top_p is 0"):
        files.generation_config  # noqa: B018


def test_sampling_parameters_are_read_once_for_each_set_of_files(tmp_path: Path) -> None:
    files = TokenizerFiles(tmp_path)
    files.store(DIGEST, FILES)
    assert files.generation_config == {"top_p": 0.5}
    (tmp_path / DIGEST / "generation_config.json").write_text("broken")
    assert files.generation_config == {"top_p": 0.5}
    other = FILES | {"generation_config.json": b'{"top_p": 0.75}'}
    files.store(files_digest(other), other)
    assert files.generation_config == {"top_p": 0.75}
