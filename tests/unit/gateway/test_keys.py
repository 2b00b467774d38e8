"""API keys: the file, admission, limits, and what the coordinator is told of a request's owner."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gateway.access.keys import ApiKey, KeysUnusable, changed_keys, digest_of, new_key, read_keys
from gateway.access.visitors import Doorkeeper, NoKey, TooMany

NOW = datetime(2026, 11, 23, tzinfo=UTC)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


class Counted(list[tuple[str, str, int]]):
    def add(self, key_id: str, kind: str, num_tokens: int) -> None:
        self.append((key_id, kind, num_tokens))


def doorkeeper(path: Path, *, now: datetime = NOW) -> tuple[Doorkeeper, Counted]:
    counted = Counted()
    return Doorkeeper(path, counted.add, clock=now.timestamp), counted


def made(path: Path, **limits: object) -> tuple[str, ApiKey]:
    text, key = new_key(**{"tenant": "acme", **limits})
    with changed_keys(path) as keys:
        keys[key.id] = key
    return text, key


# The file


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


# Admission


def test_only_known_keys_in_force_are_admitted(path: Path) -> None:
    text, _ = made(path, expires=NOW + timedelta(hours=1))
    keeper, _ = doorkeeper(path)
    assert keeper.admit(text).tenant == "acme"
    wrong = text[:-1] + ("A" if text[-1] != "A" else "B")
    for refused in ("", "sk-other", wrong, new_key(tenant="acme")[0], text.upper(), f"{text} "):
        with pytest.raises(NoKey):
            keeper.admit(refused)
    late, _ = doorkeeper(path, now=NOW + timedelta(hours=1))
    with pytest.raises(NoKey, match=r"the API key ended at 2026-11-23T01:00:00\+00:00"):
        late.admit(text)


def test_a_revoked_key_is_refused_at_once_and_a_damaged_file_changes_nothing(path: Path) -> None:
    (first, _), (second, key) = made(path), made(path)
    keeper, _ = doorkeeper(path)
    keeper.admit(second)
    with changed_keys(path) as keys:
        del keys[key.id]
    with pytest.raises(NoKey, match="was revoked"):
        keeper.admit(second)
    path.write_text("damaged")
    assert keeper.admit(first).tenant == "acme"
    path.unlink()
    assert keeper.admit(first).tenant == "acme"


def test_requests_per_minute(path: Path) -> None:
    (text, _), (other, _) = made(path, requests_per_minute=1000), made(path)
    keeper, _ = doorkeeper(path)
    for _ in range(1000):
        keeper.admit(text)
    with pytest.raises(TooMany, match="this API key may use 1000 requests per minute; retry in") as refused:
        keeper.admit(text)
    assert 0 < refused.value.retry_after_s <= 60
    keeper.admit(other)


def test_tokens_per_minute_are_counted_as_they_are_used(path: Path) -> None:
    text, key = made(path, tokens_per_minute=100)
    keeper, counted = doorkeeper(path)
    visitor = keeper.admit(text)
    visitor.spend("prompt", 60)
    keeper.admit(text)
    visitor.owner.spend(39)
    keeper.admit(text)
    visitor.owner.spend(500)
    with pytest.raises(TooMany, match="100 tokens per minute"):
        keeper.admit(text)
    assert counted == [(key.id, "prompt", 60), (key.id, "completion", 39), (key.id, "completion", 500)]


def test_the_owner_of_a_request_is_the_tenant_with_its_limit(path: Path) -> None:
    text, _ = made(path, max_concurrent=7)
    owner = doorkeeper(path)[0].admit(text).owner
    assert (owner.tenant, owner.max_sequences) == ("acme", 7)


def test_two_processes_change_a_file_one_after_the_other(path: Path) -> None:
    for _ in range(8):
        if os.fork() == 0:
            try:
                for _ in range(5):
                    made(path)
            finally:
                os._exit(0)
    for _ in range(8):
        os.wait()
    assert len(read_keys(path)) == 40


def test_limits_outside_their_range_are_refused() -> None:
    _, key = new_key(tenant="acme")
    for limits in ({"requests_per_minute": 0}, {"max_priority": "urgent"}, {"tenant": ""}, {"id": "x"}):
        with pytest.raises(ValueError, match=r"must be in|is not|has no id"):
            replace(key, **limits)  # type: ignore[arg-type]
