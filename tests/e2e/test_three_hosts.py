"""The quickstart of docs/hosts.md, word for word, on three hosts without a shared file."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.commands import run_stageline
from tests.e2e.leftovers import leftover_files
from tests.e2e.namespaces import NamedHost, named_hosts
from tests.e2e.terminal import CTRL_C, Terminal
from tests.fake_processes import ROOT
from wire.addresses import parse_address

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.full]

HEADING = "## Three hosts with join tokens\n"
START_TIMEOUT_S = 60.0
TOKEN = "join.token"
PROBE = """
import socket, ssl, sys
for address in sys.argv[1:]:
    where = address.rpartition(":")
    with socket.create_connection((where[0], int(where[2])), timeout=20) as plain:
        plain.sendall(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
        try:
            answer = plain.recv(64)
        except ConnectionResetError:
            answer = b""
        assert not answer or answer[:1] == bytes([21]), (address, answer)  # an alert of TLS
    context = ssl.create_default_context(cafile="certs/me/ca.crt")
    context.check_hostname = False  # dialled by address
    context.load_cert_chain("certs/me/tls.crt", "certs/me/tls.key")
    with socket.create_connection((where[0], int(where[2])), timeout=20) as raw:
        with context.wrap_socket(raw, server_hostname=where[0]) as secure:
            print(address, secure.version(), secure.getpeercert()["subject"][0][0][1])
"""
"""Asserts that each address refuses plain text and proves itself with TLS."""


@dataclass(frozen=True, slots=True)
class Command:
    """One line of the documentation, with the host of its prompt."""

    host: str
    line: str

    @property
    def is_server(self) -> bool:
        return self.line.split()[1] in ("coordinator", "gateway", "worker")


def documented() -> list[Command]:
    section = (ROOT / "docs" / "hosts.md").read_text().partition(HEADING)[2].partition("\n## ")[0]
    blocks = "".join(re.findall(r"^```\n(.*?)^```$", section, re.DOTALL | re.MULTILINE))
    found = re.findall(r"^(\S+)\$ +((?:.*\\\n)*.*)$", blocks, re.MULTILINE)
    return [Command(host, line) for host, line in found]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[dict[str, NamedHost]]:
    with named_hosts(["head", "gpu-a", "gpu-b"], tmp_path) as hosts:
        yield hosts


class Terminals(AsyncExitStack):
    """Types commands on hosts, each of which has only `stageline` and an empty home."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.servers: list[Terminal] = []
        self._programs, self.temporary = folder / "bin", folder / "tmp"

    async def __aenter__(self) -> Terminals:
        self._programs.mkdir()
        self.temporary.mkdir()
        program = self._programs / "stageline"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m stageline "$@"\n')
        program.chmod(0o755)
        return await super().__aenter__()

    def open(self, host: NamedHost, line: str) -> Terminal:
        environment = {
            "HOME": str(host.home),
            "PATH": f"{self._programs}:/usr/sbin:/usr/bin:/sbin:/bin",
            **dict.fromkeys(("XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"), ""),
        }
        return Terminal(command=host.shell(line), environment=environment, temporary=self.temporary)

    async def serve(self, host: NamedHost, line: str) -> None:
        terminal = await self.enter_async_context(self.open(host, line))
        self.servers.append(terminal)
        match = await terminal.expect(r"(listening on)|error\[.*", timeout_s=START_TIMEOUT_S)
        assert match[1], terminal.text

    async def run(self, host: NamedHost, line: str) -> tuple[int, str]:
        """Exit code and everything shown."""
        async with self.open(host, line) as terminal:
            code = await terminal.exit_code(timeout_s=START_TIMEOUT_S)
            await asyncio.sleep(0)
            return code, terminal.text

    async def stop(self) -> None:
        """Ctrl-C in each terminal, the last one first."""
        for terminal in reversed(self.servers):
            terminal.type(CTRL_C)
            assert await terminal.exit_code() == 0, terminal.text
            assert "Traceback" not in terminal.text


async def test_the_commands_on_three_hosts_end_with_a_story_and_an_answer(
    hosts: dict[str, NamedHost], tmp_path: Path
) -> None:
    commands = documented()
    assert {command.host for command in commands} == set(hosts)
    shown: dict[str, str] = {}
    async with Terminals(tmp_path) as terminals:
        for command in commands:
            await _type(command, hosts, terminals, shown)
        await _check_answers(commands, shown, terminals)
        await _check_addresses(hosts)
        head, ask = hosts["head"], _with_word(commands, "generate")
        code, text = await terminals.run(head, re.sub(r"--tls-dir \S+", "", ask.line))
        assert (code == 0, "error[" in text) == (False, True), "no certificate"
        curl = _with_word(commands, "curl")
        code, text = await terminals.run(head, curl.line.replace("KEY", "sk-sl-wrong"))
        assert (code, "invalid_api_key" in text) == (0, True), text
        await terminals.stop()
    keys = [path.read_bytes() for host in hosts.values() for path in host.home.rglob("tls.key")]
    assert (len(keys), len(set(keys))) == (6, 6), "each made where it is used"
    for host in hosts.values():
        assert await _pids_on(host) == ""
    assert leftover_files(terminals.temporary) == []


async def _type(
    command: Command, hosts: dict[str, NamedHost], terminals: Terminals, shown: dict[str, str]
) -> None:
    """Type a line with the key that a former one printed; `shown` gets what it printed, by its line."""
    host, line = hosts[command.host], command.line
    if command.is_server:
        await terminals.serve(host, line)
        return
    if keys := re.findall(r"sk-sl-\S+", " ".join(shown.values())):
        line = line.replace("KEY", keys[0])
    code, shown[command.line] = await terminals.run(host, line)
    assert code == 0, shown[command.line]
    for worker in ("gpu-a", "gpu-b"):
        if TOKEN in line:
            shutil.copy2(hosts["head"].home / TOKEN, hosts[worker].home)


def _with_word(commands: list[Command], word: str) -> Command:
    (command,) = (command for command in commands if word in command.line.split()[:2])
    return command


async def _check_answers(commands: list[Command], shown: dict[str, str], terminals: Terminals) -> None:
    assert "serving" in shown[_with_word(commands, "status").line]
    ask = _with_word(commands, "generate").line
    story = await _story_of_one_host(ask, terminals.temporary)
    assert _story(shown[ask]) == story
    answer = shown[_with_word(commands, "curl").line]
    (body,) = re.findall(r"\{.*\}", answer.replace("\n", ""))
    text = json.loads(body)["choices"][0]["text"]
    assert len(text) > 10, answer


async def _check_addresses(hosts: dict[str, NamedHost]) -> None:
    """Coordinator, enrolment, gateway and dashboard on the head; two ports for each worker."""
    for host in hosts.values():
        listening = await _listening(host)
        assert len(listening) == (6 if host.name == "head" else 2), listening
        inside = [address for address in listening if address.startswith("127.")]
        assert inside == (["127.0.0.1:7481"] if host.name == "head" else [])
        await _probe(hosts["head"], host.name, listening)


async def _story_of_one_host(line: str, temporary: Path) -> str:
    """What the same request gets from a cluster of three workers without certificates."""
    (prompt,) = re.findall(r'"(.*)"', line)
    up = ("up", "--workers", "3", "--listen", "127.0.0.1:0", "--gateway", "off")
    async with Terminal(*up, temporary=temporary) as terminal:
        match = await terminal.expect(r"Serving at (127\.0\.0\.1:\d+)\.", timeout_s=START_TIMEOUT_S)
        finished = await run_stageline("generate", prompt, "--coordinator", match[1])
        terminal.type(CTRL_C)
        assert await terminal.exit_code() == 0
    assert finished.code == 0, finished.stderr
    return _story(finished.stdout + finished.stderr)


def _story(text: str) -> str:
    story = text.rpartition("(")[0].strip().replace("\n", "")
    assert len(story) > 100, text
    return story


async def _probe(head: NamedHost, name: str, addresses: list[str]) -> None:
    program = head.home.parent / "probe.py"
    program.write_text(PROBE)
    command = head.shell(f"{sys.executable} {program} {' '.join(addresses)}")
    found = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    names = ["api" if address.endswith(":7482") else name for address in addresses]
    expected = [f"{address} TLSv1.3 {each}" for address, each in zip(addresses, names, strict=True)]
    assert found.stdout.splitlines() == expected


async def _listening(host: NamedHost) -> list[str]:
    """Every address at which something listens there, as another host dials it."""
    lines = (await _output(*host.prefix, "ss", "-Hltn")).splitlines()
    found = [parse_address(line.split()[3].replace("*:", "0.0.0.0:")) for line in lines]
    dialled = {"0.0.0.0": host.address, f"::ffff:{host.address}": host.address}
    return sorted(f"{dialled.get(where.host, where.host)}:{where.port}" for where in found)


async def _pids_on(host: NamedHost) -> str:
    return await _output("ip", "netns", "pids", host.namespace)


async def _output(*command: str) -> str:
    return await asyncio.to_thread(subprocess.check_output, command, text=True, timeout=60)
