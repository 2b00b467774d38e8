"""A machine with a systemd of its own: namespaces in which it is process 1, over a copy of this root.

What it writes stays in memory. It starts no service of this machine, and has no network beside its loopback.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.deploy.debian import require
from tests.fake_processes import ROOT

_BOOT_TIMEOUT_S = 60.0
_COMMAND_TIMEOUT_S = 300.0
USER = "stageline"
_PYTHON = "/opt/python"
_PACKAGES = "/opt/packages"
_SOURCE = "/opt/stageline"
# Units are confined: they see neither home directories nor the temporary files of others.
_BOUND = {_PYTHON: sys.base_prefix, _PACKAGES: sysconfig.get_path("purelib"), _SOURCE: str(ROOT)}
_PROGRAM = f"""\
#!/bin/sh
export LD_LIBRARY_PATH={_PYTHON}/lib PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH={_SOURCE}:{_SOURCE}/proto:{_PACKAGES}
exec {_PYTHON}/bin/python3.{sys.version_info.minor} -P -m stageline "$@"
"""
_TARGET = """\
[Unit]
Description=Nothing but the journal
Requires=systemd-journald.service
After=systemd-journald.service
"""
_BOOT = """\
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs {layers}
cd {layers} && mkdir upper work root
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root
cd root
mount -t proc proc proc
mount -o bind,ro proc/sys proc/sys
mount -t sysfs -o ro sysfs sys
mount --rbind /dev dev
for folder in run tmp var/log home; do mount -t tmpfs tmpfs $folder; done
mount -t cgroup2 cgroup2 sys/fs/cgroup
for folder in lib etc; do rm -rf $folder/systemd/system/*.wants; done
rm -rf etc/systemd/system && mkdir -p etc/systemd/system run/lock
cp {files}/only.target etc/systemd/system/
install -m 755 {files}/stageline usr/local/bin/stageline
{binds}
ip link set lo up
exec chroot . env -i container=stageline PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \\
    /lib/systemd/systemd --system --unit=only.target --log-target=null --show-status=0
"""


class SystemdMachine:
    """Runs command lines as root of the machine."""

    def __init__(self, process_1: int) -> None:
        self._enter = ["nsenter", f"--target={process_1}", "--all", "--root", "--wd"]

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a shell command line in the home directory of root.

        Raises:
            subprocess.TimeoutExpired: After 5 minutes.
        """
        return subprocess.run(
            [*self._enter, "sh", "-c", f"export HOME=/root COLUMNS=160\ncd /root\n{line}"],
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )

    def output(self, line: str) -> str:
        """Standard output of a command that must succeed."""
        finished = self.run(line)
        assert finished.returncode == 0, f"{line}: {finished.stdout}{finished.stderr}{self.journal()}"
        return finished.stdout

    def journal(self) -> str:
        return self.run("journalctl --no-pager -n 60").stdout


@contextmanager
def booted(folder: Path) -> Iterator[SystemdMachine]:
    """A machine with Stageline installed and a user for it; skips the test without root or programs."""
    require("curl", "ip", "nsenter", "systemd-analyze", "unshare")
    layers = folder / "layers"
    layers.mkdir()
    (folder / "only.target").write_text(_TARGET)
    (folder / "stageline").write_text(_PROGRAM)
    with _control_group() as group:
        joining = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        namespaces = ("--pid", "--mount", "--uts", "--ipc", "--net", "--cgroup")
        boot = ("unshare", *namespaces, "--fork", "--kill-child", "sh", "-c", _boot_script(folder, layers))
        process = subprocess.Popen(
            ["sh", "-c", joining, "sh", *boot],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            machine = SystemdMachine(_process_1(process))
            _await_boot(machine, process)
            machine.output(f"id {USER} || useradd --system {USER}")
            yield machine
        finally:
            process.kill()
            process.communicate()


def _boot_script(folder: Path, layers: Path) -> str:
    binds = (
        f"mkdir -p .{target} && mount --bind {shlex.quote(source)} .{target}"
        for target, source in _BOUND.items()
    )
    return _BOOT.format(
        layers=shlex.quote(str(layers)), files=shlex.quote(str(folder)), binds="\n".join(binds)
    )


@contextmanager
def _control_group() -> Iterator[Path]:
    """The root of the machine's control groups."""
    top = Path("/sys/fs/cgroup")
    group = (top if (top / "cgroup.controllers").exists() else top / "unified") / f"stageline-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """Remove a group whose processes are being killed, and those below it."""
    deadline = time.monotonic() + _BOOT_TIMEOUT_S
    while group.exists():
        for each in sorted((group, *group.rglob("*/")), reverse=True):
            with suppress(OSError):
                each.rmdir()
        assert time.monotonic() < deadline, f"{group} has processes"
        time.sleep(0.02)


def _process_1(process: subprocess.Popen[str]) -> int:
    """The process that becomes systemd, as this machine numbers it."""
    deadline = time.monotonic() + _BOOT_TIMEOUT_S
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None and time.monotonic() < deadline:
        if found := children.read_text().split():
            return int(found[0])
        time.sleep(0.02)
    raise AssertionError(f"no process 1: {process.communicate()[1]}")


def _await_boot(machine: SystemdMachine, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + _BOOT_TIMEOUT_S
    state = ""
    while process.poll() is None and time.monotonic() < deadline:
        state = machine.run("systemctl is-system-running").stdout.strip()
        if state in ("running", "degraded"):
            return
        time.sleep(0.1)
    process.kill()
    raise AssertionError(f"systemd did not start, its state is {state!r}: {process.communicate()[1]}")
