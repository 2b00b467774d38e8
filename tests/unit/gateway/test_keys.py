"""API keys: admission, limits, and what the coordinator is told of a request's owner."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gateway.access.visitors import Doorkeeper, NoKey, TooMany
from tests.unit.web.test_api_keys import made
from web.api_keys import KeysFile, changed_keys, new_key

NOW = datetime(2026, 11, 23, tzinfo=UTC)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


class Counted(list[tuple[str, str, int]]):
    def add(self, key_id: str, kind: str, num_tokens: int) -> None:
        self.append((key_id, kind, num_tokens))


def doorkeeper(path: Path, *, now: datetime = NOW) -> tuple[Doorkeeper, Counted]:
    counted = Counted()
    return Doorkeeper(KeysFile(path, clock=now.timestamp), counted.add), counted


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


def test_limits_per_minute_follow_no_clock_that_is_set(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, _ = made(path, requests_per_minute=1)
    now_s = 100.0
    keeper = Doorkeeper(KeysFile(path, clock=NOW.timestamp), Counted().add, clock=lambda: now_s)
    keeper.admit(text)
    for wall_s in (time.time() + 3600, time.time() - 3600):
        monkeypatch.setattr(time, "time", lambda wall_s=wall_s: wall_s)
        with pytest.raises(TooMany) as refused:
            keeper.admit(text)
        assert refused.value.retry_after_s == 60
    now_s = 160.0
    keeper.admit(text)


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
