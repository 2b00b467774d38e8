"""The audit log: its records, and what happens to its file."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from certificates.identity import Identity, Role
from wire import audit
from wire.audit import MAX_CHARACTERS, NO_AUDIT, Action, AuditLog, AuditOutcome, open_audit
from wire.peer_secrets import MAX_TRIES, RefusedPeers

WORKER = Identity(cluster="default", role=Role.WORKER, name="gpu-a")


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(log: AuditLog, path: Path, count: int) -> list[dict[str, Any]]:
    """Wait for lines, which a thread writes; without a limit, as pytest has one."""
    while not path.exists() or len(path.read_text().splitlines()) < count:
        threading.Event().wait(0.005)
    return records(path)


def test_records_name_who_did_what(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, "coordinator")
    log.record(Action.JOIN, AuditOutcome.OK, who=WORKER, host="10.0.0.2", device="cpu", nothing=None)
    log.record(Action.DENIAL, AuditOutcome.REFUSED, who="host 10.0.0.3", problem="a\nb" + "x" * 2000)
    log.close()
    joined, denied = records(path)
    assert joined.pop("ts").endswith("Z")
    assert joined == {
        "process": "coordinator",
        "action": "worker.join",
        "outcome": "ok",
        "who": WORKER.uri,
        "host": "10.0.0.2",
        "device": "cpu",
    }
    assert len(denied["problem"]) == MAX_CHARACTERS
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_is_appended_to_and_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"before": 1}\n')
    path.chmod(0o644)
    log = AuditLog(path, "worker")
    log.record(Action.JOIN, AuditOutcome.OK, who="a")
    log.close()
    assert [record.get("before") for record in records(path)] == [1, None]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_rotated_file_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, "worker")
    log.record(Action.JOIN, AuditOutcome.OK, who="a")
    written(log, path, 1)
    path.rename(tmp_path / "audit.jsonl.1")
    log.record(Action.LEAVE, AuditOutcome.OK, who="b")
    log.close()
    assert [record["who"] for record in records(tmp_path / "audit.jsonl.1")] == ["a"]
    assert [record["who"] for record in records(path)] == ["b"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_loses_records_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "audit.jsonl"
    log, write = AuditLog(path, "worker"), os.write
    full = threading.Event()
    full.set()

    def torn(descriptor: int, data: memoryview) -> int:
        """Takes a part of a record, and refuses the rest."""
        if not full.is_set():
            return write(descriptor, data)
        if len(data) > 10:
            return write(descriptor, data[:10]) and len(data) - 5
        raise OSError(errno.ENOSPC, "No space left on device")

    with patch.object(audit.os, "write", torn), caplog.at_level(logging.INFO, "wire"):
        for number in range(3):
            log.record(Action.JOIN, AuditOutcome.OK, who=str(number))
            while log.num_lost <= number:
                threading.Event().wait(0.005)
        full.clear()
        log.record(Action.JOIN, AuditOutcome.OK, who="after")
        log.close()
    assert log.num_lost == 3
    assert json.loads(path.read_text().splitlines()[-1])["who"] == "after"
    problems = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert problems == [f"audit log {path} cannot be written, records are lost: no space left on device"]
    assert "is written again: lost=3" in caplog.text


def test_what_cannot_be_a_log_is_refused_at_start(tmp_path: Path) -> None:
    assert open_audit(None, "gateway") is NO_AUDIT
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "missing" / "a", tmp_path / "link", Path("/dev/null")):
        with pytest.raises(OSError, match=f"--audit-log {path} cannot be opened: "):
            open_audit(path, "gateway")


def test_denials_are_recorded_where_they_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, "coordinator")
    num_refused: list[None] = []
    refused = RefusedPeers(lambda: 0.0, lambda: num_refused.append(None), log)
    for _ in range(MAX_TRIES + 5):
        refused.note("a call", "wrong secret", host="10.0.0.9")
    refused.note("a worker", "another name", host="10.0.0.2", who=WORKER)
    log.close()
    found = records(path)
    assert len(num_refused) == MAX_TRIES + 6
    assert [record["who"] for record in found] == ["host 10.0.0.9"] * MAX_TRIES + [WORKER.uri]
    assert {(record["action"], record["outcome"]) for record in found} == {("access.denied", "refused")}
    assert found[MAX_TRIES - 1]["tries"] == MAX_TRIES
