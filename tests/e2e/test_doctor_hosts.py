"""`stageline doctor` on three hosts with certificates: sound, and with one problem on each."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from certificates.identity import Identity, Role
from tests.e2e.namespaces import NamedHost, named_hosts, run_ip
from tests.e2e.test_three_hosts import Terminals
from tests.issued import Certificates

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.full]

TIMEOUT_S = 120.0
FILE = """\
coordinator: {{host: head}}
gateways: []
workers:
  - {{name: gpu-a, host: gpu-a}}
  - {{name: gpu-b, host: gpu-b}}
security: {{tls-dir: {folder}}}
"""
ODD_AGENT = """
import asyncio, os, sys
from pathlib import Path
from deploy.commands import read_cluster_spec
from deploy.doctor.agent import DoctorAgent
from deploy.doctor.facts import versions_here
from deploy.doctor.places import places_at, places_of
from stageline.cli.doctor import run_agent
from stageline.version import VERSION
from wire.clock import wall_clock_us

print("pid", os.getpid(), flush=True)
cluster = places_of(read_cluster_spec(Path(sys.argv[1])))
versions = {**versions_here(VERSION), "torch": "2.6.0"}
own = places_at(cluster, "gpu-a")
agent = DoctorAgent("gpu-a", own, cluster, versions=versions, now_us=lambda: wall_clock_us() + 5_000_000)
sys.exit(asyncio.run(run_agent(agent)))
"""
"""An agent whose clock is 5 s ahead, with another torch."""
LISTENER = """
import signal, socket
with socket.create_server(("127.0.0.1", 7481)):
    print("listening on 7481", flush=True)
    signal.pause()
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[dict[str, NamedHost]]:
    with named_hosts(["head", "gpu-a", "gpu-b"], tmp_path) as hosts:
        yield hosts


@pytest.fixture
def file(tmp_path: Path) -> Path:
    certificates = Certificates(tmp_path)
    roles = {"coordinator": Role.COORDINATOR, "gpu-a": Role.WORKER, "gpu-b": Role.WORKER, "me": Role.OPERATOR}
    for name, role in roles.items():
        directory = tmp_path / "tls" / name
        directory.mkdir(parents=True, mode=0o700)
        host = "head" if role is Role.COORDINATOR else name
        certificates.write(directory, Identity(cluster="default", role=role, name=name), hosts=[host])
    file = tmp_path / "cluster.yaml"
    file.write_text(FILE.format(folder=tmp_path / "tls"))
    (tmp_path / "odd.py").write_text(ODD_AGENT)
    (tmp_path / "listener.py").write_text(LISTENER)
    return file


async def test_hosts_are_found_sound_and_their_problems_are_named(
    hosts: dict[str, NamedHost], file: Path, tmp_path: Path
) -> None:
    ask = f"stageline doctor -f {file} --tls-dir {tmp_path}/tls/me"
    async with Terminals(tmp_path) as terminals:
        for name, host in hosts.items():
            await terminals.serve(host, f"stageline doctor --serve {name} -f {file}")
        code, shown = await terminals.run(hosts["gpu-b"], ask)
        assert _problems(shown) == [], shown
        assert (code == 0) == ("no problem found" in shown), shown
        assert all(re.search(rf"{caller} +{callee} ", shown) for caller, callee in _pairs()), shown
        await terminals.stop()
        terminals.servers.clear()

        await terminals.serve(hosts["head"], f"{sys.executable} {tmp_path}/listener.py")
        await terminals.serve(hosts["head"], f"stageline doctor --serve head -f {file}")
        await terminals.serve(hosts["gpu-a"], f"{sys.executable} -P {tmp_path}/odd.py {file}")
        await terminals.serve(hosts["gpu-b"], f"stageline doctor --serve gpu-b -f {file}")
        run_ip("-n", hosts["gpu-b"].namespace, "link", "set", "lan", "down")
        code, shown = await terminals.run(hosts["head"], ask)
        assert code == 1, shown
        problems = _problems(shown)
        assert len(problems) == 4, shown
        assert problems[0].startswith("gpu-b does not answer at gpu-b:7490 ("), problems
        assert problems[1].startswith(
            "head: coordinator cannot listen on 127.0.0.1:7481 (dashboard): another"
        )
        assert problems[2].startswith("versions of torch differ ("), problems
        assert re.match(r"the clock of gpu-a is \d\.\d+ s ahead of head \(at most", problems[3]), problems

        pid = re.search(r"pid (\d+)", terminals.servers[2].text)
        assert pid is not None
        os.kill(int(pid[1]), signal.SIGKILL)
        code, shown = await terminals.run(hosts["head"], ask)
        assert code == 1, shown
        assert [line.partition(" does not answer at ")[0] for line in _problems(shown)[:2]] == [
            "gpu-a",
            "gpu-b",
        ]
        del terminals.servers[2]
        del terminals.servers[0]
        await terminals.stop()


def _pairs() -> list[tuple[str, str]]:
    workers = ("gpu-a", "gpu-b")
    found = [(worker, "coordinator") for worker in workers] + [("coordinator", worker) for worker in workers]
    return [*found, workers, workers[::-1]]


def _problems(shown: str) -> list[str]:
    """The sentences, which the terminal has wrapped, but for those about the CPUs that run the test."""
    text = " ".join(shown.split())
    return [part.strip() for part in text.split(" * ")[1:] if "stages on CPUs run" not in part]
