"""Processes with certificates, as users start them, and processes that refuse to listen without."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path

import pytest
from httpx2 import AsyncClient

from certificates.identity import Role
from stageline.cli import main
from tests.e2e.commands import Shell, run_stageline, until_logged
from tests.issued import Certificates

START_TIMEOUT_S = 60.0
ANYWHERE = ("--listen", "0.0.0.0:0", "--http", "0.0.0.0:0")
MODEL = ("--mock-model", "layers=4,hidden=64", "--stages", "2")


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@pytest.mark.full
async def test_coordinator_workers_gateway_and_commands_work_with_certificates(
    certificates: Certificates, tmp_path: Path
) -> None:
    def tls(name: str, role: Role) -> tuple[str, ...]:
        return ("--tls-dir", str(certificates.of(name, role)))

    denied = ("--deny-list", str(certificates.deny_list))
    keys = ("--keys-file", str(tmp_path / "keys.toml"))
    viewer = (await _output("keys", "create", "--tenant", "me", "--role", "viewer", *keys)).strip()
    async with Shell(tmp_path) as shell:
        process = await shell.start(
            "head", "coordinator", *MODEL, *ANYWHERE, *denied, *keys, *tls("head", Role.COORDINATOR)
        )
        address = await process.listening_address(timeout_s=START_TIMEOUT_S)
        port = address.rpartition(":")[2]
        at = ("--coordinator", f"127.0.0.1:{port}")
        for name in ("a", "b"):
            await shell.start(name, "worker", *at, "--mock", "step=1ms", *tls(name, Role.WORKER))
        await until_logged(process, "serving: epoch", timeout_s=START_TIMEOUT_S)
        gateway = await shell.start("gw", "gateway", *at, "--listen", "127.0.0.1:0", *tls("gw", Role.GATEWAY))
        me = (*at, *tls("me", Role.OPERATOR))

        status = json.loads(await _output("status", "--json", *me))
        assert [worker["name"] for worker in status["workers"]] == ["a", "b"]
        assert (
            len((await _output("generate", "--token-ids", "1,2", "--max-tokens", "3", *me)).split(",")) == 3
        )
        assert (await _output("drain", "b", *me)) == "worker b drained\n"
        refused = await run_stageline("status", *at, *tls("you", Role.CLIENT))
        assert "error[ACCESS_DENIED]: client you may not call GetStatus" in refused.stderr

        trusted = ssl.create_default_context(cafile=certificates.of("me", Role.OPERATOR) / "ca.crt")
        listening = await gateway.listening_address(timeout_s=START_TIMEOUT_S)
        async with AsyncClient(verify=trusted) as http:
            assert (await http.get(f"https://{listening}/v1/models")).json()["data"][0]["id"] == "mock"
            url = process.dashboard_url()
            assert url is not None and url.startswith("https://")
            assert (await http.get(f"{url}api/status")).status_code == 401
            assert (await http.post(f"{url}login", json={"key": viewer})).status_code == 200
            assert (await http.get(f"{url}api/status")).json()["user"]["role"] == "viewer"
            await _output("keys", "revoke", viewer.split("-")[2], *keys)
            assert (await http.get(f"{url}api/status")).status_code == 401
        for version, is_spoken in ((ssl.TLSVersion.TLSv1_2, False), (ssl.TLSVersion.TLSv1_3, True)):
            assert await _speaks(version, int(port), certificates.of("me", Role.OPERATOR)) is is_spoken


async def _output(*arguments: str) -> str:
    finished = await run_stageline(*arguments)
    assert finished.code == 0, finished.stderr
    return finished.stdout


async def _speaks(version: ssl.TLSVersion, port: int, directory: Path) -> bool:
    context = ssl.create_default_context(cafile=directory / "ca.crt")
    context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    context.minimum_version = context.maximum_version = version
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    except (ssl.SSLError, ConnectionResetError):
        return False
    writer.close()
    return True


@pytest.mark.parametrize(
    "line",
    [
        "coordinator --stages 1 --listen 0.0.0.0:0",
        "coordinator --stages 1 --http [::]:0",
        "worker --listen 0.0.0.0:0",
        "worker --payload-listen 0.0.0.0:0",
        "gateway --listen 0.0.0.0:0",
        "up --gateway 0.0.0.0:0",
    ],
)
def test_an_address_that_others_reach_needs_certificates_or_a_word(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, flag, address = line.split()
    expected = f"{flag} {address} can be reached from other hosts: give --tls-dir DIR, or --insecure"
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert (expected in error, error.count("\n")) == (True, 1)


@pytest.mark.full
async def test_insecure_processes_listen_anywhere(tmp_path: Path) -> None:
    up = ("up", "--mock", "step=1ms", "--mock-model", "layers=4", "--listen", "0.0.0.0:0", "--insecure")
    async with Shell(tmp_path) as shell:
        process = await shell.start("up", *up, "--gateway", "0.0.0.0:0")
        await until_logged(process, "OpenAI's API at", timeout_s=START_TIMEOUT_S)


@pytest.mark.full  # in one process: tests/integration/test_enrolment.py
async def test_workers_with_a_join_token_need_no_certificate(tmp_path: Path) -> None:
    for line in (
        "certs ca --out ca",
        "certs issue --role coordinator --name head --san 127.0.0.1 --out head --ca ca",
        "certs issue --role operator --name me --out me --ca ca",
        "token create --uses 2 --out join.token --ca ca --tokens-file tokens.json",
    ):
        assert (await run_stageline(*_in(tmp_path, line))).code == 0, line
    enrolling = "--tls-dir head --enroll-listen 127.0.0.1:0 --ca-dir ca --tokens-file tokens.json"
    async with Shell(tmp_path) as shell:
        process = await shell.start("head", "coordinator", *MODEL, *ANYWHERE[:2], *_in(tmp_path, enrolling))
        address = await process.listening_address(timeout_s=START_TIMEOUT_S)
        at = ("--coordinator", f"127.0.0.1:{address.rpartition(':')[2]}")
        enrol = process.read_log().partition("enrolment at ")[2].split()[0]
        for name in ("a", "b"):
            (tmp_path / f"tls-{name}").mkdir()
            word = f"--join-token-file join.token --tls-dir tls-{name}"
            await shell.start(
                name,
                *("worker", *at, "--mock", "step=1ms", "--name", name, "--enroll", enrol),
                *_in(tmp_path, word),
            )
        await until_logged(process, "serving: epoch", timeout_s=START_TIMEOUT_S)
        status = json.loads(await _output("status", "--json", *at, *_in(tmp_path, "--tls-dir me")))
        assert [worker["name"] for worker in status["workers"]] == ["a", "b"]


def _in(folder: Path, line: str) -> list[str]:
    """Words of a command line whose paths are in a folder."""
    of_paths = ("--out", "--ca", "--tokens-file", "--tls-dir", "--ca-dir", "--join-token-file")
    words = line.split()
    before = ["", *words]
    return [
        str(folder / word) if flag in of_paths else word for flag, word in zip(before, words, strict=False)
    ]
