"""API keys: their form and their file, which is read again when it changes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from web.api_keys import ApiKey, KeysFile, KeysUnusable, changed_keys, digest_of, new_key, read_keys
from wire.audit import AuditLog

NOW = datetime(2026, 11, 23, tzinfo=UTC)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def made(path: Path, **limits: object) -> tuple[str, ApiKey]:
    text, key = new_key(**{"tenant": "acme", **limits})
    with changed_keys(path) as keys:
        keys[key.id] = key
    return text, key


def test_a_key_has_256_random_bits_and_is_not_in_the_file(path: Path) -> None:
    text, key = made(
        path,
        models=("a", "b"),
        max_priority="low",
        max_concurrent=3,
        requests_per_minute=4,
        tokens_per_minute=5,
        expires=NOW,
    )
    prefix, secret = text.rsplit(f"{key.id}-", 1)
    assert (prefix, len(secret), key.sha256) == ("sk-sl-", 43, digest_of(text))
    assert read_keys(path) == {key.id: key}
    assert secret not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert new_key(tenant="acme")[0] != new_key(tenant="acme")[0]


def test_a_file_that_others_may_read_is_refused(path: Path) -> None:
    made(path)
    path.chmod(0o640)
    with pytest.raises(KeysUnusable, match="has mode 0640, must be 0600 or stricter: run chmod 600"):
        read_keys(path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("keys = 3", "has no list"),
        ("[[keys", "is not TOML"),
        ("[[keys]]\nid = 'x'", "key 1"),
        ("[[keys]]\nidd = 'x'", "key 1: unknown field 'idd'"),
        (f"[[keys]]\nid = '0123456789'\nsha256 = '{'0' * 64}'\ntenant = 'a b'", "tenant 'a b' is not"),
        (
            f"[[keys]]\nid = '0123456789'\nsha256 = '{'0' * 64}'\ntenant = 'a'\nmax_concurrent = 0",
            r"max_concurrent is 0, must be in \[1,",
        ),
        (
            f"[[keys]]\nid = '0123456789'\nsha256 = '{'0' * 64}'\ntenant = 'a'\nexpires = 2027-01-01",
            "expires is not a time with its zone",
        ),
        (f"[[keys]]\nid = '0123456789'\nsha256 = '{'0' * 64}'\ntenant = 'a'\n" * 2, "two keys of one id"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(path: Path, text: str, problem: str) -> None:
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(KeysUnusable, match=problem):
        read_keys(path)
    path.unlink()
    with pytest.raises(KeysUnusable, match="no such file"):
        read_keys(path)


def test_what_is_read_again_is_audited(path: Path, tmp_path: Path) -> None:
    text, _ = made(path)
    audit = AuditLog(tmp_path / "audit.jsonl", "test")
    keys = KeysFile(path, audit=audit)
    made(path)
    keys.find(text)
    path.write_text("damaged")
    keys.find(text)
    audit.close()
    records = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [(record["action"], record["outcome"]) for record in records] == [
        ("files.reload", "ok"),
        ("files.reload", "failed"),
    ]


ADD_KEYS = """
import sys
from pathlib import Path
from web.api_keys import changed_keys, new_key
for _ in range(10):
    with changed_keys(Path(sys.argv[1])) as known:
        _, key = new_key(tenant="acme")
        known[key.id] = key
"""


def test_two_processes_change_a_file_one_after_the_other(path: Path) -> None:
    processes = [subprocess.Popen([sys.executable, "-c", ADD_KEYS, str(path)]) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    assert len(read_keys(path)) == 40


def test_limits_outside_their_range_are_refused() -> None:
    _, key = new_key(tenant="acme")
    for limits in ({"requests_per_minute": 0}, {"max_priority": "urgent"}, {"tenant": ""}, {"id": "x"}):
        with pytest.raises(ValueError, match=r"must be in|is not|has no id"):
            replace(key, **limits)  # type: ignore[arg-type]
