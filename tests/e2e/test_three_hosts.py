"""The quickstart of docs/hosts.md, word for word: six commands on three hosts, without a shared file."""

from __future__ import annotations

import asyncio
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
        return self.line.split()[1] in ("coordinator", "worker")


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


async def test_six_commands_on_three_hosts_end_with_a_story(
    hosts: dict[str, NamedHost], tmp_path: Path
) -> None:
    *start, ask = documented()
    assert (len(start), {command.host for command in start}) == (5, set(hosts))
    head = hosts["head"]
    async with Terminals(tmp_path) as terminals:
        for command in start:
            if command.is_server:
                await terminals.serve(hosts[command.host], command.line)
                continue
            code, text = await terminals.run(hosts[command.host], command.line)
            assert code == 0, text
            if (head.home / TOKEN).exists():
                for worker in ("gpu-a", "gpu-b"):
                    shutil.copy2(head.home / TOKEN, hosts[worker].home)
        await terminals.servers[0].expect("serving: epoch", timeout_s=START_TIMEOUT_S)
        code, text = await terminals.run(hosts[ask.host], ask.line)
        assert code == 0, text
        assert _story(text) == await _story_of_one_host(ask.line, terminals.temporary)

        code, text = await terminals.run(head, re.sub(r"--tls-dir \S+", "", ask.line))
        assert (code == 0, "error[" in text) == (False, True), "no certificate"
        for host in hosts.values():
            listening = await _listening(host)
            assert len(listening) == (3 if host is head else 2)
            inside = [address for address in listening if address.startswith("127.")]
            assert inside == (["127.0.0.1:7481"] if host is head else [])
            await _probe(head, host.name, listening)
        await terminals.stop()
    keys = [path.read_bytes() for host in hosts.values() for path in host.home.rglob("tls.key")]
    assert (len(keys), len(set(keys))) == (4, 4), "each made where it is used"
    for host in hosts.values():
        assert await _pids_on(host) == ""
    assert leftover_files(terminals.temporary) == []


async def _story_of_one_host(line: str, temporary: Path) -> str:
    """What the same request gets from a cluster of two workers without certificates."""
    (prompt,) = re.findall(r'"(.*)"', line)
    up = ("up", "--workers", "2", "--listen", "127.0.0.1:0", "--gateway", "off")
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
    assert found.stdout.splitlines() == [f"{address} TLSv1.3 {name}" for address in addresses]


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
