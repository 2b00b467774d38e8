"""`stageline support-bundle`: what is in it, and that no secret is."""

from __future__ import annotations

import asyncio
import json
import os
import tarfile
from pathlib import Path

import pytest

from certificates.authority import new_key
from certificates.files import key_pem
from stageline.cli import main
from tests.integration.cluster import DEADLINE_S
from tests.integration.request_cases import mixed_cases
from tests.integration.test_mock_cluster import check, mock_cluster
from tests.secrets_scan import key_lines, secrets_in
from web.api_keys import new_key as new_api_key
from wire.user_files import write_secret

TOKEN = "operator-token-of-this-very-test"
VARIABLE = "value-of-a-variable-with-a-secret"


def read(bundle: Path) -> dict[str, bytes]:
    with tarfile.open(bundle) as archive:
        found = {}
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            found[member.name.removeprefix("stageline-support/")] = file.read()
        return found


async def test_a_bundle_has_what_helps_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("stageline.support.sources.CALL_TIMEOUT_S", DEADLINE_S)
    write_secret(tmp_path / "state" / "stageline" / "tokens" / "127.0.0.1_1", TOKEN)
    api_key, _ = new_api_key(tenant="me")
    pem = key_pem(new_key())
    secrets = {"token": TOKEN, "variable": VARIABLE, "api key": api_key[-43:], "key": key_lines(pem)[0]}
    log = tmp_path / "worker.log"
    log.write_text(
        f"serving: epoch 3\nthe token {TOKEN} as {TOKEN.encode().hex()}\n{pem.decode()}\n"
        f"Authorization: Bearer {api_key}\nkey {api_key}\nHF_TOKEN={VARIABLE}\n"
    )
    out = tmp_path / "bundle.tar.gz"
    async with mock_cluster(2, http="127.0.0.1:0") as cluster:
        check(await cluster.generate_all(mixed_cases(2, max_tokens=4)))
        async with asyncio.timeout(DEADLINE_S):
            while len((await cluster.client.traces()).traces) < 2:
                await asyncio.sleep(0.02)
        file = tmp_path / "cluster.yaml"
        listen = f'{{listen: "{cluster.address}", http: "off"}}'
        workers = f"workers: [{{name: w0}}]\nenvironment: {{MY_AUTH: {VARIABLE}}}\n"
        file.write_text(f"coordinator: {listen}\ngateways: []\n{workers}")
        assert cluster.server.dashboard is not None
        metrics = f"{cluster.server.dashboard.url}metrics"
        line = ["support-bundle", "-f", str(file), "--log", str(log), "--metrics", metrics, "-o", str(out)]
        assert await asyncio.to_thread(main, line) == 0
    assert "without known secrets: look before you send it" in capsys.readouterr().out
    planted = {"log": log.read_bytes(), "file": file.read_bytes()}
    assert len(secrets_in(planted, secrets)) == 5, "the scan finds them where they are"
    found = read(out)
    assert secrets_in(found, secrets) == []
    assert b"serving: epoch 3" in found["logs/0-worker.log"]
    assert json.loads(found["status.json"])["num_stages"] == 2
    assert len(json.loads(found["traces.json"])) == 2
    assert b"stageline_" in found["metrics/0.txt"]
    assert json.loads(found["host.json"])["facts"]["versions"]["protocol"]
    assert json.loads(found["commands.json"])[0]["command"][1] == "coordinator"
    assert {"cluster.yaml", "packages.txt", "processes.json", "activity.json"} <= found.keys()
    assert out.stat().st_mode & 0o777 == 0o600


def test_a_dead_coordinator_leaves_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("stageline.support.sources.CALL_TIMEOUT_S", 0.2)
    out = tmp_path / "bundle.tar.gz"
    missing_log = str(tmp_path / "none.log")
    line = ["support-bundle", "--coordinator", "127.0.0.1:1", "--log", missing_log, "-o", str(out)]
    assert main(line) == 0
    shown = capsys.readouterr().out
    assert "without status.json: no answer within 0.2 s" in shown
    assert "without logs/0-none.log: [Errno 2] No such file or directory" in shown
    found = read(out)
    assert json.loads(found["missing.json"]).keys() == {
        *("status.json", "activity.json", "traces.json", "logs/0-none.log")
    }
    assert "host.json" in found
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_a_bundle_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "no" / "b.tar.gz"
    assert main(["support-bundle", "--coordinator", "127.0.0.1:1", "-o", str(out)]) == 1
    errors = capsys.readouterr().err
    assert errors == f"stageline: error[OS_ERROR]: [Errno 2] No such file or directory: '{out}'\n"
