"""No command line, environment, log, journal, audit log, trace or page of a cluster holds a secret of it."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import ssl
import sys
from base64 import b64encode
from contextlib import closing
from pathlib import Path

import pytest
from httpx2 import AsyncClient

from certificates.identity import Role
from deploy import LocalProcess
from stageline.client.client import Client
from tests.e2e.commands import Shell, exit_code, run_stageline, until_logged
from tests.issued import Certificates
from tests.otlp_collector import collector
from tests.secrets_scan import key_lines, of_files, of_processes, secrets_in
from wire.user_files import write_secret

START_TIMEOUT_S = 60.0
MODEL = ("--mock-model", "layers=4,hidden=64", "--stages", "2")
WRONG = "sk-sl-abcdefghij-this-key-is-not-known-to-anyone-here-123456"


class Scene:
    """A cluster with certificates, and the secrets that its processes know."""

    def __init__(self, folder: Path, traces_to: str) -> None:
        self.folder = folder
        (folder / "tls").mkdir()
        self.certificates = Certificates(folder / "tls")
        self.secrets = {"wrong key": WRONG}
        self.processes: dict[str, LocalProcess] = {}
        self._prefix = ("/usr/bin/env", f"OTEL_EXPORTER_OTLP_ENDPOINT=http://{traces_to}")

    def secret_file(self, name: str) -> str:
        """Write a new secret; return its path."""
        secret = f"{name}-secret-0123456789-abcdefghijklmnop"
        write_secret(self.folder / "secrets" / name, secret)
        self.secrets[name] = secret
        return str(self.folder / "secrets" / name)

    def tls(self, name: str, role: Role) -> tuple[str, ...]:
        directory = self.certificates.of(name, role)
        for number, line in enumerate(key_lines((directory / "tls.key").read_bytes())):
            self.secrets[f"key of {name}, line {number}"] = line
        return ("--tls-dir", str(directory))

    async def start(self, shell: Shell, name: str, *arguments: str) -> LocalProcess:
        audit = ("--audit-log", str(self.folder / f"audit-{name}.log"))
        process = await shell.start(name, *arguments, *audit, prefix=self._prefix)
        self.processes[name] = process
        return process

    def places(self, pages: dict[str, bytes], spans: bytes) -> dict[str, bytes]:
        running = {name: process.pid for name, process in self.processes.items() if process.is_running}
        files = of_files(path for path in self.folder.iterdir() if path.name != "keys.toml")
        return {**of_processes(running), **files, **pages, "exported spans": spans}


@pytest.mark.full
async def test_nothing_that_others_see_holds_a_secret(tmp_path: Path) -> None:
    async with collector() as traces, Shell(tmp_path) as shell:
        scene = Scene(tmp_path, traces.address)
        keys = tmp_path / "keys.toml"
        created = await run_stageline("keys", "create", "--tenant", "ann", "--keys-file", str(keys))
        scene.secrets["API key"] = created.stdout.strip()
        address, dashboard, gateway = await _start_all(scene, shell, keys)
        pages = await _use(scene, address, dashboard, gateway)
        await traces.wait_until(lambda spans: len({span.process for span in spans}) >= 3)
        scene.processes["b"].send_signal(signal.SIGABRT)
        await exit_code(scene.processes["b"])
        spans = b"".join(span.span.SerializeToString() for span in traces.spans)
        places = scene.places(pages, spans)
        assert places.keys() >= {
            "head.log",
            "journal.db",
            "audit-head.log",
            "cmdline of head",
            "environ of gw",
        }
        assert b"request.ended" in places["audit-head.log"] and b"access.denied" in places["audit-head.log"]
        assert secrets_in(places, scene.secrets) == []


async def _start_all(scene: Scene, shell: Shell, keys: Path) -> tuple[str, str, str]:
    """Return the addresses of coordinator, dashboard and gateway."""
    head = await scene.start(
        *(shell, "head", "coordinator", *MODEL, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"),
        *("--token-file", scene.secret_file("operator"), "--journal", str(scene.folder / "journal.db")),
        *("--trace-sample", "1", "--log-level", "debug", *scene.tls("head", Role.COORDINATOR)),
        *("--keys-file", str(keys), "--client-key", "authorization"),
    )
    address = await head.listening_address(timeout_s=START_TIMEOUT_S)
    at = ("--coordinator", address)
    for name in ("a", "b"):
        tls = scene.tls(name, Role.WORKER)
        await scene.start(shell, name, "worker", *at, "--mock", "step=1ms", "--log-level", "debug", *tls)
    await until_logged(head, "serving: epoch", timeout_s=START_TIMEOUT_S)
    gateway = await scene.start(
        *(shell, "gw", "gateway", *at, "--listen", "127.0.0.1:0", "--keys-file", str(keys)),
        *("--log-level", "debug", *scene.tls("gw", Role.GATEWAY)),
    )
    url = head.dashboard_url()
    assert url is not None
    return address, url, await gateway.listening_address(timeout_s=START_TIMEOUT_S)


async def _use(scene: Scene, address: str, dashboard: str, gateway: str) -> dict[str, bytes]:
    """Use every secret, right and wrong ones; return what the pages say."""
    attach, tls = scene.secret_file("attach"), scene.tls("me", Role.CLIENT)
    async with Client(address, tls_dir=tls[1]) as client:
        prompt, secret = [1, 2, 3], scene.secrets["attach"]
        outputs = client.generate(prompt, max_tokens=600, on_disconnect="detach", attach_secret=secret)
        request_id = (await anext(outputs)).request_id
        await outputs.aclose()
    guessed = scene.secret_file("guess")
    at = ("--coordinator", address, *tls)
    refused = await run_stageline("cancel", request_id, "--secret-file", guessed, *at)
    assert (refused.code, "error[ATTACH_SECRET_MISMATCH]" in refused.stderr) == (1, True), refused.stderr
    read = await run_stageline("attach", request_id, "--secret-file", attach, "--from-token", "1", *at)
    assert read.code == 0, read.stderr
    trusted = ssl.create_default_context(cafile=scene.certificates.of("me", Role.CLIENT) / "ca.crt")
    operator = {"authorization": f"Bearer {scene.secrets['operator']}"}
    pages = {}
    async with AsyncClient(verify=trusted) as http:
        for key, status in ((scene.secrets["API key"], 200), (WRONG, 401)):
            body = {"prompt": [1, 2, 3], "max_tokens": 3}
            bearer = {"authorization": f"Bearer {key}"}
            answer = await http.post(f"https://{gateway}/v1/completions", json=body, headers=bearer)
            assert answer.status_code == status, answer.text
            pages[f"answer {status} of the gateway"] = answer.content
        guess = await http.post(f"{dashboard}login", json={"key": WRONG})
        assert guess.status_code == 401, guess.text
        pages["login"] = guess.content
        for path in ("api/status", "api/traces", "api/activity", "metrics"):
            found = await http.get(dashboard + path, headers=operator)
            assert found.status_code == 200, (path, found.text)
            pages[path] = found.content
        cancelled = await http.post(f"{dashboard}api/requests/{request_id}/cancel", headers=operator)
        pages["cancel"] = cancelled.content
    return pages


async def test_a_planted_secret_is_found_in_every_kind_of_place(tmp_path: Path) -> None:
    secret = "planted-secret-0123456789-%/+"
    program = "import sys; sys.stdin.read()"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, secret), env={"TOKEN": secret}, stdin=asyncio.subprocess.PIPE
    )
    (tmp_path / "process.log").write_text(f"INFO token={secret}\n")
    with closing(sqlite3.connect(tmp_path / "journal.db")) as connection:
        connection.execute("CREATE TABLE requests (message BLOB)")
        connection.execute("INSERT INTO requests VALUES (?)", (b"\x0a" + secret.encode(),))
        connection.commit()
    (tmp_path / "audit.log").write_text(json.dumps({"who": secret.encode().hex()}))
    (tmp_path / "page").write_text("key=planted-secret-0123456789-%25%2F%2B")
    (tmp_path / "spans").write_bytes(b"xyz" + b64encode(b"ab" + secret.encode()))
    (tmp_path / "clean.log").write_text("nothing, planted-secret alone is none")
    places = {**of_processes({"p": process.pid}), **of_files(tmp_path.iterdir())}
    expected = ["audit.log", "cmdline of p", "environ of p", "journal.db", "page", "process.log", "spans"]
    assert secrets_in(places, {"it": secret}) == [f"it in {place}" for place in expected]
    await process.communicate(b"")
