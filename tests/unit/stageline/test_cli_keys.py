"""`stageline keys`: keys are created, listed and revoked, and shown once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stageline.cli import main
from web.api_keys import digest_of, read_keys


def keys(path: Path, *arguments: str) -> int:
    return main(["keys", *arguments, "--keys-file", str(path)])


def test_a_key_is_created_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    limits = ("--model", "m", "--max-priority", "low", "--max-concurrent", "3", "--requests-per-minute", "4")
    assert keys(path, "create", "--tenant", "acme", *limits, "--tokens-per-minute", "5", "--ttl", "30d") == 0
    text = capsys.readouterr().out.strip()
    (key,) = read_keys(path).values()
    assert key.sha256 == digest_of(text)
    assert keys(path, "list", "--json") == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry.pop("expires") is not None
    assert entry == {
        "id": key.id,
        "tenant": "acme",
        "role": "user",
        "models": ["m"],
        "max_priority": "low",
        "max_concurrent": 3,
        "requests_per_minute": 4,
        "tokens_per_minute": 5,
    }
    assert keys(path, "list") == 0
    shown = capsys.readouterr().out
    assert f"id {key.id}, tenant acme" in shown
    assert text not in shown + path.read_text()
    assert keys(path, "revoke", key.id) == 0
    assert capsys.readouterr().out == f"key {key.id} revoked\n"
    assert read_keys(path) == {}


@pytest.mark.parametrize(
    ("arguments", "code", "problem"),
    [
        (("create", "--tenant", "a b"), 2, "tenant 'a b' is not 1 to 128 letters"),
        (("create", "--tenant", "a", "--max-priority", "urgent"), 2, "priority 'urgent' is not one of"),
        (("create", "--tenant", "a", "--requests-per-minute", "0"), 2, "requests-per-minute"),
        (("revoke", "0123456789"), 1, "has no key '0123456789'"),
        (("list",), 1, "no such file"),
    ],
)
def test_wrong_uses_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, problem: str
) -> None:
    assert keys(tmp_path / "keys.toml", *arguments) == code
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1
