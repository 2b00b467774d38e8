"""Units of systemd: accepted, little exposed, and their commands run under their main restrictions."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from stageline.cli import main
from tests.deploy.debian import require
from tests.fake_processes import ROOT
from tests.ports import unused_address
from tests.unit.deploy.cluster_files import HOSTS, LEAST

pytestmark = pytest.mark.deploy

EXPOSURE = 25
"""Tenths of the exposure of docs/deploy/systemd.md."""
_START_TIMEOUT_S = 120.0
_ENTER = """\
mount --make-rprivate / && mount -t tmpfs tmpfs /run && mkdir -p /run/credentials \\
    && mount --bind {folder} {folder} && mount --bind {credentials} /run/credentials \\
    && mount -o remount,ro,bind / || exit 99
exec setpriv --pdeathsig=KILL --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \\
    env --ignore-environment {words}
"""


def _units(text: str, directory: Path) -> list[Path]:
    file = directory / "cluster.yaml"
    file.write_text(text)
    assert main(["deploy", "render", "systemd", "-f", str(file), "-o", str(directory / "units")]) == 0
    return sorted((directory / "units").rglob("*.service"))


@pytest.mark.parametrize("text", [LEAST, HOSTS], ids=["least", "hosts"])
def test_systemd_accepts_its_units_and_finds_them_little_exposed(text: str, tmp_path: Path) -> None:
    require("systemd-analyze")
    engine = f"engine: {{program: {shutil.which('true')}, user: daemon}}\n"
    units = [str(path) for path in _units(f"{text}{engine}", tmp_path)]
    verified = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (0, "")
    security = ["systemd-analyze", "security", "--offline=yes", "--no-pager", f"--threshold={EXPOSURE}"]
    for unit in units:
        assert subprocess.run([*security, unit], capture_output=True).returncode == 0
    opened = Path(units[0])
    opened.write_text(opened.read_text().replace("CapabilityBoundingSet=\n", "").replace("=yes\n", "=no\n"))
    assert subprocess.run([*security, str(opened)], capture_output=True).returncode == 1


def test_a_unit_runs_without_capabilities_on_a_file_system_that_it_cannot_write(tmp_path: Path) -> None:
    """The coordinator: it reads its token as a credential, writes its own directory, and notifies.

    Its user is that of the test, who can read the Python of the test.
    """
    require("unshare", "setpriv")
    token = tmp_path / "operator.token"
    token.write_text("a-secret-of-more-than-sixteen-characters\n")
    token.chmod(0o600)
    address = unused_address()
    text = (
        f"coordinator: {{listen: '{address}', http: off, journal: {tmp_path}/state/journal}}\n"
        f"security: {{token-file: {token}}}\ngateways: []\nworkers: [{{name: w0}}]\n"
    )
    unit = next(path for path in _units(text, tmp_path) if "coordinator" in path.name).read_text()
    with _started(unit, tmp_path) as (process, messages):
        assert any("READY=1" in message for message in messages)
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
            if ":\t" in line
        )
        assert (int(status["CapEff"], 16), int(status["CapBnd"], 16), status["NoNewPrivs"]) == (0, 0, "1")
        mounts = Path(f"/proc/{process.pid}/mounts").read_text().splitlines()
        assert [line.split()[3].split(",")[0] for line in mounts if line.split()[1] == "/"][-1] == "ro"
        assert (tmp_path / "state" / "journal").exists()
        process.terminate()
        assert process.wait(timeout=30) == 0


@contextmanager
def _started(unit: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Iterator[str]]]:
    """The process of a unit, and its notifications. `folder` stands for its own directories."""
    credentials, state = folder / "credentials", folder / "state"
    for directory in (credentials, state):
        directory.mkdir()
    for name, source in re.findall(r"^LoadCredential=([^:]+):(.+)$", unit, re.MULTILINE):
        shutil.copy(source, credentials / name)
        assert source not in unit.replace(f"LoadCredential={name}:{source}", ""), "it is read as a credential"
    command = re.search(r"^ExecStart=((?:.*\\\n)*.*)$", unit, re.MULTILINE)
    assert command is not None
    words = shlex.split(command[1].replace("\\\n", "").replace("%d", "/run/credentials"))
    notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notified.bind(str(state / "notify"))
    notified.settimeout(0.5)
    variables = {
        "NOTIFY_SOCKET": str(state / "notify"),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}",
        "XDG_STATE_HOME": str(state),
        "XDG_CACHE_HOME": str(state),
    }
    line = [*(f"{name}={value}" for name, value in variables.items()), sys.executable, "-P", "-m", *words]
    script = _ENTER.format(folder=shlex.quote(str(state)), credentials=credentials, words=shlex.join(line))
    process = subprocess.Popen(["unshare", "--mount", "sh", "-c", script], stdin=subprocess.DEVNULL)
    try:
        yield process, _messages(process, notified)
    finally:
        process.kill()
        process.wait()
        notified.close()


def _messages(process: subprocess.Popen[bytes], notified: socket.socket) -> Iterator[str]:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(TimeoutError):
            yield notified.recv(4096).decode()
