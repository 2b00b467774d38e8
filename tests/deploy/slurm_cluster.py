"""A Slurm cluster on one machine: Debian's programs, each node in namespaces of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.deploy.debian import require
from tests.e2e.commands import ENVIRONMENT
from tests.e2e.namespaces import NamedHost, named_hosts, run_ip
from tests.fake_processes import wait_until

HEAD = "head"
NODES = ("n0", "n1")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "setpriv", "unshare")
_CONF = """\
ClusterName=tests
SlurmctldHost=head
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
GresTypes=gpu
SlurmdParameters=config_overrides
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldTimeout=30
SlurmdTimeout=10
ReturnToService=2
KillWait=30
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
NodeName=n[0-1] CPUs=4 RealMemory=8192 Gres=gpu:2
"""
_GRES = "Name=gpu File=/dev/tty[0-1]\n"
"""Devices that stand for GPUs: Slurm numbers them, and nothing opens them."""
_BOOT = """\
mount --make-rprivate / && mount -t proc proc /proc && mount --bind {hosts} /etc/hosts || exit 99
hostname {name}
for directory in /run /etc/munge /etc/slurm /var/lib/munge /var/log/munge; do
    mount -t tmpfs -o mode=0755 tmpfs $directory || exit 99
done
install -m 0644 {conf}/slurm.conf {conf}/gres.conf /etc/slurm/
install -m 0400 {conf}/munge.key /etc/munge/
mkdir -p /run/munge /run/slurmctld /run/slurmd
munged --force > /dev/null 2>&1 || exit 98
exec {daemon} -D >> {log} 2>&1
"""


class SlurmNode:
    """A host that boots with one of Slurm's daemons, and can lose its power."""

    def __init__(self, host: NamedHost, daemon: str) -> None:
        self.host = host
        self.log = host.home.parent / f"{host.name}.log"
        self._daemon = daemon
        self._process: subprocess.Popen[bytes] | None = None

    def boot(self) -> None:
        """Returns when the daemon runs."""
        folder = self.host.home.parent
        logged = self._logged()
        script = _BOOT.format(
            hosts=folder / "hosts",
            name=self.host.name,
            conf=folder,
            daemon=self._daemon,
            log=self.log,
        )
        run_ip("-n", self.host.namespace, "link", "set", "lan", "up")
        # The death of the first process of a process namespace ends all others.
        self._process = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig=KILL", "nsenter", f"--net=/run/netns/{self.host.namespace}"),
                *("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "sh", "-c", script),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_until(lambda: self._logged() > logged, timeout_s=60)

    def _logged(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def lose_power(self) -> None:
        """No process of the node goes on, and no packet says so."""
        run_ip("-n", self.host.namespace, "link", "set", "lan", "down")
        self.shut_down()

    def shut_down(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def command(self, *words: str) -> tuple[str, ...]:
        """A command line that runs a command on this node."""
        assert self._process is not None, f"{self.host.name} is off"
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        assert children, f"{self.host.name} ended: {self.log.read_text()[-2000:]}"
        enter = ("nsenter", f"--target={children[0]}", "--mount", "--pid", "--net", "--uts")
        return (*enter, "env", f"--chdir={self.host.home}", *words)


class SlurmCluster:
    """A controller, `head`, on which commands are typed, and two nodes."""

    def __init__(self, hosts: Mapping[str, NamedHost], folder: Path) -> None:
        self.folder = folder
        self.head = SlurmNode(hosts[HEAD], "slurmctld")
        self.nodes = {name: SlurmNode(hosts[name], "slurmd") for name in NODES}

    async def run(self, line: str, *, timeout_s: float = 60.0) -> str:
        """The output of a line of a shell on the head; fails the test unless it ends with 0."""
        code, output = await self.type(line, timeout_s=timeout_s)
        assert code == 0, f"{line}: exit code {code}\n{output}"
        return output

    async def type(self, line: str, *, timeout_s: float = 60.0) -> tuple[int, str]:
        """Exit code and output of a line of a shell on the head."""
        environment = {**os.environ, **ENVIRONMENT, "PATH": self.path, "HOME": str(self.head.host.home)}
        process = await asyncio.create_subprocess_exec(
            *self.head.command("sh", "-c", line),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
        )
        try:
            async with asyncio.timeout(timeout_s):
                output, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            pytest.fail(f"{line}: still runs after {timeout_s:g} s")
        assert process.returncode is not None
        return process.returncode, output.decode()

    @property
    def path(self) -> str:
        return f"{self.folder}/bin:/usr/sbin:/usr/bin:/sbin:/bin"

    async def until(self, line: str, expected: str, *, timeout_s: float = 60.0) -> None:
        """Wait until a line of a shell on the head puts this out."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while (found := (await self.type(line))[1].strip()) != expected:
            if asyncio.get_running_loop().time() > deadline:
                pytest.fail(f"{line}: {found!r}, not {expected!r} after {timeout_s:g} s\n{self.logs()}")
            await asyncio.sleep(0.2)

    def logs(self) -> str:
        texts = (path.read_text(errors="replace") for path in sorted(self.folder.rglob("*.log")))
        return "\n".join(text[-3000:] for text in texts)


@asynccontextmanager
async def slurm_cluster(folder: Path) -> AsyncIterator[SlurmCluster]:
    """A cluster whose nodes are idle; skips the test without Slurm. Programs in `folder`/bin are found."""
    require(*PROGRAMS)
    for name, text in (("slurm.conf", _CONF), ("gres.conf", _GRES)):
        (folder / name).write_text(text)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    with named_hosts([HEAD, *NODES], folder) as hosts:
        cluster = SlurmCluster(hosts, folder)
        nodes = (cluster.head, *cluster.nodes.values())
        try:
            for node in nodes:
                node.boot()
            await cluster.until("sinfo -h -o %D%T", "2idle")
            yield cluster
        finally:
            for node in nodes:
                node.shut_down()
